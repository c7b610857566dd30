"""DeepSpeed: the model in the computing type, and a flat partition of masters, gradients and optimizer state.

ZeRO-1 and 2 allocate two buckets of `reduce_bucket_size` elements for each backward (overlap_comm) and convert one to
fp32 for the reduction; ZeRO-3 owns one fp32 bucket and a flat buffer of its gradient partition for the whole run, and
keeps up to `stage3_max_live_parameters` gathered, prefetched ones included (0.19.8, stage_1_and_2.py `setup_buckets`,
stage3.py `_setup_for_real_optimizer`). ZeRO-2 and 3 reduce with each micro batch, ZeRO-1 once a step.
"""

from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.engines.engine import Event, ShardingMemory, StateMemory, States, Transfers
from shardwise.trainer.planning.engines.parts import all_blocks, gathered_block, share
from shardwise.trainer.planning.engines.replicated import WholeGradients
from shardwise.trainer.planning.policy.precision_policy import Dims, PrecisionPolicy
from shardwise.trainer.planning.policy.reference_trainers import reduces_every_micro_batch
from shardwise.trainer.spec.engines import SUB_GROUP_BUFFERS, UPDATE_WINDOW_BYTES, Offload, sub_group_elements
from shardwise.trainer.spec.plan import Buckets
from shardwise.trainer.spec.strategy import Strategy

_NORM_BYTES = 8  # DeepSpeed 0.19.8, stage_1_and_2.py, get_grad_norm_direct


