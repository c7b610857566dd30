"""What a sharding engine holds besides its states: gathered parameters, gradients on their way, buckets.

FSDP2 (`fully_shard` on every block and on the root): the root (embedding, head, last norm) is gathered from the start
of the forward until the end of the backward; during the loss the last block still is; in backward two blocks are, the
one at work and the one prefetched. A block's gradients are copied into one reduce-scatter input in the reduce type.
Without synchronisation (accumulation) whole gradients wait in the reduce type for the last micro batch: that is what
the training step asks for. `fsdp_grad_op` keeps all blocks gathered from forward to backward. gloo copies the input
of a reduce-scatter.

DeepSpeed: ZeRO-1 and 2 allocate two buckets of `reduce_bucket_size` elements for each backward (overlap_comm) and
convert one to fp32 for the reduction; ZeRO-3 owns one fp32 bucket and a flat buffer of its gradient partition for the
whole run, and keeps up to `stage3_max_live_parameters` gathered, prefetched ones included (0.19.8, stage_1_and_2.py
`setup_buckets`, stage3.py `_setup_for_real_optimizer`).

DDP's buckets are the gradients (`gradient_as_bucket_view`), so they stay between steps. Micro batches that are not
synchronised add up beside them, and each sum is freed when the last micro batch copies it into its bucket.
"""

from trainer.planning.memory.recipe import Dims, Recipe
from trainer.planning.setting import Setting
from trainer.spec.plan import Buckets
from trainer.spec.strategy import Method, Offload, Sharding
from trainer.spec.value import Value

FSDP_PREFETCHED_BLOCKS = 1  # gathered in backward besides the one at work


class ShardingMemory(Value, frozen=True, kw_only=True):
    """Bytes on one rank."""

    gathered_forward: int
    gathered_top: int  # backward of the last block
    gathered_bottom: int  # backward of the first
    gathered_end: int
    buffers: int  # for the whole run
    buffers_backward: int  # from the head's backward to the end of backward
    reduce_block: int  # a block's gradients being reduced
    holds_gradients: bool  # from step to step


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


def sharding_memory(setting: Setting, recipe: Recipe, dims: Dims) -> ShardingMemory:
    """What the sharding of a setting holds on one rank."""
    sharding = setting.strategy.sharding
    if recipe.uses_fsdp:
        return _fsdp(setting, recipe, dims)
    if sharding is Sharding.ZERO3:
        return _zero3(setting, recipe, dims)
    if recipe.uses_deepspeed:
        buckets = setting.buckets or default_buckets(dims)
        elements = min(buckets.reduce_elements, dims.parameters)
        to_fp32 = 4 * elements if recipe.compute_bytes != 4 else 0
        largest = recipe.compute_bytes * dims.largest_tensor  # one gradient being copied into a bucket
        if setting.strategy.offload is not Offload.NONE:
            largest += 4 * dims.largest_tensor  # fp32 copy on its way to the host
        return _no_gathering(buffers_backward=2 * recipe.compute_bytes * elements + to_fp32 + largest)
    return _no_gathering(holds_gradients=sharding is Sharding.DDP)


def accumulated_gradients(setting: Setting, recipe: Recipe, num_trained: int, gradients: int) -> int:
    """Gradients of earlier micro batches, alive in every forward and backward but the first."""
    if setting.accumulation == 1 or setting.optimizer_in_backward:
        return 0
    if recipe.uses_fsdp:
        return recipe.master_bytes * num_trained
    return (2 if setting.strategy.sharding is Sharding.DDP else 1) * gradients


def _no_gathering(*, buffers_backward: int = 0, holds_gradients: bool = False) -> ShardingMemory:
    return ShardingMemory(
        gathered_forward=0,
        gathered_top=0,
        gathered_bottom=0,
        gathered_end=0,
        buffers=0,
        buffers_backward=buffers_backward,
        reduce_block=0,
        holds_gradients=holds_gradients,
    )


def _gathered_block(setting: Setting, recipe: Recipe, dims: Dims) -> int:
    if setting.method is Method.QLORA:
        return dims.linear // 2 + recipe.compute_bytes * (dims.block - dims.linear)
    return recipe.compute_bytes * dims.block


def _fsdp(setting: Setting, recipe: Recipe, dims: Dims) -> ShardingMemory:
    c, degree = recipe.compute_bytes, recipe.shard_degree
    root, block = c * dims.root, _gathered_block(setting, recipe, dims)
    in_backward = min(dims.layers, 1 + FSDP_PREFETCHED_BLOCKS) * block
    stays = setting.strategy.sharding is Sharding.FSDP_GRAD_OP
    whole = dims.layers * block
    reduce_input = 0 if recipe.is_frozen else recipe.master_bytes * dims.block
    return ShardingMemory(
        gathered_forward=root + (whole if stays else block),
        gathered_top=root + (whole if stays else in_backward),
        gathered_bottom=root + block,
        gathered_end=0,  # the root is resharded before its gradients are reduced
        buffers=0,
        buffers_backward=0,
        reduce_block=reduce_input + -(-reduce_input // degree),
        holds_gradients=False,
    )


def _zero3(setting: Setting, recipe: Recipe, dims: Dims) -> ShardingMemory:
    buckets = setting.buckets or default_buckets(dims)
    block, c = _gathered_block(setting, recipe, dims), recipe.compute_bytes
    head = c * max(dims.embedding, dims.head)
    whole = dims.layers * block + c * dims.root
    # What is at work is gathered whatever the limit says.
    at_work = max(block, head) + c * buckets.prefetch_elements
    gathered = min(whole, max(at_work, c * buckets.live_parameters))
    largest = 4 * dims.largest_tensor if setting.strategy.offload is not Offload.NONE else 0
    return ShardingMemory(
        gathered_forward=gathered,
        gathered_top=gathered,
        gathered_bottom=gathered,
        gathered_end=min(gathered, head + block),
        buffers=4 * buckets.reduce_elements,
        buffers_backward=c * dims.largest_tensor + largest,
        reduce_block=0,
        holds_gradients=setting.strategy.offload is Offload.NONE,
    )
