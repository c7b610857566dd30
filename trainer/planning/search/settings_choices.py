"""The values a setting may take for one row, from the least memory to the most where there is an order.

A pin leaves one value. What this version cannot run is offered only where the context ignores the version; pinning
it is otherwise an InputError of `input_checks`.
"""

import math
from functools import cache

from trainer.planning.context import PlanningContext
from trainer.planning.rules.rule import capability_words
from trainer.planning.run.padding import row_recipe
from trainer.planning.setting import Setting, fp8_recipe_of
from trainer.spec.job.sections import Allowance
from trainer.spec.messages.extension import Hook
from trainer.spec.model.shape import ModelShape
from trainer.spec.pip_lines import extra_line
from trainer.spec.plan import Buckets
from trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision, Strategy
from trainer.spec.units import MIB

EVERY_SECOND = 2  # block is recomputed where pin.checkpointing_n says nothing
MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS = 1024, 128
CHUNK_LOGITS_BYTES = 256 * MIB  # of one slice, in fp32
MIN_BUCKET_ELEMENTS, MAX_BUCKET_ELEMENTS = 2**18, 2**28  # 512 KiB to 512 MiB in 16 bit
TF32_CAPABILITY = (8, 0)
PERSISTENCE_PER_HIDDEN = 10  # norms and biases stay whole under ZeRO-3; DeepSpeed's own "auto" takes the same


def micro_batches(context: PlanningContext, strategy: Strategy | None = None) -> tuple[int, ...]:
    """Powers of two and divisors of a rank's sequences, ascending; all of them where nothing can be added up."""
    pinned = context.job.pin.micro_batch
    if pinned is not None:
        return (pinned,)
    share = context.sequences_per_rank
    if strategy is not None and updates_in_backward(context, strategy):
        return (share,)
    return _cuts(share)