class Zero(WholeGradients):
    """ZeRO-1, 2 and 3."""

    def builds_whole_model(self, configuration: Configuration) -> bool:
        return not configuration.strategy.sharding.shards_weights

    def updated_at_once(
        self, configuration: Configuration, policy: PrecisionPolicy, dims: Dims, *, num_trained: int
    ) -> int:
        """Under ZeRO-3 a sub-group; the weight that fills one may be the largest, as where the head follows blocks."""
        partition = share(num_trained, policy.shard_degree)
        if not configuration.strategy.sharding.shards_weights:
            return partition
        piece = share(dims.largest_tensor, policy.shard_degree)
        size = policy.reference.sub_group_elements or sub_group_elements(
            partition=partition, piece=piece, num_bytes=SUB_GROUP_BUFFERS * policy.master_bytes
        )
        return min(partition, size + piece)

    def offloaded(self, states: States, strategy: Strategy, policy: PrecisionPolicy) -> States:
        """Masters, state and an fp32 gradient in pinned RAM; with NVMe RAM has a window of buffers."""
        offload, degree = strategy.offload, policy.shard_degree
        partition = policy.trained_bytes * states.num_trained // degree
        moved = states.adapters + states.weights if offload.moves_parameters else 0
        state, nvme = states.master_weights + states.optimizer_state + partition, 0
        pinned = state + moved + policy.compute_bytes * states.num_trained // degree
        if offload.uses_nvme:
            nvme = state + (moved if offload is Offload.NVME_ALL else 0)
            pinned = min(pinned, UPDATE_WINDOW_BYTES + partition)
        stays = 0 if offload.moves_parameters else 1
        return States(
            num_trained=states.num_trained,
            saved=states.saved,
            weights=stays * states.weights,
            quant_state=stays * states.quant_state,
            adapters=stays * states.adapters,
            gradients=0 if strategy.sharding.shards_gradients else states.gradients,
            pinned=pinned,
            pageable=0,
            nvme=nvme,
        )

    def memory(self, configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> ShardingMemory:
        buckets, is_offloaded = configuration.buckets or default_buckets(dims), _is_offloaded(configuration)
        if configuration.strategy.sharding.shards_weights:
            return _gathering(configuration, policy, dims, buckets)
        elements = buckets.reduce_elements
        to_fp32 = 4 * elements if policy.compute_bytes != 4 else 0
        largest = policy.compute_bytes * dims.largest_tensor  # one gradient being copied into a bucket
        if is_offloaded:
            largest += 4 * dims.largest_tensor  # fp32 copy on its way to the host
        return ShardingMemory(buffers_backward=2 * policy.compute_bytes * elements + to_fp32 + largest)

    def load(self, step: StateMemory) -> Event:
        policy = step.policy
        if step.configuration.strategy.sharding.shards_weights:
            return {"gathered_weights": policy.weight_bytes * step.dims.largest_tensor}
        if not step.states.master_weights:
            return {}
        # Zeros in the masters' type that initialise the optimizer's state.
        return {"gradient_copies": share(policy.master_bytes * step.states.num_trained, policy.shard_degree)}

    def update(self, step: StateMemory, event: Event) -> Event:
        policy, states, sharding = step.policy, step.states, step.configuration.strategy.sharding
        if not states.master_weights:
            return event
        # When the backward ends, each rank keeps the gradients of its partition (also ZeRO-1). Those that are updated
        # at once are copied into one flat tensor, and that into one of the masters' type, before either is freed.
        partition = share(states.num_trained, policy.shard_degree)
        reduced = {**event, "gradients": min(states.gradients, policy.compute_bytes * partition)}
        flat = policy.compute_bytes if policy.compute_bytes != policy.master_bytes else 0
        at_once = self.updated_at_once(step.configuration, policy, step.dims, num_trained=states.num_trained)
        copied = {**reduced, "gradient_copies": (flat + policy.master_bytes) * at_once}
        if policy.is_frozen:
            return copied
        # Before that the norm is taken, of each gradient in double precision; under ZeRO-3 of a rank's piece.
        pieces = policy.shard_degree if sharding.shards_weights else 1
        doubles = _NORM_BYTES * min(partition, share(step.dims.largest_tensor, pieces))
        return max(copied, {**reduced, "optimizer_temporaries": 0, "gradient_copies": doubles}, key=_total)

    def transfers(self, configuration: Configuration) -> Transfers:
        sharding = configuration.strategy.sharding
        return Transfers(
            gathers=2 if sharding.shards_weights else 0,
            gathers_updated=sharding.shards_gradients and not sharding.shards_weights,
            reduces_to_shards=sharding.shards_gradients,
            reduces_every_micro_batch=sharding.shards_gradients or reduces_every_micro_batch(configuration),
        )


def default_buckets(dims: Dims) -> Buckets:
    """The sizes that DeepSpeed's files under ds_configs/ end up with for a candidate that plans none."""
    square = dims.hidden * dims.hidden
    return Buckets(
        reduce_elements=square,
        allgather_elements=200_000_000,
        prefetch_elements=9 * square // 10,
        live_parameters=1_000_000_000,
        persistence_elements=10 * dims.hidden,
    )


def _gathering(configuration: Configuration, policy: PrecisionPolicy, dims: Dims, buckets: Buckets) -> ShardingMemory:
    """ZeRO-3: the layers that run are gathered even beyond the limit of live parameters."""
    block, c = gathered_block(configuration, policy, dims), policy.compute_bytes
    head = c * max(dims.embedding, dims.head)
    whole = all_blocks(configuration, policy, dims) + c * dims.root
    at_work = max(block, head) + c * buckets.prefetch_elements
    gathered = min(whole, max(at_work, c * buckets.live_parameters))
    return ShardingMemory(
        gathered_forward=gathered,
        gathered_loss=gathered,
        gathered_head=gathered,
        gathered_top=gathered,
        gathered_bottom=gathered,
        gathered_end=min(gathered, head + block),
        buffers=4 * buckets.reduce_elements,
        buffers_backward=c * dims.largest_tensor + (4 * dims.largest_tensor if _is_offloaded(configuration) else 0),
        holds_gradients=not _is_offloaded(configuration),
    )


def _is_offloaded(configuration: Configuration) -> bool:
    return configuration.strategy.offload is not Offload.NONE


def _total(event: Event) -> int:
    return sum(event.values())
