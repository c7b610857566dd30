"""The best configuration of one strategy: micro batch, accumulation, checkpointing, loss head and buffers.

The global batch is the user's and never changes: a rank's share of it is split into micro batches, and accumulation
follows. Gradients that are accumulated need memory of their own (FSDP keeps them whole, DDP has a second copy), so the
whole share as one micro batch may fit where half of it does not. It is tried separately; among the others need grows
with the micro batch, and the largest that fits is found by bisection.

The fastest configuration that fits is chosen, and among those as fast (`time_class`) the smallest. Buffers of ZeRO
start small and use half of the memory that remains; the other half covers the error of a prediction.

The possible values of each setting come first, from the least memory to the most if they have an order. A pin allows
one value.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, lru_cache, partial
from heapq import heapify, heappop, heappush
from itertools import product
from operator import attrgetter
from typing import NamedTuple

from msgspec.structs import replace

from shardwise.trainer.planning.candidates import (
    candidate_of,
    compared_seconds,
    exceeds_host,
    full_card_factor,
    least_needy,
    least_step_need,
    need_floor,
    never_fits,
    predicted_need,
    relative_seconds,
    roomy_need,
    with_micro_batch,
)
from shardwise.trainer.planning.configuration import Configuration, group_sizes
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.rules.fp8 import no_compiler, recipe_of
from shardwise.trainer.planning.rules.rule import obstacle_to
from shardwise.trainer.planning.rules.rule_input import capability_text
from shardwise.trainer.planning.schedule import row_policy
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.fp8 import FP8_RECIPES
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.packages import extra_line
from shardwise.trainer.spec.plan import Buckets, Candidate
from shardwise.trainer.spec.strategy import Attention, Checkpointing, Fp8Recipe, LossHead, Method, Precision, Strategy
from shardwise.trainer.spec.units import MIB

EVERY_SECOND = 2  # block is recomputed unless pin.checkpointing_n is set
MAX_CHUNK_TOKENS, MIN_CHUNK_TOKENS = 1024, 128
CHUNK_LOGITS_BYTES = 256 * MIB  # of one slice, in fp32
MIN_BUCKET_ELEMENTS, MAX_BUCKET_ELEMENTS = 2**18, 2**28  # 512 KiB to 512 MiB in 16 bit
TF32_CAPABILITY = (8, 0)
PERSISTENCE_PER_HIDDEN = 10  # norms and biases stay whole under ZeRO-3; DeepSpeed's own "auto" uses the same


def micro_batches(context: PlanningContext, *, at_once: bool = False) -> tuple[int, ...]:
    """Powers of two and divisors of a rank's sequences, ascending; only all of them `at_once` if none accumulates."""
    pinned = context.job.pin.micro_batch
    if pinned is not None:
        return (pinned,)
    share = context.sequences_per_rank
    return (share,) if at_once else _cuts(share)