@cache
def _cuts(share: int) -> tuple[int, ...]:
    divisors = {d for low in range(1, math.isqrt(share) + 1) if share % low == 0 for d in (low, share // low)}
    return tuple(sorted(divisors | {2**power for power in range(share.bit_length())}))


def updates_in_backward(context: PlanningContext, strategy: Strategy) -> bool:
    """True if each gradient is used and freed at once, so that a step is one micro batch."""
    is_layerwise = context.method is Method.GALORE and context.job.train.galore.layerwise
    return bool(context.job.pin.optimizer_in_backward) or is_layerwise or strategy.optimizer.facts.updates_in_backward


def checkpointings(context: PlanningContext) -> tuple[Checkpointing, ...]:
    """Recompute every block, keep what is dear to compute, or keep everything.

    What selective recomputation keeps of frozen blocks is more than they would keep without it.
    """
    pinned = context.job.pin.checkpointing
    if pinned is not None:
        return (pinned,)
    if not context.method.freezes_base:
        return (Checkpointing.FULL, Checkpointing.SELECTIVE, Checkpointing.NONE)
    return (Checkpointing.FULL, Checkpointing.NONE)


def every_n(context: PlanningContext, checkpointing: Checkpointing) -> int | None:
    """Of how many blocks one is recomputed; None where every block is treated alike."""
    if checkpointing is not Checkpointing.EVERY_N:
        return None
    return context.job.pin.checkpointing_n or EVERY_SECOND


def losses(context: PlanningContext) -> tuple[LossHead, ...]:
    """Logits in slices of tokens, or whole; a loss of the user's own is given all of them."""
    if Hook.LOSS in context.hooks:
        return (LossHead.EAGER,)
    pinned = context.job.pin.loss
    return (pinned,) if pinned is not None else (LossHead.CHUNKED, LossHead.EAGER)


def compiles(context: PlanningContext) -> tuple[bool, ...]:
    """Eager, or torch.compile where the job allows it."""
    pinned = context.job.pin.compile
    if pinned is not None:
        return (pinned,)
    return (False, True) if Allowance.COMPILE in context.job.allow else (False,)


def activation_offloads(context: PlanningContext) -> tuple[bool, ...]:
    """Activations stay on the device; where nothing else helps they may go to host RAM, which `allow` must name."""
    pinned = context.job.pin.activation_offload
    if pinned is not None:
        return (pinned,)
    is_allowed = Allowance.OFFLOAD_CPU in context.job.allow and context.host_ram_bytes is not None
    return (False, True) if is_allowed and not context.is_cpu else (False,)


def takes_tf32(context: PlanningContext, precision: Precision) -> bool:
    """True if fp32 products round their inputs to TF32: the job allows it, and the chip may gain."""
    device = context.device
    fp32, tf32 = device.peak_flops_per_s.get(Precision.FP32), device.tf32_flops_per_s
    gains = fp32 is None or (tf32 is not None and tf32 > fp32)
    has_units = not context.is_cpu and (device.compute_capability or (0, 0)) >= TF32_CAPABILITY
    return precision is Precision.FP32 and Allowance.TF32 in context.job.allow and has_units and gains


def attention(context: PlanningContext, precision: Precision) -> tuple[Attention, str]:
    """The best attention kernel that there is for this model, and why."""
    pinned, shape = context.job.pin.attention, context.shape
    if pinned is not None:
        kernel = flash_kernel(context, pinned)
        return pinned, f"the job file says pin.attention: {pinned}" + (f", by {kernel}" if kernel else "")
    obstacle = obstacle_to_flash(context, precision)
    if obstacle is None:
        kernel = flash_kernel(context, Attention.FLASH)
        return Attention.FLASH, f"the job file allows {kernel}" if kernel else "flash-attn is installed"
    if Attention.SDPA in shape.attentions:
        return Attention.SDPA, obstacle
    return Attention.EAGER, f"{attention_words(shape)}; {obstacle}"


def attention_words(shape: ModelShape) -> str:
    """Attention implementations that transformers has for a model, as text."""
    return f"transformers has {' and '.join(shape.attentions)} attention for {shape.model_type}"


def obstacle_to_flash(context: PlanningContext, precision: Precision) -> str | None:
    """Why flash-attn cannot run, or None where it can."""
    if Attention.FLASH not in context.shape.attentions:
        return "flash-attn cannot compute it"
    if context.is_cpu:
        return "flash-attn needs a GPU"
    if (context.device.compute_capability or (0, 0)) < (8, 0):
        return f"flash-attn needs compute capability 8.0; {capability_words(context)}"
    if precision is Precision.FP32:
        return "flash-attn computes in 16 bit, not in fp32"
    return missing_flash(context)


def missing_flash(context: PlanningContext) -> str | None:
    """Requirements that are missing before flash attention runs, or None."""
    if context.has_library("flash-attn"):
        return None
    if context.job.model.flash_kernel is None:
        return "flash-attn is not installed"
    unfit = context.hardware.unfit_libraries.get("kernels")
    if unfit is None and context.has_library("kernels"):
        return None
    missing = unfit or "flash-attn is not installed, nor is kernels, which model.flash_kernel needs"
    return f"{missing} ({extra_line('hub-kernels')})"


def flash_kernel(context: PlanningContext, taken: Attention) -> str | None:
    """The kernel of the hub that flash runs by the job's leave; None where it is flash-attn's own, or not taken."""
    is_needed = taken is Attention.FLASH and not context.has_library("flash-attn")
    return context.job.model.flash_kernel if is_needed else None


def chunk_tokens(shape: ModelShape) -> int:
    """Tokens of a slice of logits: the largest power of two whose fp32 logits stay small, within bounds."""
    affordable = CHUNK_LOGITS_BYTES // (4 * shape.vocab_size)
    return max(MIN_CHUNK_TOKENS, min(MAX_CHUNK_TOKENS, 1 << max(0, affordable.bit_length() - 1)))


def chunk_sizes(shape: ModelShape, loss: LossHead) -> tuple[int | None, ...]:
    """Slices of logits worth trying, the preferred first; (None,) where logits are not sliced."""
    if loss is not LossHead.CHUNKED:
        return (None,)
    standard = chunk_tokens(shape)
    return (standard,) if standard == MIN_CHUNK_TOKENS else (standard, MIN_CHUNK_TOKENS)


def smallest_buckets(shape: ModelShape, strategy: Strategy) -> Buckets | None:
    """The least that ZeRO works with; None for other engines."""
    return _buckets(shape, strategy, MIN_BUCKET_ELEMENTS) if strategy.sharding.uses_deepspeed else None


def bucket_ladder(shape: ModelShape, strategy: Strategy) -> tuple[Buckets | None, ...]:
    """Buffer sizes of ZeRO from the smallest to the largest that could help; (None,) for other engines."""
    if not strategy.sharding.uses_deepspeed:
        return (None,)
    largest = min(MAX_BUCKET_ELEMENTS, shape.num_parameters)
    sizes = [MIN_BUCKET_ELEMENTS]
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return tuple(_buckets(shape, strategy, size) for size in sizes)


def _buckets(shape: ModelShape, strategy: Strategy, num_elements: int) -> Buckets:
    """ZeRO-3 keeps at least the largest layer and the one it prefetches; more where the buckets are larger.

    DeepSpeed allocates a bucket whole, however little there is to reduce.
    """
    num_elements = min(num_elements, shape.num_parameters)
    if not strategy.sharding.shards_weights:
        return Buckets(
            reduce_elements=num_elements,
            allgather_elements=num_elements,
            prefetch_elements=0,
            live_parameters=0,
            persistence_elements=0,
        )
    prefetch = min(num_elements, shape.parameters_per_block)
    largest_layer = max(shape.parameters_per_block, shape.embedding_parameters)
    return Buckets(
        reduce_elements=num_elements,
        allgather_elements=num_elements,
        prefetch_elements=prefetch,
        live_parameters=max(largest_layer + prefetch, num_elements),
        persistence_elements=PERSISTENCE_PER_HIDDEN * shape.hidden_size,
    )


def first_setting(
    context: PlanningContext, strategy: Strategy, *, checkpointing: Checkpointing, loss: LossHead
) -> Setting:
    """The smallest micro batch and buffers of a row under two choices."""
    micro_batch = micro_batches(context, strategy)[0]
    taken = attention(context, strategy.precision)[0]
    return Setting(
        strategy=strategy,
        method=context.method,
        num_ranks=context.num_ranks,
        ranks_per_node=context.hardware.num_devices_per_node,
        recipe=row_recipe(context.data, seq_len=context.job.train.seq_len),
        micro_batch=micro_batch,
        accumulation=-(-context.schedule.sequences_per_step // (context.num_ranks * micro_batch)),
        seq_len=context.job.train.seq_len,
        checkpointing=checkpointing,
        checkpoint_every_n=every_n(context, checkpointing),
        attention=taken,
        loss=loss,
        loss_chunk_tokens=chunk_sizes(context.shape, loss)[0],
        buckets=smallest_buckets(context.shape, strategy),
        compile=compiles(context)[0],
        activation_offload=activation_offloads(context)[0],
        optimizer_in_backward=bool(context.job.pin.optimizer_in_backward),
        fp8_recipe=fp8_recipe_of(strategy.precision, context.job.pin.fp8_recipe),
        tf32=takes_tf32(context, strategy.precision),
        flash_kernel=flash_kernel(context, taken),
        lora=context.job.train.lora,
        galore=context.job.train.galore,
    )
