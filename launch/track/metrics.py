"""How the fields of metrics.jsonl are grouped, summed up and held beside what was predicted. Pure.

A series is called `group/field`, the field as metrics.jsonl has it. A field that no row knows is sent as `other/field`,
so that a new one needs no change here. What the plan predicts for a field stands beside it as `group/field_predicted`.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.spec.plan import Candidate

STEP = "step"  # the axis of every series
PREDICTED = "_predicted"
_GROUPS = (  # the first that matches decides
    ("eval", re.compile(r"eval_.*")),
    ("speed", re.compile(r"tokens_per_s.*|mfu|model_tflops.*|padding_share")),
    ("time", re.compile(r".*_s")),
    ("gpu", re.compile(r"gpu_.*")),
    ("memory", re.compile(r"(memory|host|nvme)_.*_bytes")),
    ("train", re.compile(r"loss|lr|grad_norm|epoch|tokens|attempt|loss_scale|skipped.*|reward_.*|logps_.*")),
)
_SUMMARIES = (  # the first that matches decides; everything else keeps its last value
    (("min", "last"), re.compile(r"train/loss|eval/eval_loss")),
    (("max", "last"), re.compile(r"eval/.*accuracy|train/reward_accuracy")),
    (("max",), re.compile(r"memory/.*|gpu/gpu_temperature_c|train/attempt")),
    (("mean", "last"), re.compile(r"speed/.*|time/.*|gpu/.*")),
)


def series_name(field: str) -> str:
    """`memory/memory_peak_bytes` of `memory_peak_bytes`; the step stays what it is."""
    if field == STEP:
        return STEP
    group = next((group for group, pattern in _GROUPS if pattern.fullmatch(field)), "other")
    return f"{group}/{field}"


def summary_of(series: str) -> tuple[str, ...]:
    """Which of a series' values stand for the whole run."""
    if series.endswith(PREDICTED):
        return ("last",)
    return next((kinds for kinds, pattern in _SUMMARIES if pattern.fullmatch(series)), ("last",))


def measured_series(row: Mapping[str, Any]) -> dict[str, float]:
    """Every numeric field of a line; what is null, text or a list is left out, a flag is 0 or 1."""
    numbers = {field: value for field, value in row.items() if isinstance(value, int | float)}
    return {series_name(field): int(value) if isinstance(value, bool) else value for field, value in numbers.items()}


def predicted_series(candidate: Candidate) -> dict[str, float]:
    """What the plan says of the fields that metrics.jsonl measures, in the same units."""
    memory, speed = candidate.memory, candidate.speed
    fields: dict[str, float | None] = {
        "memory_peak_bytes": memory.peak_allocated_bytes,
        "memory_allocated_bytes": memory.steady_allocated_bytes,
        "memory_reserved_bytes": memory.peak_reserved_bytes,
        "memory_device_bytes": memory.device_bytes,
        "step_s": speed.step_s,
        "tokens_per_s": speed.tokens_per_s_per_gpu * candidate.num_ranks,
        "tokens_per_s_per_gpu": speed.tokens_per_s_per_gpu,
        "mfu": speed.mfu,
    }
    return {f"{series_name(field)}{PREDICTED}": value for field, value in fields.items() if value is not None}


class Summaries:
    """The summary of every series over all lines, whichever supervisor they were written under."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, float]] = {}

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name == STEP:
                continue
            kept = self._kept.setdefault(name, {"min": value, "max": value, "sum": 0.0, "count": 0})
            kept.update(min=min(kept["min"], value), max=max(kept["max"], value), last=value)
            kept["sum"] += value
            kept["count"] += 1

    def all(self) -> dict[str, float | dict[str, float]]:
        """By series: one number where one was asked for, else the numbers by name."""
        return {name: _summary(kept, summary_of(name)) for name, kept in self._kept.items()}


def _summary(kept: Mapping[str, float], kinds: Iterable[str]) -> float | dict[str, float]:
    numbers = {kind: kept["sum"] / kept["count"] if kind == "mean" else kept[kind] for kind in kinds}
    return numbers["last"] if list(numbers) == ["last"] else numbers
