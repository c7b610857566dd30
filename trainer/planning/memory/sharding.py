"""Bytes of a sharding engine besides its states: gathered parameters, gradients in transfer, buckets.

FSDP2, as Accelerate applies it: `fully_shard` on every block, on the embedding, and on the last norm with lm_head. A
group is gathered for its forward and again for its backward, while its neighbour is gathered already: two blocks are
gathered in backward, at the end the first block and the embedding; with `prefetch_two_blocks` three, until fewer are
left. The head stays gathered from its forward to its
backward; when the forward ends, the buffer it was gathered into is alive as well. In a step that scores the reference
first (DPO under adapters) the head stays from that forward on, and the last buffer is a block's. A tied head is one
group with the embedding and stays for the whole step, and so does the root of a trainer that does not split its tables.
The gradients of a group are copied into one reduce-scatter input in the reduce type, freed after the next group.
Without synchronisation (accumulation) whole gradients wait in the reduce type for the last micro batch. `fsdp_grad_op`
keeps everything gathered from forward to backward. gloo copies the input of a reduce-scatter.

FSDP1 keeps one flat parameter a group: no copies around a reduction, no block gathered at the loss, none ahead.

DeepSpeed: ZeRO-1 and 2 allocate two buckets of `reduce_bucket_size` elements for each backward (overlap_comm) and
convert one to fp32 for the reduction; ZeRO-3 owns one fp32 bucket and a flat buffer of its gradient partition for the
whole run, and keeps up to `stage3_max_live_parameters` gathered, prefetched ones included (0.19.8, stage_1_and_2.py
`setup_buckets`, stage3.py `_setup_for_real_optimizer`).

DDP's buckets are the gradients (`gradient_as_bucket_view`), so they stay between steps. Micro batches without
synchronisation accumulate outside them, and each sum is freed when the last micro batch copies it into its bucket.

FSDP2 distributes the rows of a tensor. A tensor whose rows do not divide evenly is padded to the number of ranks times
the largest share: 8 experts over 64 ranks are 64 rows, 56 of them empty. The first rank then has a row of every tensor,
and a gathered or reduced tensor is as large as its padded form.
"""

from shardwise.trainer.planning.configuration import SHARDWISE, Configuration, once
from shardwise.trainer.planning.memory.precision_policy import (
    Dims,
    PrecisionPolicy,
    adapter_parameters,
    traced_adapters,
)
from shardwise.trainer.planning.memory.reference_trainers import reduces_every_micro_batch
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.plan import Buckets
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.value import Value


