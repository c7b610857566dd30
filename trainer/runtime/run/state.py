"""The state of a run on one rank: progress, measurements, incidents, steps that are not applied; its status and report.

A step is not taken if its loss or gradient norm is not finite or, under `train.skip_spikes`, far above that of the last
steps. The rule is pure: it decides from what all ranks agree on, so the verdict is the same on every rank. Window and
distance are those of OLMo (allenai/OLMo-core, optim/skip_step_optimizer.py: the last 128 steps, 6 standard deviations,
no verdict before half a window). Unlike there, steps that were not taken do not enter the window: one spike in it would
hide the next ones.

A step that is not taken is spent all the same: the next one has its own learning rate and its own rows. When a run goes
back to a checkpoint, the rows since are passed over: from then on a step learns from the rows of a later one. What must
survive a resume is a value in each checkpoint (`SpikeRecord`): the window, the steps in a row, what was passed over.

Files of a rank: status.json while it runs, report.json at the end.

    attempts/N/status.json            phase and step, by rank 0, replaced atomically, at most twice a second in a phase
    attempts/N/heartbeats/rank-R      the last sign of life of each rank, overwritten in place
    attempts/N/report.json            by rank 0
    attempts/N/report-rank-R.json     by another rank that failed or ran out of memory; each has a file of its own

If attempts/N/report.json exists already, the attempt has ended and was started again by hand. Everything is then
written under attempts/N/again-<UTC time of the start>/, as if that were the run directory, and nothing is overwritten.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

from msgspec import Meta
from msgspec.structs import replace

from shardwise.trainer.runtime.run.clock import CoreQueue
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.messages.rank_files import (
    HEARTBEAT_BYTES,
    Heartbeat,
    encode_heartbeat,
    heartbeat_path,
    part_of_time,
    report_room_path,
)
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import (
    DeviceTime,
    Evaluation,
    Figures,
    MemoryFigures,
    Report,
    RollBack,
    SpeedFigures,
    TimePart,
    Verified,
)
from shardwise.trainer.spec.value import Value

WINDOW_STEPS = 128
LEAST_STEPS = WINDOW_STEPS // 2  # in the window, before anything is far from them
SIGMAS = 6.0
# Of the mean, so that 12 % above it are no spike: where every step sees the same rows, 6 sigma are next to nothing.
LEAST_SIGMA = 0.02
# In a row: bad rows hardly ever meet so often, so the weights are the suspects.
STEPS_UNTIL_ROLL_BACK = 5
MAX_ROLL_BACKS = 20  # of a run; as often as PaLM's largest one was restarted before a spike (arXiv:2204.02311, 5.1)

Count = Annotated[int, Meta(ge=0)]
Window = Annotated[tuple[float, ...], Meta(max_length=WINDOW_STEPS)]


class PassedOver(Value, frozen=True, kw_only=True):
    """Rows that were passed over when a run went back: those of `num_steps` steps, after `after_step`."""

    after_step: Count
    num_steps: Annotated[int, Meta(ge=1)]


class SpikeRecord(Value, frozen=True, kw_only=True):
    """Basis of the verdict on a step, and the outcome of the verdicts so far."""

    losses: Window = ()  # of the last steps that were taken
    grad_norms: Window = ()  # before clipping; none where weights are updated in the backward pass
    in_a_row: Count = 0  # steps up to now that were not to be taken
    skipped_steps: tuple[Count, ...] = ()
    passed_over: tuple[PassedOver, ...] = ()


def find_fault(record: SpikeRecord, *, loss: float, grad_norm: float | None, skips_spikes: bool) -> str | None:
    """Why a step of this loss and gradient norm, both over all ranks, is not to be taken; None where it is."""
    figures = (("loss", loss, record.losses), ("gradient norm", grad_norm, record.grad_norms))
    for name, value, _ in figures:
        if value is not None and not math.isfinite(value):
            return f"the {name} is not finite"
    for name, value, window in figures if skips_spikes else ():
        if value is None or len(window) < LEAST_STEPS:
            continue
        mean, sigma = _mean_and_sigma(window)
        if value > mean + SIGMAS * sigma:
            return (
                f"the {name}, {value:.4g}, is {(value - mean) / sigma:.0f} sigma above the mean of the last "
                f"{len(window)} steps, {mean:.4g}"
            )
    return None


def after_step(
    record: SpikeRecord, *, step: int, loss: float, grad_norm: float | None, fault: str | None, was_skipped: bool
) -> SpikeRecord:
    """The record once a step is over; `was_skipped` is False where a fault was found too late to skip it."""
    if fault is not None:
        skipped = (*record.skipped_steps, step) if was_skipped else record.skipped_steps
        return replace(record, in_a_row=record.in_a_row + 1, skipped_steps=skipped)
    norms = record.grad_norms if grad_norm is None else (*record.grad_norms, grad_norm)
    losses = (*record.losses, loss)
    return replace(record, losses=losses[-WINDOW_STEPS:], grad_norms=norms[-WINDOW_STEPS:], in_a_row=0)


def after_roll_back(saved: SpikeRecord, *, saved_step: int, step: int) -> SpikeRecord:
    """The record of a checkpoint from which a run continues after a fault at a later step; its rows are passed over."""
    passed_over = PassedOver(after_step=saved_step, num_steps=step - saved_step)
    return replace(saved, in_a_row=0, passed_over=(*saved.passed_over, passed_over))


def step_of_rows(step: int, passed_over: Iterable[PassedOver]) -> int:
    """The step of the data order whose rows a step learns from; both count from 1."""
    return step + sum(each.num_steps for each in passed_over if each.after_step < step)


def _mean_and_sigma(window: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(window) / len(window)
    variance = math.fsum((value - mean) ** 2 for value in window) / (len(window) - 1)
    return mean, max(math.sqrt(variance), LEAST_SIGMA * abs(mean), math.ulp(mean))


SKIPPED_STEPS = 2  # the first ones allocate and warm caches


class IncidentKind(StrEnum):
    """The kinds of incidents that are counted, repeated or replaced; all others are `OTHER`."""

    STEP_NOT_TAKEN = "step_not_taken"
    MORE_STEPS_NOT_TAKEN = "more_steps_not_taken"
    NO_CHECKPOINTS = "no_checkpoints"
    BAD_ROWS = "bad_rows"
    NOT_COMPILED = "not_compiled"
    NOT_FUSED = "not_fused"
    LOSS_NOT_FUSED = "loss_not_fused"
    NOT_SAVED = "not_saved"
    MORE_NOT_SAVED = "more_not_saved"
    AT_START = "at_start"  # shown with the first step
    FIRST_STEPS = "first_steps"  # are not those of the plan
    OTHER = "other"


class Incident(NamedTuple):
    """One line of the report on something unusual."""

    text: str
    kind: IncidentKind


class IncidentLog:
    """The incidents of a run on one rank, in order."""

    def __init__(self) -> None:
        self._entries: list[Incident] = []

    @property
    def texts(self) -> list[str]:
        """The lines for the report."""
        return [entry.text for entry in self._entries]

    def note(self, text: str, kind: IncidentKind = IncidentKind.OTHER) -> None:
        """Appends an incident."""
        self._entries.append(Incident(text, kind))

    def replace(self, text: str, kind: IncidentKind) -> None:
        """Appends an incident and removes the earlier ones of its kind."""
        self._entries = [entry for entry in self._entries if entry.kind is not kind]
        self.note(text, kind)

    def texts_of(self, kind: IncidentKind) -> tuple[str, ...]:
        """The lines of a kind."""
        return tuple(entry.text for entry in self._entries if entry.kind is kind)

    def count(self, kind: IncidentKind) -> int:
        """Number of incidents of a kind."""
        return sum(entry.kind is kind for entry in self._entries)


class SteadyStep(NamedTuple):
    """A step whose time counts for the measured speed; counts are of all ranks."""

    step_s: float
    num_tokens: int  # without padding
    num_targets: int


@dataclass(slots=True)
class RunState:
    """Mutable, one per rank; a report can be made of it at any moment, also in the middle of a failure."""

    step: int = 0  # optimizer steps done
    tokens_seen: int = 0  # without padding
    targets_seen: int = 0  # tokens that were learned
    final_loss: float | None = None
    resumed_from_step: int | None = None
    checkpoint: str | None = None  # newest committed, relative to the run directory
    unsaved: str | None = None  # why the last save failed; None once one succeeded
    saved_bytes: int = 0  # of checkpoints that training waited for, written and read back, by all ranks
    export: str | None = None
    verified: Verified | None = None
    memory: MemoryFigures = field(default_factory=MemoryFigures)
    evaluations: list[Evaluation] = field(default_factory=list)
    log: IncidentLog = field(default_factory=IncidentLog)
    roll_backs: list[RollBack] = field(default_factory=list)
    spikes: SpikeRecord = field(default_factory=SpikeRecord)
    fault: str | None = None  # of the last step, if it was not taken
    last_loss: float | None = None  # of the last step, taken or not
    prompt: str | None = None
    sample_before: str | None = None
    sample_after: str | None = None
    steady_steps: list[SteadyStep] = field(default_factory=list)
    steady_parts: list[dict[str, float]] = field(default_factory=list)  # seconds of their phases
    core_queue: CoreQueue | None = None  # since the first steady step
    device_time: DeviceTime | None = None  # once steps were sampled

    @property
    def incidents(self) -> list[str]:
        """The lines of the incidents so far."""
        return self.log.texts

    @property
    def best_step(self) -> int | None:
        """Step of the lowest evaluation loss."""
        return min(self.evaluations, key=lambda evaluation: evaluation.loss).step if self.evaluations else None


def measured_figures(state: RunState, plan: Plan) -> Figures:
    """The measured figures: medians over the steady steps."""
    if not state.steady_steps:
        return Figures(memory=state.memory)
    step_s = median(done.step_s for done in state.steady_steps)
    rate = median(done.num_tokens / done.step_s for done in state.steady_steps) / plan.chosen.num_ranks
    learned = median(done.num_targets / done.step_s for done in state.steady_steps) / plan.chosen.num_ranks
    return Figures(
        memory=state.memory,
        speed=SpeedFigures(
            step_s=step_s,
            tokens_per_s_per_gpu=rate,
            targets_per_s_per_gpu=learned,
            mfu=model_flops_share(plan, rate),
            parts=_median_parts(state),
            queued_share=None if state.core_queue is None else state.core_queue.share,
        ),
    )


def _median_parts(state: RunState) -> dict[str, float]:
    names = state.steady_parts[0] if state.steady_parts else ()
    return {name: median(parts[name] for parts in state.steady_parts) for name in names}


def model_flops_share(plan: Plan, tokens_per_s_per_gpu: float) -> float | None:
    """Model FLOPs utilisation at this rate; None if the device's peak is unknown."""
    speed = plan.chosen.speed
    if speed.peak_flops_per_s is None:
        return None
    return tokens_per_s_per_gpu * speed.flops_per_token / speed.peak_flops_per_s


