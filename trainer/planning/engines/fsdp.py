"""FSDP2, as Accelerate applies it: `fully_shard` on every block, on the embedding, and on the last norm with lm_head.

A group is gathered for its forward and again for its backward, while its neighbour is gathered already: two blocks are
gathered in backward, at the end the first block and the embedding; with `prefetch_two_blocks` three, until fewer are
left. The head stays gathered from its forward to its backward; when the forward ends, the buffer it was gathered into
is alive as well. In a step that scores the reference first (DPO under adapters) the head stays from that forward on,
and the last buffer is a block's. A tied head is one group with the embedding and stays for the whole step, and so does
the root of a trainer that does not split its tables. The gradients of a group are copied into one reduce-scatter input
in the reduce type, freed after the next group. Without synchronisation (accumulation) whole gradients wait in the
reduce type for the last micro batch, which reduces them group by group. `fsdp_grad_op` keeps everything gathered from
forward to backward. gloo copies the input of a reduce-scatter.

FSDP1 keeps one flat parameter a group: no copies around a reduction, no block gathered at the loss, none ahead.
"""

from msgspec.structs import replace

from shardwise.trainer.planning.configuration import SHARDWISE, Configuration
from shardwise.trainer.planning.engines.engine import (
    Event,
    Gathered,
    PlannedEngine,
    ShardingMemory,
    StateMemory,
    States,
    Transfers,
    Widths,
)
from shardwise.trainer.planning.engines.parts import (
    all_blocks,
    block_shard,
    gathered_block,
    gathered_kinds,
    largest_shard,
    shards_of_kinds,
    share,
)
from shardwise.trainer.planning.policy.precision_policy import (
    Dims,
    PrecisionPolicy,
    adapter_parameters,
    traced_adapters,
)
from shardwise.trainer.planning.policy.reference_trainers import reduces_every_micro_batch
from shardwise.trainer.spec.model.blocks import TracedBlocks
from shardwise.trainer.spec.strategy import Method, Strategy


