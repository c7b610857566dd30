"""The best setting of one row: micro batch, accumulation, checkpointing, loss head and buffers.

The global batch is the user's and never moves: a rank's share of it is cut into micro batches, and accumulation
follows. Gradients that add up over micro batches take room of their own (FSDP keeps them whole, DDP holds a second
copy), so a share at once may fit where half of it does not. It is tried by itself; among the others need grows with
the micro batch, and the largest that fits is found by bisection.

Of all that fit the fastest is taken, and among those as fast (`time_class`) the smallest. Buffers of ZeRO start small
and grow into half of what is left, so that the other half covers what a prediction misses.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from trainer.planning.candidates import (
    candidate_of,
    least_needy,
    need_floor,
    never_fits,
    predicted_need,
    relative_seconds,
    with_micro_batch,
)
from trainer.planning.context import PlanningContext
from trainer.planning.rules.rule import obstacle_to
from trainer.planning.search.settings_choices import (
    activation_offloads,
    bucket_ladder,
    checkpointings,
    chunk_sizes,
    compiles,
    every_n,
    first_setting,
    losses,
    micro_batches,
)
from trainer.planning.setting import Setting
from trainer.spec.plan import Candidate
from trainer.spec.strategy import Checkpointing, LossHead, Strategy

SAME_SPEED = 0.01  # predictions that differ by less are one
EAGER_HANDICAP = 1.10  # whole logits must be faster by more than nine predictions in ten err, to be worth their memory


def time_class(seconds: float) -> int:
    """Durations within about one per cent share a class; the shorter, the smaller."""
    return math.floor(math.log(seconds) / math.log1p(SAME_SPEED))


def loss_handicap(loss: LossHead) -> float:
    """Factor of a predicted time for its loss head."""
    return EAGER_HANDICAP if loss is LossHead.EAGER else 1.0


class Bounded(NamedTuple):
    """A choice of a row beside its micro batch, with the seconds that none of its micro batches goes below."""

    seconds: float
    micro_batch: int | None  # which takes them; None where none may
    start: Setting


def bounded_starts(context: PlanningContext, strategy: Strategy) -> list[Bounded]:
    """Each choice of a row with its activations where they are taken first, the fastest bound first."""
    return _bounded(context, strategy, offloads=activation_offloads(context)[0])


def best_candidate(context: PlanningContext, strategy: Strategy) -> Candidate | None:
    """The fastest setting of a row that fits on the device, its buffers grown; None where none does."""
    best = best_setting(context, strategy, bounded_starts(context, strategy))
    return None if best is None else with_grown_buckets(context, best)


def best_setting(context: PlanningContext, strategy: Strategy, starts: Sequence[Bounded]) -> Setting | None:
    """The fastest setting of a row with its smallest buffers; `starts` are the row's `bounded_starts`."""
    if never_fits(context, starts[0].start):
        return None
    _, *others = activation_offloads(context)  # the second only where nothing fits under the first
    best = _fastest(context, starts)
    for offloads in others:
        best = best or _fastest(context, _bounded(context, strategy, offloads=offloads))
    return best


def least_need(context: PlanningContext, strategy: Strategy) -> Candidate:
    """The setting of a row that needs the least memory; where it fits there is a `best_candidate`, and nowhere else.

    It is at one end of the micro batches, and larger slices of logits never need less.
    """
    sizes = micro_batches(context, strategy)
    settings = [
        setting
        for offloads in activation_offloads(context)
        for start in _starts(context, strategy, offloads=offloads)
        if start.loss_chunk_tokens == chunk_sizes(context.shape, start.loss)[-1]
        for micro_batch in sorted({sizes[0], sizes[-1]})
        if obstacle_to(context, setting := with_micro_batch(context, start, micro_batch)) is None
    ]
    return candidate_of(context, least_needy(context, settings))


def can_fit(context: PlanningContext, strategy: Strategy) -> bool:
    """True if any setting of a strategy fits the device."""
    first = next(_starts(context, strategy, offloads=activation_offloads(context)[0]))
    return not never_fits(context, first) and least_need(context, strategy).memory.fits


def _fastest(context: PlanningContext, starts: Sequence[Bounded]) -> Setting | None:
    """The fastest setting that fits, by branch and bound.

    Where rows are not padded smaller micro batches are no faster. Smaller slices of logits never are: they are looked
    at for the micro batches that do not fit with larger ones.
    """
    best: tuple[tuple[int, int], Setting] | None = None
    cuts = not _is_padded(context)
    possible: dict[tuple[Checkpointing, bool], list[int]] = {}
    found_of: dict[tuple[Checkpointing, LossHead, bool], set[int]] = {}

    def key_of(setting: Setting, bounded: Bounded) -> tuple[int, int]:
        is_bound = setting.micro_batch == bounded.micro_batch
        seconds = bounded.seconds if is_bound else _seconds_of(context, setting)
        return time_class(seconds), setting.micro_batch

    for bounded in starts:
        if best is not None and time_class(bounded.seconds) > best[0][0]:
            break
        start = bounded.start
        if (start.checkpointing, start.compile) not in possible:
            possible[start.checkpointing, start.compile] = _possible_sizes(context, start)
        known = found_of.setdefault((start.checkpointing, start.loss, start.compile), set())
        sizes = [size for size in possible[start.checkpointing, start.compile] if size not in known]
        for settings in by_accumulation(context, start, sizes):
            if best is not None and cuts and settings and key_of(settings[-1], bounded)[0] > best[0][0]:
                break
            found = fitting(context, settings)
            known.update(setting.micro_batch for setting in found)
            for setting in reversed(found):
                key = key_of(setting, bounded)
                if best is None or key < best[0]:
                    best = key, setting
                elif cuts and key[0] > best[0][0]:
                    break
    return None if best is None else best[1]