STATUS_INTERVAL_S = 0.5
_REPORTED_PACKAGES = ("shardwise", "torch", "accelerate", "transformers", "deepspeed", "safetensors")


class RunPaths(Value, frozen=True, kw_only=True):
    """Every path a rank reads or writes."""

    plan_dir: Path  # of plan.json
    attempt_dir: Path  # where this attempt's pids, status and report go
    run_dir: Path  # where metrics, checkpoints and the export go
    resume_dir: Path  # whose checkpoints are resumed from
    attempt: int
    is_again: bool


def run_paths(plan_path: Path, *, started_at: datetime) -> RunPaths:
    """The paths that follow from `RUN/attempts/N/plan.json`."""
    plan_dir = plan_path.resolve().parent
    run_dir = plan_dir.parent.parent
    is_again = (plan_dir / "report.json").exists()
    again = plan_dir / f"again-{started_at.strftime('%Y%m%d-%H%M%S')}"
    return RunPaths(
        plan_dir=plan_dir,
        attempt_dir=again if is_again else plan_dir,
        run_dir=again if is_again else run_dir,
        resume_dir=run_dir,
        attempt=int(plan_dir.name) if plan_dir.name.isdigit() else 1,
        is_again=is_again,
    )


def start_of_launch(*, world_size: int) -> datetime:
    """When the launcher of these ranks started, the same on every rank of a node; of a lone rank, when itself did."""
    pid = os.getpid() if world_size == 1 else os.getppid()
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(
        int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
    )
    return datetime.fromtimestamp(boot + ticks / os.sysconf("SC_CLK_TCK"), tz=UTC)


