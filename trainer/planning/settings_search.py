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
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from trainer.planning.candidates import candidate_of, predicted_need, relative_speed, with_micro_batch
from trainer.planning.rules import obstacle_to
from trainer.planning.setting import Setting
from trainer.planning.settings_choices import (
    activation_offloads,
    bucket_ladder,
    checkpointings,
    chunk_sizes,
    compiles,
    first_setting,
    losses,
    micro_batches,
)
from trainer.planning.situation import Situation
from trainer.spec.plan import Candidate
from trainer.spec.strategy import LossHead, Strategy

SAME_SPEED = 0.01  # predictions that differ by less are one
EAGER_HANDICAP = 1.10  # whole logits must be faster by more than nine predictions in ten err, to be worth their memory


def time_class(seconds: float) -> int:
    """Durations within about one per cent share a class; the shorter, the smaller."""
    return math.floor(math.log(seconds) / math.log1p(SAME_SPEED))


def loss_handicap(loss: LossHead) -> float:
    """What a predicted time is multiplied by for the loss head it rests on."""
    return EAGER_HANDICAP if loss is LossHead.EAGER else 1.0


def best_candidate(situation: Situation, strategy: Strategy) -> Candidate | None:
    """The fastest setting of a row that fits on the device; None where none does."""
    for offloads in activation_offloads(situation):  # the second only where nothing fits under the first
        best = _fastest(situation, _starts(situation, strategy, offloads=offloads))
        if best is not None:
            return _with_grown_buckets(situation, best)
    return None


def least_need(situation: Situation, strategy: Strategy) -> Candidate:
    """The setting of a row that needs the least memory; where it fits there is a `best_candidate`, and nowhere else."""
    sizes = micro_batches(situation, strategy)
    settings = [
        setting
        for offloads in activation_offloads(situation)
        for start in _starts(situation, strategy, offloads=offloads)
        for micro_batch in sorted({sizes[0], sizes[-1]})
        if obstacle_to(situation, setting := with_micro_batch(situation, start, micro_batch)) is None
    ]
    return candidate_of(situation, min(settings, key=lambda setting: predicted_need(situation, setting)))


def fitting_settings(situation: Situation, start: Setting) -> list[Setting]:
    """`start` with every micro batch that can run and fits, ascending."""
    sizes = micro_batches(situation, start.strategy)
    settings = [with_micro_batch(situation, start, micro_batch) for micro_batch in sizes]
    settings = [setting for setting in settings if obstacle_to(situation, setting) is None]
    usable = situation.device.usable_bytes
    adding_up = [setting for setting in settings if setting.accumulation > 1]
    at_once = [setting for setting in settings if setting.accumulation == 1]
    return [
        *adding_up[: _num_within(situation, adding_up, usable)],
        *at_once[: _num_within(situation, at_once, usable)],
    ]


def _fastest(situation: Situation, starts: Iterable[Setting]) -> Setting | None:
    """The fastest setting that fits, by branch and bound."""
    bounds = [(_least_class(situation, start), start) for start in starts]
    best: tuple[tuple[int, int], Setting] | None = None
    for bound, start in sorted(bounds, key=lambda bounded: bounded[0]):
        if best is not None and bound > best[0][0]:
            break
        for setting in reversed(fitting_settings(situation, start)):
            key = (_class_of(situation, setting), setting.micro_batch)
            if best is None or key < best[0]:
                best = key, setting
            elif not _is_padded(situation) and key[0] > best[0][0]:
                break  # smaller micro batches are no faster
    return None if best is None else best[1]


def _least_class(situation: Situation, start: Setting) -> int:
    """No micro batch is faster: the largest, which is a rank's whole share, but for rows padded to the longest."""
    sizes = micro_batches(situation, start.strategy)
    settings = [with_micro_batch(situation, start, size) for size in (sizes if _is_padded(situation) else sizes[-1:])]
    return min(_class_of(situation, setting) for setting in settings)


def _is_padded(situation: Situation) -> bool:
    return situation.data is not None and not situation.data.is_packed


def _class_of(situation: Situation, setting: Setting) -> int:
    seconds = relative_speed(situation, setting).step_s
    return time_class(seconds * loss_handicap(setting.loss))


def _starts(situation: Situation, strategy: Strategy, *, offloads: bool) -> Iterator[Setting]:
    """Each choice of checkpointing, loss head and slice, at the smallest micro batch and buffers."""
    for checkpointing in checkpointings(situation):
        for loss in losses(situation):
            first = first_setting(situation, strategy, checkpointing=checkpointing, loss=loss)
            start = replace(first, activation_offload=offloads) if offloads else first
            for tokens in chunk_sizes(situation.shape, loss):
                for is_compiled in compiles(situation):
                    yield replace(start, loss_chunk_tokens=tokens, compile=is_compiled)


def _with_grown_buckets(situation: Situation, setting: Setting) -> Candidate:
    smallest = candidate_of(situation, setting)
    ladder = bucket_ladder(situation.shape, setting.strategy)
    if len(ladder) == 1:
        return smallest
    budget = (smallest.memory.need_bytes + smallest.memory.usable_bytes) // 2
    grown = [replace(setting, buckets=buckets) for buckets in ladder]
    return candidate_of(situation, grown[max(0, _num_within(situation, grown, budget) - 1)])


def _num_within(situation: Situation, settings: Sequence[Setting], budget: int) -> int:
    """How many of `settings`, in ascending order of need, need at most `budget` bytes.

    The ends are asked first: as a rule all fit or none does.
    """

    def needs(setting: Setting) -> int:
        return predicted_need(situation, setting)

    if not settings or needs(settings[0]) > budget:
        return 0
    if len(settings) == 1 or needs(settings[-1]) <= budget:
        return len(settings)
    return bisect_right(settings, budget, lo=1, hi=len(settings) - 1, key=needs)