def _possible_sizes(context: PlanningContext, start: Setting) -> list[int]:
    """The micro batches that would fit if logits took no room, which is the same for every loss head."""
    groups = by_accumulation(context, start, micro_batches(context, start.strategy))
    floor, usable = need_floor(context, start), context.device.usable_bytes
    return sorted(setting.micro_batch for group in groups for setting in group[: _num_within(group, usable, floor)])


def by_accumulation(
    context: PlanningContext, start: Setting, sizes: Iterable[int]
) -> tuple[list[Setting], list[Setting]]:
    """`start` with those micro batches that can run: the whole share at once, and what is added up to it."""
    settings = [
        setting
        for micro_batch in sizes
        if obstacle_to(context, setting := with_micro_batch(context, start, micro_batch)) is None
    ]
    at_once = [setting for setting in settings if setting.accumulation == 1]
    return at_once, [setting for setting in settings if setting.accumulation > 1]


def fitting(context: PlanningContext, settings: Sequence[Setting]) -> Sequence[Setting]:
    """Those of one accumulation that fit the device: need grows with the micro batch."""
    return settings[: _num_within(settings, context.device.usable_bytes, partial(predicted_need, context))]


def _bounded(context: PlanningContext, strategy: Strategy, *, offloads: bool) -> list[Bounded]:
    bounds: dict[tuple[Checkpointing, LossHead, bool], Bounded] = {}
    found = []
    for start in _starts(context, strategy, offloads=offloads):
        key = start.checkpointing, start.loss, start.compile
        if key in bounds:  # with larger slices of logits: smaller ones are no faster
            found.append(bounds[key]._replace(micro_batch=None, start=start))
        else:
            bounds[key] = _bound(context, start)
            found.append(bounds[key])
    return sorted(found, key=lambda bounded: bounded.seconds)


def _bound(context: PlanningContext, start: Setting) -> Bounded:
    """No micro batch is faster: the largest, which is a rank's whole share, but for rows padded to the longest."""
    sizes = micro_batches(context, start.strategy)
    settings = [with_micro_batch(context, start, size) for size in (sizes if _is_padded(context) else sizes[-1:])]
    seconds, at = min((_seconds_of(context, setting), setting.micro_batch) for setting in settings)
    return Bounded(seconds, at, start)


def _is_padded(context: PlanningContext) -> bool:
    return context.data is not None and not context.data.is_packed


def _seconds_of(context: PlanningContext, setting: Setting) -> float:
    """Seconds by which settings of a strategy are compared."""
    return relative_seconds(context, setting) * loss_handicap(setting.loss)


def _starts(context: PlanningContext, strategy: Strategy, *, offloads: bool) -> Iterator[Setting]:
    """Each choice of checkpointing, loss head and slice, at the smallest micro batch and buffers."""
    kinds, heads = checkpointings(context), losses(context)
    first = first_setting(context, strategy, checkpointing=kinds[0], loss=heads[0])
    first = replace(first, activation_offload=offloads)
    for checkpointing in kinds:
        start = replace(first, checkpointing=checkpointing, checkpoint_every_n=every_n(context, checkpointing))
        for loss in heads:
            for tokens in chunk_sizes(context.shape, loss):
                for is_compiled in compiles(context):
                    yield replace(start, loss=loss, loss_chunk_tokens=tokens, compile=is_compiled)


def with_grown_buckets(context: PlanningContext, setting: Setting) -> Candidate:
    """A setting that fits, with the buffers that half of what it leaves has room for."""
    ladder = bucket_ladder(context.shape, setting.strategy)
    if len(ladder) == 1:
        return candidate_of(context, setting)
    budget = (predicted_need(context, setting) + context.device.usable_bytes) // 2
    largest = replace(setting, buckets=ladder[-1])
    if predicted_need(context, largest) <= budget:  # as a rule
        return candidate_of(context, largest)
    grown = [replace(setting, buckets=buckets) for buckets in ladder]
    num_within = bisect_right(grown, budget, lo=1, hi=len(grown) - 1, key=partial(predicted_need, context))
    return candidate_of(context, grown[num_within - 1])


def _num_within(settings: Sequence[Setting], budget: int, need_of: Callable[[Setting], int]) -> int:
    """How many of `settings`, in ascending order of need, need at most `budget` bytes.

    The ends are asked first: as a rule all fit or none does.
    """
    if not settings or (len(settings) > 1 and need_of(settings[0]) > budget):
        return 0
    if need_of(settings[-1]) <= budget:
        return len(settings)
    return 0 if len(settings) == 1 else bisect_right(settings, budget, lo=1, hi=len(settings) - 1, key=need_of)