class ReportWriter:
    """Writes one rank's heartbeats, status and report."""

    def __init__(self, paths: RunPaths, *, rank: int) -> None:
        self.attempt_dir, self.rank = paths.attempt_dir, rank
        self.problem = ""  # in every heartbeat
        self._num_beats, self._step = 0, 0
        self._phase, self._written_at = "", 0.0  # of status.json, and when it was written
        self._heartbeat: int | None = None  # a descriptor, open while the process lives
        self._part: TimePart | None = None
        self._part_since_s = time.monotonic()
        self.phases_s: dict[str, float] = {}  # seconds so far, by `TimePart`

    def write_status(self, phase: str, *, step: int = 0) -> None:
        """Writes the status on rank 0 and a heartbeat on each rank; a full disk is no error.

        While a phase lasts, the status is written every half second: replacing a file costs more than a short step.
        """
        self.beat(phase, step=step)
        now = time.monotonic()
        if self.rank == 0 and (phase != self._phase or now - self._written_at >= STATUS_INTERVAL_S):
            self._phase, self._written_at = phase, now
            status = {"phase": phase, "step": step}
            with suppress(OSError):
                codec.write_bytes(self.attempt_dir / "status.json", json.dumps(status).encode())

    def beat(self, phase: str, *, step: int) -> None:
        """Writes a heartbeat: one small write, cheap enough for every phase of a step."""
        self._count_time(phase)
        self._num_beats = self._num_beats + 1 if step == self._step else 1
        self._step = step
        beat = Heartbeat(count=self._num_beats, phase=phase, step=step, problem=self.problem)
        with suppress(OSError):
            if self._heartbeat is None:
                self._heartbeat = _open_heartbeat(heartbeat_path(self.attempt_dir, self.rank))
            os.pwrite(self._heartbeat, encode_heartbeat(beat), 0)

    def _count_time(self, phase: str) -> None:
        now = time.monotonic()
        if self._part is not None:
            self.phases_s[self._part] = self.phases_s.get(self._part, 0.0) + now - self._part_since_s
        self._part, self._part_since_s = part_of_time(phase), now

    def write_report(self, report: Report) -> None:
        """Writes this rank's report, on a full disk in the room that was reserved for it."""
        self._count_time("")
        report = replace(report, phases_s=self.phases_s)
        report_room_path(self.attempt_dir).unlink(missing_ok=True)
        name = "report.json" if self.rank == 0 else f"report-rank-{self.rank}.json"
        codec.write_redacted(self.attempt_dir / name, report)


def _open_heartbeat(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.ftruncate(descriptor, HEARTBEAT_BYTES)
    return descriptor


@cache
def installed_versions() -> dict[str, str]:
    """Versions of the packages that decide what a run does; one that is not installed is omitted."""
    versions = {}
    for package in _REPORTED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