class Fsdp(PlannedEngine):
    """FSDP2, and FSDP1 where the reference trainer uses it."""

    def builds_whole_model(self, configuration: Configuration) -> bool:
        return False

    def uneven_share(self, policy: PrecisionPolicy, dims: Dims) -> int | None:
        is_cut_by_rows = not policy.is_frozen and not policy.reference.uses_fsdp1
        return largest_shard(dims, policy.shard_degree) if is_cut_by_rows else None

    def updated_at_once(
        self, configuration: Configuration, policy: PrecisionPolicy, dims: Dims, *, num_trained: int
    ) -> int:
        return share(num_trained, policy.shard_degree)

    def offloaded(self, states: States, strategy: Strategy, policy: PrecisionPolicy) -> States:
        """Shards and gradients in pinned RAM; the optimizer's state is created by torch and stays pageable."""
        partition = policy.trained_bytes * states.num_trained // policy.shard_degree
        return States(
            num_trained=states.num_trained,
            saved=states.saved,
            weights=0,
            quant_state=0,
            adapters=0,
            pinned=states.adapters + states.weights + partition,
            pageable=states.optimizer_state + states.optimizer_temporaries,
        )

    def memory(self, configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> ShardingMemory:
        """Gathers and reductions of neighbouring groups overlap, so two are alive at a time."""
        c, reference, block = policy.compute_bytes, policy.reference, gathered_block(configuration, policy, dims)
        root = c * dims.root
        keeps = configuration.strategy.sharding.facts.keeps_weights_gathered
        whole = all_blocks(configuration, policy, dims) if keeps else 0
        ahead = 2 if configuration.prefetch_two_blocks else reference.prefetched_blocks
        prefetched = min(dims.layers - 1, ahead) * block
        in_forward = 0 if whole else _in_forward(configuration, policy, dims, block)
        if reference.uses_fsdp1:
            return ShardingMemory(
                root=root,
                gathered_forward=root + whole,
                gathered_loss=root + whole,
                gathered_head=root + whole,
                gathered_top=root + (whole or block + prefetched),
                gathered_bottom=root + block,
                gathered_end=root,
                blocks_ahead=ahead,
                retains_frozen_inputs=reference.retains_frozen_inputs,
            )
        degree = policy.shard_degree
        trained = adapter_parameters(configuration, dims) if policy.is_frozen else degree * block_shard(dims, degree)
        top = whole or block + prefetched
        of_blocks = ShardingMemory(
            blocks_ahead=ahead,
            freed_by_last=min(whole, block),
            freed_before_first=max(0, top - 2 * block),
            freed_before_second=max(0, whole - 3 * block),
            reduce_block=policy.reduce_bytes * trained,
            retains_frozen_inputs=reference.retains_frozen_inputs,
        )
        if dims.is_tied or not reference.splits_tables:
            return replace(
                of_blocks,
                root=root,
                gathered_forward=root + (whole or block),  # what the last block was gathered into stays for a moment
                gathered_in_forward=root + in_forward if in_forward else 0,
                gathered_loss=root + whole,
                gathered_head=root + (whole or block),
                gathered_top=root + top,
                gathered_bottom=root + block,
            )
        head, embedding = c * dims.head_group, c * dims.embedding
        rest = root - head - embedding
        stays = whole + embedding if whole else 0
        buffer = block if configuration.runs_reference and not whole else head
        held = head if configuration.runs_reference else 0
        return replace(
            of_blocks,
            root=rest,
            gathered_forward=rest + head + buffer + stays,  # the group, and what the last one was gathered into
            gathered_in_forward=rest + held + in_forward if in_forward else 0,
            gathered_loss=rest + head + stays,
            gathered_head=rest + head + (stays or block),
            gathered_top=rest + (stays or block + prefetched),
            gathered_bottom=rest + block + embedding,
            gathered_end=rest,
            reduce_head=0 if policy.is_frozen else policy.reduce_bytes * dims.head,
        )

    def waits_for_last_micro_batch(self, configuration: Configuration, policy: PrecisionPolicy) -> bool:
        is_accumulating = configuration.accumulation > 1 and not policy.updates_in_backward
        return is_accumulating and not reduces_every_micro_batch(configuration)

    def earlier_gradients(
        self, configuration: Configuration, policy: PrecisionPolicy, num_trained: int, gradients: int
    ) -> int:
        return gradients if reduces_every_micro_batch(configuration) else policy.reduce_bytes * num_trained

    def gradient_widths(self, policy: PrecisionPolicy, *, is_added: bool) -> Widths:
        return Widths(made=policy.compute_bytes, fresh=0)  # whole, until their group is reduced

    def table_gradients(self, step: StateMemory) -> int:
        """The whole gradient of the last group, and the input of its reduce-scatter."""
        policy, dims = step.policy, step.dims
        if not policy.is_cuda:  # gloo's copy of the reduce-scatter's input, by when only the head's gradient is left
            return 2 * policy.master_bytes * dims.root + policy.compute_bytes * dims.embedding
        if policy.reference.uses_fsdp1:
            return policy.compute_bytes * dims.root
        group = dims.root - (dims.head_group if step.sharding.reduce_head else 0)
        waits = self.waits_for_last_micro_batch(step.configuration, policy)
        return (policy.compute_bytes + (0 if waits else policy.reduce_bytes)) * group

    def traced_block(self, step: StateMemory, traced: TracedBlocks, place: int) -> Gathered:
        configuration, policy, sharding = step.configuration, step.policy, step.sharding
        gathered = gathered_kinds(configuration, policy, step.dims)
        first = 0 if configuration.strategy.sharding.facts.keeps_weights_gathered else place - sharding.blocks_ahead
        of_blocks = sum(gathered[each] for each in traced.order[max(0, first) : place + 1])
        root = sharding.gathered_bottom - gathered[traced.order[0]] if place == 0 else sharding.root
        reduced = sharding.reduce_head
        if place < len(traced.order) - 1:
            reduced = _reduced(configuration, policy, step.dims)[traced.order[place + 1]]
        return Gathered(weights=max(root, sharding.root) + of_blocks, reduced=reduced)

    def load(self, step: StateMemory) -> Event:
        """fully_shard moves a whole group to the device before it cuts its shard; ours cuts a model without memory."""
        policy, dims = step.policy, step.dims
        # A rank of ours loads its shards alone (runtime/models); FP8 and QLoRA may build the whole model.
        may_build = policy.is_fp8 or step.configuration.method is Method.QLORA
        if policy.reference.name == SHARDWISE and not may_build:
            return {"gathered_weights": 0}
        group = dims.parameters if policy.reference.loads_whole_model else max(dims.block, dims.root)
        return {"gathered_weights": policy.weight_bytes * group}

    def update(self, step: StateMemory, event: Event) -> Event:
        return event

    def transfers(self, configuration: Configuration) -> Transfers:
        return Transfers(
            gathers=1 if configuration.strategy.sharding.facts.keeps_weights_gathered else 2,
            reduces_to_shards=True,
            reduces_every_micro_batch=reduces_every_micro_batch(configuration),
        )


def _in_forward(configuration: Configuration, policy: PrecisionPolicy, dims: Dims, block: int) -> int:
    """Bytes of the block at work, of what it was gathered into, and of those ahead of it; 0 where it is no peak.

    What is trained whole has its peak in the backward, and the forwards of DPO at the head. Seen in dry runs of our own
    runtime alone.
    """
    is_peak = policy.is_frozen and not configuration.runs_reference and policy.reference.name == SHARDWISE
    if not configuration.prefetch_two_blocks and not is_peak:
        return 0
    ahead = 2 if configuration.prefetch_two_blocks else 1
    return (2 + min(ahead, dims.layers - 1)) * block


def _reduced(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> tuple[int, ...]:
    """Bytes of the reduce-scatter input of a block of each traced kind."""
    assert dims.traced is not None
    degree = policy.shard_degree
    if policy.is_frozen:
        elements = [
            sum(each.num_elements for each in kind) for kind in traced_adapters(dims.traced, configuration.method)
        ]
    else:
        elements = [degree * each for each in shards_of_kinds(dims, degree)]
    return tuple(policy.reduce_bytes * each for each in elements)
