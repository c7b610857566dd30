"""What metrics.jsonl tells of a run's steps: read whole, and what they say together. Pure but for the reading.

A line that is cut off or damaged is left out. A step that was done again, after a restart or a way back, has several
lines: all of them took time, the last one counts for the curves.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from trainer.planning.recommend import Observed
from trainer.spec.report import Figures, MemoryFigures, SpeedFigures

_WARM_UP = 2  # steps of an attempt that are slower than the others
_LEAST_SAMPLES = 5  # on either side, before two medians are compared
_LEAST_SAVE_S = 1e-3  # below it, a save was looked for and not due
PHASES = ("data", "forward", "backward", "optimizer")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One line, as far as a report needs it; what a line lacks is None."""

    step: int
    attempt: int = 1
    loss: float | None = None
    eval_loss: float | None = None
    step_s: float | None = None
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    wait_s: float | None = None
    checkpoint_s: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    padding_share: float | None = None
    host_rss_bytes: int | None = None
    memory_allocated_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    memory_peak_bytes: int | None = None
    memory_device_bytes: int | None = None
    gpu_utilization: float | None = None
    gpu_throttle: str | None = None
    skipped: bool | None = None
    skipped_rows: tuple[int, ...] | None = None

    @property
    def other_s(self) -> float | None:
        """What no part of the step was measured for."""
        parts = (self.data_s, self.forward_s, self.backward_s, self.optimizer_s, self.wait_s)
        return None if self.step_s is None else max(0.0, self.step_s - sum(part or 0.0 for part in parts))


def read_steps(path: Path) -> tuple[Step, ...]:
    """Every line that is whole, in the order of the file."""
    decoder = msgspec.json.Decoder(Step)
    try:
        with path.open("rb") as stream:
            return tuple(step for line in stream if (step := _decoded(decoder, line)) is not None)
    except OSError:
        return ()


def _decoded(decoder: "msgspec.json.Decoder[Step]", line: bytes) -> Step | None:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def last_of_each(steps: Iterable[Step]) -> tuple[Step, ...]:
    """The line that counts of each step, by number."""
    return tuple(step for _, step in sorted({step.step: step for step in steps}.items()))


def observed(steps: Sequence[Step]) -> Observed:
    """What the steps say together."""
    steady = steady_steps(steps)
    throttled = [step for step in steady if step.gpu_throttle]
    saves = [step.checkpoint_s for step in steps if (step.checkpoint_s or 0.0) >= _LEAST_SAVE_S]
    busy = [step.gpu_utilization for step in steady if step.gpu_utilization is not None]
    return Observed(
        data_share=_share(steady, lambda step: step.data_s),
        wait_share=_share(steady, lambda step: step.wait_s),
        saving_share=_saving_share(steps),
        num_saves=len(saves),
        padding_share=_mean([step.padding_share for step in steps]),
        num_steps=len(steps),
        num_skipped=sum(1 for step in steps if step.skipped and step.skipped_rows),
        idle_share=1 - statistics.fmean(busy) if busy else None,
        throttle=statistics.mode(step.gpu_throttle for step in throttled) if throttled else None,
        throttled_slowdown=_ratio(throttled, [step for step in steady if not step.gpu_throttle]),
    )


def steady_steps(steps: Sequence[Step]) -> list[Step]:
    """Without the first of each attempt, which warm up; all of them where there are no others."""
    seen: dict[int, int] = {}
    kept = []
    for step in steps:
        seen[step.attempt] = seen.get(step.attempt, 0) + 1
        if seen[step.attempt] > _WARM_UP:
            kept.append(step)
    return kept or list(steps)


def figures_of(steps: Sequence[Step]) -> Figures:
    """What was measured so far, of a run without a report."""
    steady = steady_steps(steps)
    return Figures(
        memory=MemoryFigures(
            steady_allocated_bytes=_largest([step.memory_allocated_bytes for step in steps]),
            peak_allocated_bytes=_largest([step.memory_peak_bytes for step in steps]),
            peak_reserved_bytes=_largest([step.memory_reserved_bytes for step in steps]),
            device_bytes=_largest([step.memory_device_bytes for step in steps]),
            host_bytes=_largest([step.host_rss_bytes for step in steps]),
        ),
        speed=SpeedFigures(
            step_s=_median([step.step_s for step in steady]),
            tokens_per_s_per_gpu=_median([step.tokens_per_s_per_gpu for step in steady]),
        ),
    )


def _share(steps: Iterable[Step], part_of: Callable[[Step], float | None]) -> float | None:
    """Of the time of those steps that tell both."""
    told = [(part, step.step_s) for step in steps if (part := part_of(step)) is not None and step.step_s]
    whole = sum(seconds for _, seconds in told)
    return sum(part for part, _ in told) / whole if whole else None


def _saving_share(steps: Iterable[Step]) -> float | None:
    training_s = saving_s = 0.0
    for step in steps:
        training_s += step.step_s or 0.0
        saving_s += step.checkpoint_s or 0.0
    return saving_s / (training_s + saving_s) if training_s else None


def _ratio(slow: Sequence[Step], others: Sequence[Step]) -> float | None:
    """How much longer a step of the one kind takes; None where either kind is rare."""
    if min(len(slow), len(others)) < _LEAST_SAMPLES:
        return None
    above, below = _median([step.step_s for step in slow]), _median([step.step_s for step in others])
    return above / below if above and below else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