def share(num_elements: int, degree: int) -> int:
    """The largest share of a rank."""
    return -(-num_elements // degree)


@once
def block_shard(dims: Dims, degree: int) -> int:
    """Elements of one block on the first rank, of the largest kind."""
    if dims.traced is not None:
        return max(shards_of_kinds(dims, degree))
    linear = sum(
        share(copies, degree) * num_inputs * num_outputs if copies > 1 else share(num_outputs, degree) * num_inputs
        for num_inputs, num_outputs, copies in dims.matrices
    )
    return linear + share(dims.block - dims.linear, degree)


@once
def shards_of_kinds(dims: Dims, degree: int) -> tuple[int, ...]:
    """Elements of a block of each traced kind on the first rank."""
    assert dims.traced is not None
    return tuple(
        sum(count * share(rows, degree) * elements for rows, elements, count in kind.tensors)
        for kind in dims.traced.kinds
    )


def table_shard(dims: Dims, degree: int) -> int:
    """Elements of the embedding, or of the head, on the first rank."""
    return share(dims.vocab, degree) * dims.hidden


def largest_shard(dims: Dims, degree: int) -> int:
    """Elements of the whole model on the first rank."""
    num_tables = 1 if dims.is_tied else 2
    if dims.traced is None:
        rest, blocks = dims.parameters - dims.layers * dims.block, dims.layers * block_shard(dims, degree)
    else:
        counts = (count for count, _ in dims.kinds)
        rest = dims.root
        blocks = sum(count * each for count, each in zip(counts, shards_of_kinds(dims, degree), strict=True))
    rest -= num_tables * dims.embedding
    return blocks + num_tables * table_shard(dims, degree) + share(max(0, rest), degree)


class ShardingMemory(Value, frozen=True, kw_only=True):
    """Bytes on one rank."""

    root: int = 0  # gathered parameters outside the blocks that stay for the whole step
    gathered_forward: int = 0  # when the forward ends
    gathered_in_forward: int = 0  # while a block runs forward: frozen ones of few tokens have the peak there
    gathered_loss: int = 0  # backward of cross-entropy
    gathered_head: int = 0  # backward of lm_head
    gathered_top: int = 0  # backward of the last block
    gathered_bottom: int = 0  # backward of the first
    gathered_end: int = 0
    freed_by_last: int = 0  # when the last block has run backwards, of what stays gathered until then
    freed_before_first: int = 0  # when only the first two are left
    freed_before_second: int = 0  # when only the first three are left
    buffers: int = 0  # for the whole run
    buffers_backward: int = 0  # from the head's backward to the end of backward
    reduce_head: int = 0  # what the head's gradient is copied into to be reduced, before the blocks run backwards
    reduce_block: int = 0  # the same for a block's gradients
    holds_gradients: bool = False  # from step to step


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


def sharding_memory(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> ShardingMemory:
    """Bytes on one rank that are due to sharding."""
    sharding = configuration.strategy.sharding
    if policy.uses_fsdp:
        return _fsdp(configuration, policy, dims)
    if sharding.facts.deepspeed_stage == 3:
        return _zero3(configuration, policy, dims)
    if policy.uses_deepspeed:
        buckets = configuration.buckets or default_buckets(dims)
        elements = buckets.reduce_elements
        to_fp32 = 4 * elements if policy.compute_bytes != 4 else 0
        largest = policy.compute_bytes * dims.largest_tensor  # one gradient being copied into a bucket
        if configuration.strategy.offload is not Offload.NONE:
            largest += 4 * dims.largest_tensor  # fp32 copy on its way to the host
        return ShardingMemory(buffers_backward=2 * policy.compute_bytes * elements + to_fp32 + largest)
    return ShardingMemory(holds_gradients=sharding.facts.keeps_gradient_buckets)


def accumulated_gradients(
    configuration: Configuration, policy: PrecisionPolicy, num_trained: int, gradients: int
) -> int:
    """Gradients of earlier micro batches, alive in every forward and backward but the first."""
    if configuration.accumulation == 1 or policy.updates_in_backward:
        return 0
    if policy.uses_fsdp:
        return gradients if reduces_every_micro_batch(configuration) else policy.reduce_bytes * num_trained
    return (2 if configuration.strategy.sharding.facts.keeps_gradient_buckets else 1) * gradients


def prefetched_blocks(configuration: Configuration, policy: PrecisionPolicy) -> int:
    """Blocks that FSDP2 gathers in backward ahead of the one at work."""
    return 2 if configuration.prefetch_two_blocks else policy.reference.prefetched_blocks


def _gathered_block(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    if dims.traced is not None:
        return max(gathered_kinds(configuration, policy, dims))
    adapters = policy.compute_bytes * adapter_parameters(configuration, dims)
    if configuration.method is Method.QLORA:
        return dims.linear // 2 + policy.compute_bytes * (dims.block - dims.linear) + adapters
    padded = policy.shard_degree * block_shard(dims, policy.shard_degree) if policy.uses_fsdp else dims.block
    return policy.compute_bytes * max(padded, dims.block) + adapters


def _all_blocks(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    if dims.traced is None:
        return dims.layers * _gathered_block(configuration, policy, dims)
    of_kinds = gathered_kinds(configuration, policy, dims)
    return sum(of_kinds[kind] for kind in dims.traced.order)


def gathered_kinds(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> tuple[int, ...]:
    """Bytes of a gathered block of each traced kind."""
    assert dims.traced is not None
    adapters = traced_adapters(dims.traced, configuration.method)
    found = []
    for kind, shard, adapted in zip(
        dims.traced.kinds, shards_of_kinds(dims, policy.shard_degree), adapters, strict=True
    ):
        elements = policy.shard_degree * shard if policy.uses_fsdp else kind.num_parameters
        num_bytes = policy.compute_bytes * (elements + sum(each.num_elements for each in adapted))
        if configuration.method is Method.QLORA:
            packed = sum(each.num_parameters for each in kind.linears if each.is_linear_module)
            num_bytes -= packed * policy.compute_bytes - packed // 2
        found.append(num_bytes)
    return tuple(found)


def reduced_kinds(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> tuple[int, ...]:
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


def _fsdp(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> ShardingMemory:
    """fully_shard or FSDP1; gathers and reductions of neighbouring groups overlap, so two are alive at a time."""
    c, reference, block = policy.compute_bytes, policy.reference, _gathered_block(configuration, policy, dims)
    root = c * dims.root
    whole = (
        _all_blocks(configuration, policy, dims) if configuration.strategy.sharding.facts.keeps_weights_gathered else 0
    )
    prefetched = min(dims.layers - 1, prefetched_blocks(configuration, policy)) * block
    # The block, what it was gathered into, and those ahead of it. What is trained whole has its peak in the backward,
    # and the forwards of DPO at the head. Seen in dry runs of our own runtime alone.
    ahead = 2 if configuration.prefetch_two_blocks else 1
    is_peak = policy.is_frozen and not configuration.runs_reference and reference.name == SHARDWISE
    is_counted = not whole and (configuration.prefetch_two_blocks or is_peak)
    in_forward = (2 + min(ahead, dims.layers - 1)) * block if is_counted else 0
    degree = policy.shard_degree
    trained = adapter_parameters(configuration, dims) if policy.is_frozen else degree * block_shard(dims, degree)
    reduce_block = policy.reduce_bytes * trained
    if reference.uses_fsdp1:
        return ShardingMemory(
            root=root,
            gathered_forward=root + whole,
            gathered_loss=root + whole,
            gathered_head=root + whole,
            gathered_top=root + (whole or block + prefetched),
            gathered_bottom=root + block,
            gathered_end=root,
        )
    if dims.is_tied or not reference.splits_tables:
        return ShardingMemory(
            root=root,
            gathered_forward=root + (whole or block),  # what the last block was gathered into stays for a moment
            gathered_in_forward=root + in_forward if in_forward else 0,
            gathered_loss=root + whole,
            gathered_head=root + (whole or block),
            gathered_top=root + (whole or block + prefetched),
            gathered_bottom=root + block,
            freed_by_last=min(whole, block),
            freed_before_first=max(0, (whole or block + prefetched) - 2 * block),
            freed_before_second=max(0, whole - 3 * block),
            reduce_block=reduce_block,
        )
    head, embedding = c * dims.head_group, c * dims.embedding
    rest = root - head - embedding
    stays = whole + embedding if whole else 0
    buffer = block if configuration.runs_reference and not whole else head
    return ShardingMemory(
        root=rest,
        gathered_forward=rest + head + buffer + stays,  # the group, and what the last one was gathered into
        gathered_in_forward=rest + (head if configuration.runs_reference else 0) + in_forward if in_forward else 0,
        gathered_loss=rest + head + stays,
        gathered_head=rest + head + (stays or block),
        gathered_top=rest + (stays or block + prefetched),
        gathered_bottom=rest + block + embedding,
        gathered_end=rest,
        freed_by_last=min(whole, block),
        freed_before_first=max(0, (whole or block + prefetched) - 2 * block),
        freed_before_second=max(0, whole - 3 * block),
        reduce_head=0 if policy.is_frozen else policy.reduce_bytes * dims.head,
        reduce_block=reduce_block,
    )


def _zero3(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> ShardingMemory:
    buckets = configuration.buckets or default_buckets(dims)
    block, c = _gathered_block(configuration, policy, dims), policy.compute_bytes
    head = c * max(dims.embedding, dims.head)
    whole = _all_blocks(configuration, policy, dims) + c * dims.root
    # The layers that run are gathered even beyond the limit.
    at_work = max(block, head) + c * buckets.prefetch_elements
    gathered = min(whole, max(at_work, c * buckets.live_parameters))
    largest = 4 * dims.largest_tensor if configuration.strategy.offload is not Offload.NONE else 0
    return ShardingMemory(
        gathered_forward=gathered,
        gathered_loss=gathered,
        gathered_head=gathered,
        gathered_top=gathered,
        gathered_bottom=gathered,
        gathered_end=min(gathered, head + block),
        buffers=4 * buckets.reduce_elements,
        buffers_backward=c * dims.largest_tensor + largest,
        holds_gradients=configuration.strategy.offload is Offload.NONE,
    )