@cache
def _cuts(share: int) -> tuple[int, ...]:
    divisors = {d for low in range(1, math.isqrt(share) + 1) if share % low == 0 for d in (low, share // low)}
    return tuple(sorted(divisors | {2**power for power in range(share.bit_length())}))


def optimizers_in_backward(context: PlanningContext, first: Configuration) -> tuple[bool, ...]:
    """Update after the backward, or of each weight inside it, where the job allows gradients that are not clipped.

    Not of weights in host RAM: the backward would wait for the update of each.
    """
    pinned = context.job.pin.optimizer_in_backward
    if pinned is not None:
        return (pinned,)
    is_settled = first.updates_in_backward or first.strategy.offload is not Offload.NONE
    if Allowance.UNCLIPPED not in context.job.allow or context.method is not Method.FULL or is_settled:
        return (False,)
    inside = replace(first, optimizer_in_backward=True, accumulation=1)
    return (False, True) if obstacle_to(context, inside) is None else (False,)


def checkpointings(context: PlanningContext) -> tuple[Checkpointing, ...]:
    """Kinds of recomputation: of every block, selective, none.

    Selective recomputation saves more of frozen blocks than they save without it, and has no trace.
    """
    pinned = context.job.pin.checkpointing
    if pinned is not None:
        return (pinned,)
    if not context.method.freezes_base and not context.shape.is_described:
        return (Checkpointing.FULL, Checkpointing.SELECTIVE, Checkpointing.NONE)
    return (Checkpointing.FULL, Checkpointing.NONE)


def every_n(context: PlanningContext, checkpointing: Checkpointing) -> int | None:
    """The n of `every_n`: one of n blocks is recomputed; None for other kinds."""
    if checkpointing is not Checkpointing.EVERY_N:
        return None
    return context.job.pin.checkpointing_n or EVERY_SECOND


def losses(context: PlanningContext) -> tuple[LossHead, ...]:
    """Logits in slices of tokens, or whole; a user's own loss receives all of them, a model's own logits are whole.

    Liger's fused head where it is installed; not for pairs of rows, whose weights are known after its forward.
    """
    if Hook.LOSS in context.hooks or context.shape.loss_heads == (LossHead.EAGER,):
        return (LossHead.EAGER,)
    pinned = context.job.pin.loss
    if pinned is not None:
        return (pinned,)
    if context.job.pin.compiled_head:
        return (LossHead.CHUNKED,)
    has_liger = not context.is_cpu and context.has_library("liger-kernel")
    is_of_pairs = row_policy(context.data, seq_len=context.job.train.seq_len).rows_per_example > 1
    if has_liger and not is_of_pairs:
        return (LossHead.CHUNKED, LossHead.FUSED_LINEAR, LossHead.EAGER)
    return (LossHead.CHUNKED, LossHead.EAGER)


def compiles(context: PlanningContext, recipe: Fp8Recipe | None = None) -> tuple[bool, ...]:
    """Eager, or torch.compile, whose seconds before the first step count as well (`compile_seconds`).

    Not on a CPU: there the compiled quickstart took 0.2636 s a step and the eager one 0.2642 s. Nor for a model without
    a closed form, whose blocks were traced eagerly, one whose blocks failed to compile here, or one whose adapters are
    fused. An FP8 recipe runs in the one form that it is timed in.
    """
    pinned = context.job.pin.compile
    if pinned is not None:
        return (pinned,)
    if context.is_cpu or no_compiler(context) is not None or context.job.pin.fused_adapters:
        return (False,)
    return (False, True) if recipe is None else (FP8_RECIPES[recipe].is_compiled,)


def fuses_kernels(context: PlanningContext, configuration: Configuration) -> bool:
    """Liger's kernels in the blocks of `configuration`, where they run eagerly because compilation is not to be had.

    With torch.compile the same operations are fused; without, these kernels need less memory and time than plain torch.
    Not of a model without a closed form, whose blocks were traced in plain torch.
    """
    pinned = context.job.pin.fused_kernels
    if pinned is not None or context.shape.is_described or True in compiles(context, configuration.fp8_recipe):
        return bool(pinned)
    return obstacle_to(context, replace(configuration, fused_kernels=True)) is None


def activation_offloads(context: PlanningContext, checkpointing: Checkpointing) -> tuple[bool, ...]:
    """Activations stay on the device, or move to host RAM until the backward, if `allow` has it.

    Without recomputation all of them move, and a step waits for copies that are slower than assumed: only where they
    were measured, or the job file pins recomputation. With it the inputs of blocks move, a few percent of the bytes.
    """
    pinned = context.job.pin.activation_offload
    if pinned is not None:
        return (pinned,)
    is_allowed = Allowance.OFFLOAD_CPU in context.job.allow and context.host_ram_bytes is not None
    moves_few = checkpointing is Checkpointing.FULL or context.job.pin.checkpointing is not None
    is_allowed = is_allowed and (moves_few or context.knows_host_copies)
    has_another = not context.is_cpu and not context.device.shares_host_memory
    return (False, True) if is_allowed and has_another else (False,)


def shard_groups(context: PlanningContext, strategy: Strategy) -> tuple[int | None, ...]:
    """Numbers of ranks that may share one copy of the state under hsdp, from the least memory to the most.

    (None,) for other shardings.
    """
    if not strategy.sharding.facts.shards_within_group:
        return (None,)
    pinned = context.job.pin.shard_group
    if pinned is not None:
        return (pinned,)
    return group_sizes(context.num_ranks, context.hardware.num_devices_per_node) or (None,)


def reductions(context: PlanningContext, strategy: Strategy) -> tuple[bool, ...]:
    """Gradients are reduced with the last micro batch alone, or under FSDP2 with every one.

    Until the last, a rank holds whole gradients in the type of the sum: 4 bytes of every weight. Adapters have few; and
    to gradients in host RAM each sum would be added by the CPU, while the device waits.
    """
    pinned = context.job.pin.reduce_every_micro_batch
    if pinned is not None:
        return (pinned,)
    if reduces_in_bf16(context, strategy):
        return (True,)
    has_whole_gradients = strategy.sharding.uses_fsdp and context.num_ranks > 1 and not context.method.freezes_base
    can_accumulate = micro_batches(context)[0] < context.sequences_per_rank
    can_choose = has_whole_gradients and can_accumulate and strategy.offload is Offload.NONE
    return (False, True) if can_choose else (False,)


def embeddings_on_host(context: PlanningContext, strategy: Strategy) -> tuple[bool, ...]:
    """The table of input embeddings is on the device, or if nothing trains it and no head shares it in host RAM.

    On one GPU that holds the model itself, and where `allow` has it. Not of a model whose code is not transformers':
    the table may be read past its forward.
    """
    pinned = context.job.pin.embedding_on_host
    if pinned is not None:
        return (pinned,)
    is_own_code = context.job.model.trust_remote_code or Hook.BUILD_MODEL in context.hooks
    is_allowed = Allowance.OFFLOAD_CPU in context.job.allow and context.host_ram_bytes is not None
    has_another = not context.is_cpu and not context.device.shares_host_memory
    is_alone = strategy.sharding.facts.is_one_rank and context.num_ranks == 1 and has_another
    can_move = is_alone and context.method.freezes_base and not context.shape.is_tied and not is_own_code
    return (False, True) if is_allowed and can_move else (False,)


def reduces_in_bf16(context: PlanningContext, strategy: Strategy) -> bool:
    """True if FSDP2 adds gradients up over the ranks in bf16: half the traffic, and the job allows it.

    Those of several micro batches are added up in fp32, which needs each of them reduced (torch's FSDPParam adds
    gradients that wait in the type of the reduction).
    """
    is_mixed = strategy.precision in (Precision.BF16_MIXED, Precision.FP8)
    is_summed = strategy.sharding.uses_fsdp and context.num_ranks > 1 and not context.method.freezes_base
    is_allowed = Allowance.BF16_REDUCTION in context.job.allow and strategy.offload is Offload.NONE
    return is_allowed and is_mixed and is_summed and context.job.pin.reduce_every_micro_batch is not False


def supports_tf32(context: PlanningContext, precision: Precision) -> bool:
    """True if fp32 products round their inputs to TF32: the job allows it, and the chip may gain."""
    device = context.device
    fp32, tf32 = device.peak_flops_per_s(Precision.FP32), device.tf32_flops_per_s
    gains = fp32 is None or (tf32 is not None and tf32 > fp32)
    has_units = not context.is_cpu and (device.compute_capability or (0, 0)) >= TF32_CAPABILITY
    return precision is Precision.FP32 and Allowance.TF32 in context.job.allow and has_units and gains


def attention(context: PlanningContext, precision: Precision) -> tuple[Attention, str]:
    """The best attention kernel that is available for this model, and the reason."""
    pinned, shape = context.job.pin.attention, context.shape
    if pinned is not None:
        kernel = flash_kernel(context, pinned)
        return pinned, f"the job file sets pin.attention: {pinned}" + (f", by {kernel}" if kernel else "")
    obstacle = obstacle_to_flash(context, precision)
    if obstacle is None:
        kernel = flash_kernel(context, Attention.FLASH)
        return Attention.FLASH, f"the job file allows {kernel}" if kernel else "flash-attn is installed"
    if Attention.SDPA in shape.attentions:
        return Attention.SDPA, obstacle
    return Attention.EAGER, f"{attention_text(shape)}; {obstacle}"


def attention_text(shape: ModelShape) -> str:
    """Attention implementations that transformers has for a model, as text."""
    return f"transformers has {' and '.join(shape.attentions)} attention for {shape.model_type}"


def obstacle_to_flash(context: PlanningContext, precision: Precision) -> str | None:
    """Why flash-attn cannot run, or None if it can."""
    if Attention.FLASH not in context.shape.attentions:
        return "flash-attn cannot compute it"
    if context.is_cpu:
        return "flash-attn needs a GPU"
    if (context.device.compute_capability or (0, 0)) < (8, 0):
        return f"flash-attn needs compute capability 8.0; {capability_text(context.device)}"
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
    return f"{missing} ({extra_line('hub-kernels', python=context.hardware.other_python)})"


def flash_kernel(context: PlanningContext, taken: Attention) -> str | None:
    """The hub kernel that the job allows for flash; None if flash-attn's own is used, or another attention."""
    is_needed = taken is Attention.FLASH and not context.has_library("flash-attn")
    return context.job.model.flash_kernel if is_needed else None


def chunk_tokens(shape: ModelShape) -> int:
    """Tokens of a slice of logits: the largest power of two whose fp32 logits stay small, within bounds."""
    affordable = CHUNK_LOGITS_BYTES // (4 * shape.vocab_size)
    return max(MIN_CHUNK_TOKENS, min(MAX_CHUNK_TOKENS, 1 << max(0, affordable.bit_length() - 1)))


@lru_cache(maxsize=64)
def chunk_sizes(shape: ModelShape, loss: LossHead) -> tuple[int | None, ...]:
    """Slices of logits worth trying, the preferred first; (None,) if logits are not sliced."""
    if loss is not LossHead.CHUNKED:
        return (None,)
    standard = chunk_tokens(shape)
    return (standard,) if standard == MIN_CHUNK_TOKENS else (standard, MIN_CHUNK_TOKENS)


def smallest_buckets(shape: ModelShape, strategy: Strategy) -> Buckets | None:
    """The smallest buffers that ZeRO works with; None for other engines."""
    return _buckets(shape, strategy.sharding, MIN_BUCKET_ELEMENTS) if strategy.sharding.uses_deepspeed else None


def bucket_sizes(shape: ModelShape, strategy: Strategy) -> tuple[Buckets | None, ...]:
    """Buffer sizes of ZeRO from the smallest to the largest that could help; (None,) for other engines."""
    if not strategy.sharding.uses_deepspeed:
        return (None,)
    largest = min(MAX_BUCKET_ELEMENTS, shape.num_parameters)
    sizes = [MIN_BUCKET_ELEMENTS]
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return tuple(_buckets(shape, strategy.sharding, size) for size in sizes)


@lru_cache(maxsize=256)
def _buckets(shape: ModelShape, sharding: Sharding, num_elements: int) -> Buckets:
    """ZeRO-3 keeps at least the largest layer and the one it prefetches; more if the buckets are larger.

    DeepSpeed allocates a whole bucket, even if there is less to reduce.
    """
    num_elements = min(num_elements, shape.num_parameters)
    if not sharding.shards_weights:
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


def first_configuration(
    context: PlanningContext, strategy: Strategy, *, checkpointing: Checkpointing, loss: LossHead
) -> Configuration:
    """The smallest micro batch and buffers of a strategy with this recomputation and loss head."""
    micro_batch = micro_batches(context)[0]
    taken, fp8_recipe = attention(context, strategy.precision)[0], recipe_of(context, strategy)
    return Configuration(
        strategy=strategy,
        method=context.method,
        num_ranks=context.num_ranks,
        ranks_per_node=context.hardware.num_devices_per_node,
        policy=row_policy(context.data, seq_len=context.job.train.seq_len),
        micro_batch=micro_batch,
        accumulation=-(-context.schedule.sequences_per_step // (context.num_ranks * micro_batch)),
        seq_len=context.job.train.seq_len,
        checkpointing=checkpointing,
        checkpoint_every_n=every_n(context, checkpointing),
        attention=taken,
        loss=loss,
        loss_chunk_tokens=chunk_sizes(context.shape, loss)[0],
        buckets=smallest_buckets(context.shape, strategy),
        shard_group=shard_groups(context, strategy)[0],
        reduce_every_micro_batch=reductions(context, strategy)[0],
        bf16_reduction=reduces_in_bf16(context, strategy),
        embedding_on_host=embeddings_on_host(context, strategy)[0],
        prefetch_two_blocks=bool(context.job.pin.prefetch_two_blocks),
        fused_adapters=bool(context.job.pin.fused_adapters),
        compiled_head=bool(context.job.pin.compiled_head),
        compile=compiles(context, fp8_recipe)[0],
        fused_kernels=bool(context.job.pin.fused_kernels),
        activation_offload=activation_offloads(context, checkpointing)[0],
        optimizer_in_backward=bool(context.job.pin.optimizer_in_backward),
        fp8_recipe=fp8_recipe,
        tf32=supports_tf32(context, strategy.precision),
        flash_kernel=flash_kernel(context, taken),
        lora=context.job.train.lora,
        galore=context.job.train.galore,
        router_aux_loss=context.job.train.router_aux_loss,
    )


def first_start(context: PlanningContext, strategy: Strategy) -> Configuration:
    """The first of the `starts_of` a strategy, but with fused kernels only if the job pins them."""
    return first_configuration(context, strategy, checkpointing=checkpointings(context)[0], loss=losses(context)[0])


SAME_SPEED = 0.01  # predictions that differ by less are one


def time_class(seconds: float) -> int:
    """Durations within about one per cent share a class; the shorter, the smaller."""
    return math.floor(math.log(seconds) / math.log1p(SAME_SPEED))


class Bounded(NamedTuple):
    """A configuration but for its micro batch, with a lower bound of the seconds under any micro batch."""

    seconds: float
    micro_batch: int | None  # the one with this time, if any
    start: Configuration


# What a start sets besides its slice of logits, without the loss head and with it.
_BUT_LOSS = (
    "checkpointing", "activation_offload", "compile", "optimizer_in_backward", "shard_group", "fused_kernels",
    "reduce_every_micro_batch", "embedding_on_host",
)  # fmt: skip
_WITHOUT_LOSS, _KIND = attrgetter(*_BUT_LOSS), attrgetter(*_BUT_LOSS, "loss")


def bounded_starts(context: PlanningContext, strategy: Strategy) -> Iterator[Bounded]:
    """The starts of a strategy, the lowest bound first, but for those that exceed the device without activations.

    A start is bounded when its turn comes. Until then its bound is that of the same start without recomputation and
    with its activations on the device, which is no slower and predicted with no larger error.
    """
    starts = _possible_starts(context, strategy)
    bounds: dict[object, tuple[float, int]] = {}
    waiting: list[tuple[float, int, bool]] = []
    for index, start in enumerate(starts):
        fastest = replace(start, checkpointing=Checkpointing.NONE, checkpoint_every_n=None, activation_offload=False)
        if (kind := _KIND(fastest)) not in bounds:
            bounds[kind] = bound_of(context, fastest)
        waiting.append((bounds[kind][0], index, False))
    heapify(waiting)
    yielded: set[object] = set()
    while waiting:
        seconds, index, is_exact = heappop(waiting)
        start = starts[index]
        kind = _KIND(start)
        if kind not in bounds:
            bounds[kind] = bound_of(context, start)
        least, micro_batch = bounds[kind]
        if not is_exact and least > seconds:
            heappush(waiting, (least, index, True))
            continue
        # The first of a kind has the larger slices of logits: with smaller ones it is no faster.
        yield Bounded(least, None if kind in yielded else micro_batch, start)
        yielded.add(kind)


def _possible_starts(context: PlanningContext, strategy: Strategy) -> list[Configuration]:
    possible: dict[object, bool] = {}
    starts = []
    for start in starts_of(context, strategy):
        state = (
            start.optimizer_in_backward,
            start.shard_group,
            start.reduce_every_micro_batch,
            start.embedding_on_host,
        )
        if state not in possible:
            possible[state] = not never_fits(context, start)
        if possible[state]:
            starts.append(start)
    return starts


def strategy_need(context: PlanningContext, strategy: Strategy) -> int:
    """A lower bound of what any configuration of a strategy needs: that of the largest group, without activations."""
    first = first_start(context, strategy)
    least = replace(first, embedding_on_host=embeddings_on_host(context, strategy)[-1])
    return min(
        least_step_need(context, replace(least, optimizer_in_backward=inside))
        for inside in optimizers_in_backward(context, first)
    )


def best_candidate(context: PlanningContext, strategy: Strategy) -> Candidate | None:
    """The fastest configuration of a strategy that fits the device, with larger buffers; None if none fits."""
    best = best_configuration(context, bounded_starts(context, strategy))
    return None if best is None else candidate_of(context, with_larger_buckets(context, best))


def least_need(context: PlanningContext, strategy: Strategy) -> Candidate:
    """The configuration of a strategy that needs the least device memory: without one that fits no other does.

    Its micro batch is the smallest or the largest, and larger slices of logits never need less.
    """
    configurations = (
        with_micro_batch(context, start, micro_batch)
        for start in starts_of(context, strategy)
        if start.loss_chunk_tokens == chunk_sizes(context.shape, start.loss)[-1]
        for micro_batch in _ends(sizes_of(context, start))
    )
    return candidate_of(context, least_needy(context, configurations, lambda each: obstacle_to(context, each) is None))


def _ends(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (sizes[0],) if len(sizes) == 1 else (sizes[0], sizes[-1])


def can_fit(context: PlanningContext, strategy: Strategy) -> bool:
    """True if any configuration of a strategy fits the device."""
    could_fit = strategy_need(context, strategy) <= context.device.usable_bytes
    return could_fit and least_need(context, strategy).memory.fits


def best_configuration(
    context: PlanningContext, starts: Iterable[Bounded], longest: float = math.inf
) -> Configuration | None:
    """The fastest configuration that fits, with its smallest buffers; `starts` are the `bounded_starts` of a strategy.

    None if none fits within `longest` seconds; a `time_class` counts as one time.

    By branch and bound. If rows are not padded smaller micro batches are no faster. Smaller slices of logits never are:
    they are tried for the micro batches that do not fit with larger ones.
    """
    best: Configuration | None = None
    least = (math.inf if longest == math.inf else time_class(longest), math.inf)
    cuts = not _is_padded(context)
    possible: dict[object, list[int]] = {}
    found_of: dict[object, set[int]] = {}

    def key_of(configuration: Configuration, bounded: Bounded, price: float = 1) -> tuple[int, int]:
        is_bound = configuration.micro_batch == bounded.micro_batch
        seconds = bounded.seconds if is_bound else _seconds_of(context, configuration)
        return time_class(price * seconds), configuration.micro_batch

    for bounded in starts:
        if time_class(bounded.seconds) > least[0]:
            break
        start = bounded.start
        without_loss = _WITHOUT_LOSS(start)
        if without_loss not in possible:
            possible[without_loss] = _possible_sizes(context, start)
        known = found_of.setdefault(_KIND(start), set())
        sizes = [size for size in possible[without_loss] if size not in known]
        for configurations in by_accumulation(context, start, sizes):
            if cuts and configurations and key_of(configurations[-1], bounded)[0] > least[0]:
                break
            found = fitting(context, configurations)
            known.update(configuration.micro_batch for configuration in found)
            num_roomy = _num_roomy(context, found)
            for place in reversed(range(len(found))):
                is_full = place >= num_roomy
                key = key_of(found[place], bounded, full_card_factor(found[place]) if is_full else 1)
                if key < least:
                    least, best = key, found[place]
                elif cuts and not is_full and key[0] > least[0]:
                    break
    return best


def _possible_sizes(context: PlanningContext, start: Configuration) -> list[int]:
    """Micro batches that would fit if logits needed no memory; the same for every loss head."""
    groups = by_accumulation(context, start, sizes_of(context, start))
    floor, usable = need_floor(context, start), context.device.usable_bytes
    return sorted(
        configuration.micro_batch for group in groups for configuration in group[: _num_within(group, usable, floor)]
    )


def by_accumulation(
    context: PlanningContext, start: Configuration, sizes: Iterable[int]
) -> tuple[list[Configuration], list[Configuration]]:
    """`start` with the micro batches that can run: without accumulation, and with it.

    Rules ask whether there is accumulation where an update in the backward forbids it (`rules.incompatible`), and then
    `sizes` has one size.
    """
    configurations = [with_micro_batch(context, start, micro_batch) for micro_batch in sizes]
    if not configurations or obstacle_to(context, configurations[0]) is not None:
        return [], []
    at_once = [configuration for configuration in configurations if configuration.accumulation == 1]
    return at_once, [configuration for configuration in configurations if configuration.accumulation > 1]


def fitting(context: PlanningContext, configurations: Sequence[Configuration]) -> Sequence[Configuration]:
    """The configurations that fit the device, in ascending order of micro batch and need.

    Activations that move must fit the host as well, and embeddings that stay there.
    """
    found = configurations[: _num_within(configurations, context.device.usable_bytes, partial(predicted_need, context))]
    uses_host = bool(found) and (found[0].activation_offload or found[0].embedding_on_host)
    while uses_host and found and exceeds_host(context, found[-1]):
        found = found[:-1]
    return found


def _num_roomy(context: PlanningContext, found: Sequence[Configuration]) -> int:
    """How many of those that fit, in ascending order of need, do not fill the card (`candidates.roomy_need`)."""
    return _num_within(found, roomy_need(context, found[0]), partial(predicted_need, context)) if found else 0


def bound_of(context: PlanningContext, start: Configuration) -> tuple[float, int]:
    """Seconds and size of the fastest micro batch: a rank's whole share, unless rows are padded to the longest."""
    sizes = sizes_of(context, start)
    configurations = [with_micro_batch(context, start, size) for size in (sizes if _is_padded(context) else sizes[-1:])]
    return min((_seconds_of(context, configuration), configuration.micro_batch) for configuration in configurations)


def _is_padded(context: PlanningContext) -> bool:
    return context.data is not None and not context.data.is_packed


def _seconds_of(context: PlanningContext, configuration: Configuration) -> float:
    """Seconds by which configurations of a strategy are compared."""
    return compared_seconds(context, configuration, relative_seconds(context, configuration))


def sizes_of(context: PlanningContext, start: Configuration) -> tuple[int, ...]:
    """The micro batches that a start may have; where reduction is a choice, with accumulation alone."""
    sizes = micro_batches(context, at_once=start.updates_in_backward)
    if start.reduce_every_micro_batch and len(reductions(context, start.strategy)) > 1:
        return tuple(size for size in sizes if size < context.sequences_per_rank)
    return sizes


def starts_of(context: PlanningContext, strategy: Strategy) -> Iterator[Configuration]:
    """Each choice of the settings, at the smallest micro batch and buffers."""
    kinds, heads, first = checkpointings(context), losses(context), first_start(context, strategy)
    in_backward = optimizers_in_backward(context, first)
    fused = {kind: fuses_kernels(context, replace(first, checkpointing=kind)) for kind in kinds}
    settings = product(
        kinds,
        ((loss, tokens) for loss in heads for tokens in chunk_sizes(context.shape, loss)),
        compiles(context, first.fp8_recipe),
        (False, True),
        in_backward,
        _possible_groups(context, first, in_backward),
        reductions(context, strategy),
        embeddings_on_host(context, strategy),
    )
    every = {kind: every_n(context, kind) for kind in kinds}
    offloads_of = {kind: activation_offloads(context, kind) for kind in kinds}
    for checkpointing, (loss, tokens), is_compiled, offloads, is_inside, group, reduces, on_host in settings:
        if offloads not in offloads_of[checkpointing]:
            continue
        if is_inside and reduces and len(reductions(context, strategy)) > 1:
            continue  # an update in the backward comes without accumulation
        yield replace(
            first,
            checkpointing=checkpointing,
            checkpoint_every_n=every[checkpointing],
            loss=loss,
            loss_chunk_tokens=tokens,
            compile=is_compiled,
            fused_kernels=fused[checkpointing],
            activation_offload=offloads,
            optimizer_in_backward=is_inside,
            shard_group=group,
            reduce_every_micro_batch=reduces,
            embedding_on_host=on_host,
        )


MOST_GROUPS = 8  # times the smallest group that is possible: a larger one saves less than an eighth of that one's state


def _possible_groups(
    context: PlanningContext, first: Configuration, in_backward: Sequence[bool]
) -> tuple[int | None, ...]:
    """The largest group, and the smallest whose state fits the device with those that follow."""
    largest, *groups = shard_groups(context, first.strategy)
    updates = [replace(first, optimizer_in_backward=is_inside) for is_inside in in_backward]
    possible = [
        group
        for group in groups
        if group is not None and not all(never_fits(context, replace(each, shard_group=group)) for each in updates)
    ]
    return (largest, *(group for group in possible if group <= MOST_GROUPS * possible[-1]))


def with_larger_buckets(context: PlanningContext, configuration: Configuration) -> Configuration:
    """A configuration that fits, with the largest buffers that fit into half of the remaining memory."""
    sizes = bucket_sizes(context.shape, configuration.strategy)
    if len(sizes) == 1:
        return configuration
    need, usable = predicted_need(context, configuration), context.device.usable_bytes
    budget: float = (need + usable) // 2
    if need <= (roomy := roomy_need(context, configuration)):
        budget = min(budget, roomy)
    largest = replace(configuration, buckets=sizes[-1])
    if predicted_need(context, largest) <= budget:  # as a rule
        return largest
    larger = [replace(configuration, buckets=buckets) for buckets in sizes]
    num_within = bisect_right(larger, budget, lo=1, hi=len(larger) - 1, key=partial(predicted_need, context))
    return larger[num_within - 1]


def _num_within(configurations: Sequence[Configuration], budget: float, need_of: Callable[[Configuration], int]) -> int:
    """How many of `configurations`, in ascending order of need, need at most `budget` bytes.

    The ends are tried first: usually all fit or none does.
    """
    if not configurations or (len(configurations) > 1 and need_of(configurations[0]) > budget):
        return 0
    if need_of(configurations[-1]) <= budget:
        return len(configurations)
    return (
        0
        if len(configurations) == 1
        else bisect_right(configurations, budget, lo=1, hi=len(configurations) - 1, key=need_of)
    )
