"""The interface of a tracker, and the series that it gets from metrics.jsonl.

A tracker is a service outside the run that receives its progress. It may fail, hang or disappear without any effect on
the run: no tracker runs in a process that trains. The supervisor starts one process for all of them (`start`); that
process reads the run directory and calls each tracker from a thread of its own (`process`). To add a tracker: a class
with the methods of `Tracker`, and a row in `process.makers_of`.

A series is called `group/field`, with the field as in metrics.jsonl. A field without a row here becomes `other/field`.
The value that the plan predicts for a field is the series `group/field_predicted`.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.job.sections import WandbMode
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.value import Value

SHOWN = "tracker: "  # prefix of the log lines that the supervisor shows on the console
STEP = "step"  # the x axis of every series
PREDICTED = "_predicted"
NOT_SAVED = "checkpoint not saved"  # title of an incident
_GROUPS = (  # the first match decides
    ("eval", re.compile(r"eval_.*")),
    ("speed", re.compile(r"tokens_per_s.*|targets_per_s|mfu|model_tflops.*|padding_share")),
    ("time", re.compile(r".*_s")),
    ("gpu", re.compile(r"gpu_.*")),
    ("memory", re.compile(r"(memory|host|nvme)_.*_bytes")),
    ("train", re.compile(r"loss|lr|grad_norm|epoch|tokens|targets|attempt|loss_scale|skipped.*|reward_.*|logps_.*")),
)
_SUMMARIES = (  # the first match decides; any other series is summarized by its last value
    (("min", "last"), re.compile(r"train/loss|eval/(eval_)?loss")),
    (("max", "last"), re.compile(r"eval/.*accuracy|train/reward_accuracy")),
    (("max",), re.compile(r"memory/.*|gpu/gpu_temperature_c|train/attempt")),
    (("mean", "last"), re.compile(r"speed/.*|time/.*|gpu/.*")),
)


class TrackerOrder(Value, frozen=True, kw_only=True):
    """The trackers to run: the first line that the supervisor writes to their process."""

    name: str
    project: str
    group: str | None = None  # of the points of a sweep
    first_attempt: int  # of this supervisor; an earlier supervisor has reported the attempts before
    wandb: WandbMode = WandbMode.OFF
    tensorboard: bool = False
    notify: tuple[str, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the trackers."""
        used = (self.wandb is not WandbMode.OFF, self.tensorboard, self.notify is not None)
        return tuple(name for name, is_used in zip(("wandb", "tensorboard", "notify"), used, strict=True) if is_used)


class EndNotice(Value, frozen=True, kw_only=True):
    """The end of the run: the second line that the supervisor writes. Without it, the supervisor died."""

    has_report: bool  # report.json covers the attempts of this supervisor
    error: str | None = None  # the reason of the end, if it is in no report


class ViewRequest(Value, frozen=True, kw_only=True):
    """A saved view for a project of wandb; without `entity`, that of the login."""

    entity: str | None
    project: str
    title: str
    sections: dict[str, dict[str, tuple[str, ...]]]  # series of charts, by section and title


class WandbResult(Value, frozen=True, kw_only=True):
    """The result of a command of `launch.track.wandb`: a problem, or the URL of a saved view."""

    problem: str | None = None
    url: str | None = None


class Run(NamedTuple):
    """A run whose first attempt is about to begin."""

    run_dir: Path
    order: TrackerOrder
    plan: Plan  # of that attempt


class Line(NamedTuple):
    """One line of metrics.jsonl."""

    place: int  # in the file, from 0; a resumed run does not change it
    step: int
    attempt: int
    values: dict[str, float]  # by series, with the predicted ones


class Incident(NamedTuple):
    """An event that needs a person's attention while the run goes on."""

    title: str
    text: str


class End(NamedTuple):
    """The end of the part of the run that this supervisor ran."""

    report: Report | None
    error: str | None = None


class Tracker:
    """Receives one run, in this order. An exception of any method ends this tracker and no other.

    A method that a tracker does not define does nothing.
    """

    name: str

    def begin(self, run: Run) -> None:
        """The first attempt has a plan. Not called if no attempt got one."""

    def step(self, line: Line) -> None:
        """Receives every line of metrics.jsonl from the first, including those before a resumption."""

    def incident(self, incident: Incident) -> None:
        """Receives out of memory, a dead rank, a loss that is not finite, a stall."""

    def end(self, end: End) -> None:
        """The last call; made even if `begin` was not called."""


def show(text: str) -> None:
    """Writes a line to the log that the supervisor shows on the console."""
    sys.stderr.write(f"{SHOWN}{text}\n")
    sys.stderr.flush()


def series_name(field: str) -> str:
    """`memory/memory_peak_bytes` for `memory_peak_bytes`; `step` has no group."""
    if field == STEP:
        return STEP
    group = next((group for group, pattern in _GROUPS if pattern.fullmatch(field)), "other")
    return f"{group}/{field}"


def summary_of(series: str) -> tuple[str, ...]:
    """The statistics that stand for a series over the whole run: min, max, mean, last."""
    if series.endswith(PREDICTED):
        return ("last",)
    return next((kinds for kinds, pattern in _SUMMARIES if pattern.fullmatch(series)), ("last",))


def measured_series(row: Mapping[str, Any]) -> dict[str, float]:
    """Every numeric field of a line, by series; a flag is 0 or 1. Null, text and lists are left out."""
    numbers = {field: value for field, value in row.items() if isinstance(value, int | float)}
    return {series_name(field): int(value) if isinstance(value, bool) else value for field, value in numbers.items()}


def predicted_series(candidate: Candidate, kind: DeviceKind) -> dict[str, float]:
    """The plan's predictions for fields of metrics.jsonl, in the same units; a CPU has RAM alone."""
    memory, speed = candidate.memory, candidate.speed
    fields: dict[str, float | None] = {
        "memory_peak_bytes": memory.peak_allocated_bytes,
        "memory_allocated_bytes": memory.steady_allocated_bytes,
        "memory_reserved_bytes": None if kind is DeviceKind.CPU else memory.peak_reserved_bytes,
        "memory_device_bytes": None if kind is DeviceKind.CPU else memory.device_bytes,
        "host_rss_bytes": memory.need_bytes if kind is DeviceKind.CPU else None,
        "step_s": speed.step_s,
        "tokens_per_s": speed.tokens_per_s_per_gpu * candidate.num_ranks,
        "tokens_per_s_per_gpu": speed.tokens_per_s_per_gpu,
        "mfu": speed.mfu,
    }
    return {f"{series_name(field)}{PREDICTED}": value for field, value in fields.items() if value is not None}


class Summaries:
    """The summary of every series over all lines of the run, including those of earlier supervisors."""

    def __init__(self) -> None:
        self._totals: dict[str, dict[str, float]] = {}

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name == STEP:
                continue
            total = self._totals.setdefault(name, {"min": value, "max": value, "sum": 0.0, "count": 0})
            total.update(min=min(total["min"], value), max=max(total["max"], value), last=value)
            total["sum"] += value
            total["count"] += 1

    def all(self) -> dict[str, float | dict[str, float]]:
        """By series: one number, or several by the name of the statistic."""
        return {name: _summary(total, summary_of(name)) for name, total in self._totals.items()}


def _summary(total: Mapping[str, float], kinds: Iterable[str]) -> float | dict[str, float]:
    numbers = {kind: total["sum"] / total["count"] if kind == "mean" else total[kind] for kind in kinds}
    return numbers["last"] if list(numbers) == ["last"] else numbers
