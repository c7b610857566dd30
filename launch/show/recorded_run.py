"""Runs for a report, read from their directories: ended, in progress, killed, or not begun.

A file that is missing or damaged is a problem in the result, so that one bad run does not hide the others. A line of
metrics.jsonl that is cut off or damaged is left out. A step that was repeated, after a restart or after going back to a
checkpoint, has several lines: all of them count for time, the last one counts for the curves. Of a long run a part of
the lines is read in full.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from shardwise.launch.attempt.retries import earlier_history, is_alive
from shardwise.launch.rundir.metrics import LEAST_SAVE_S, RecordedSteps, Step, read_steps
from shardwise.launch.rundir.paths import no_run
from shardwise.trainer.planning.explain.recommend import Observed, Recommendation, recommendations
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.messages.submission import FILE_NAME, Submission
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.report import Ending, Figures, MemoryFigures, Report, SpeedFigures, predicted_figures
from shardwise.trainer.spec.units import format_count, format_seconds
from shardwise.trainer.spec.value import Value

_WARM_UP = 2  # steps of an attempt that are slower than the others
_LEAST_SAMPLES = 5  # on either side, before two medians are compared


def last_of_each(steps: Iterable[Step]) -> tuple[Step, ...]:
    """The steps by number; one that was repeated replaces what followed it, as in a run that went back."""
    found: list[Step] = []
    for step in steps:
        while found and found[-1].step >= step.step:
            found.pop()
        found.append(step)
    return tuple(found)


def observed(steps: Sequence[Step], *, num_steps: int | None = None, training_s: float | None = None) -> Observed:
    """Summary of the steps; number and time are those of the whole file, if `steps` are a part of it."""
    steady = steady_steps(steps)
    throttled = [step for step in steady if step.gpu_throttle]
    saves = [step.checkpoint_s for step in steps if (step.checkpoint_s or 0.0) >= LEAST_SAVE_S]
    saving_s = sum(seconds or 0.0 for seconds in saves)
    training_s = sum(step.step_s or 0.0 for step in steps) if training_s is None else training_s
    padded = [step.padding_share for step in steps if step.padding_share is not None]
    busy = [step.gpu_utilization for step in steady if step.gpu_utilization is not None]
    return Observed(
        data_share=_share(steady, lambda step: step.data_s),
        wait_share=_share(steady, lambda step: step.wait_s),
        saving_share=saving_s / (training_s + saving_s) if training_s else None,
        num_saves=len(saves),
        padding_share=statistics.fmean(padded) if padded else None,
        num_steps=len(steps) if num_steps is None else num_steps,
        num_skipped=sum(1 for step in steps if step.skipped and step.skipped_rows),
        idle_share=1 - statistics.fmean(busy) if busy else None,
        throttle=statistics.mode(step.gpu_throttle for step in throttled) if throttled else None,
        throttled_slowdown=_ratio(throttled, [step for step in steady if not step.gpu_throttle]),
    )


def steady_steps(steps: Sequence[Step]) -> list[Step]:
    """The steps without the first of each attempt, which warm up; all of them if there are no others."""
    seen: dict[int, int] = {}
    retained = []
    for step in steps:
        seen[step.attempt] = seen.get(step.attempt, 0) + 1
        if seen[step.attempt] > _WARM_UP:
            retained.append(step)
    return retained or list(steps)


def figures_of(steps: Sequence[Step]) -> Figures:
    """Figures measured so far, for a run without a report."""
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
            targets_per_s_per_gpu=_median([step.targets_per_s_per_gpu for step in steady]),
        ),
    )


def _share(steps: Iterable[Step], part_of: Callable[[Step], float | None]) -> float | None:
    """Share of a phase in the time of the steps that have both figures."""
    recorded = [(part, step.step_s) for step in steps if (part := part_of(step)) is not None and step.step_s]
    whole = sum(seconds for _, seconds in recorded)
    return sum(part for part, _ in recorded) / whole if whole else None


def _ratio(slow: Sequence[Step], others: Sequence[Step]) -> float | None:
    """Duration of the slow steps by that of the others; None if there are few of either."""
    if min(len(slow), len(others)) < _LEAST_SAMPLES:
        return None
    above, below = _median([step.step_s for step in slow]), _median([step.step_s for step in others])
    return above / below if above and below else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


V = TypeVar("V", bound=Value)

ENDINGS = {
    Ending.FINISHED: "finished",
    Ending.STOPPED: "stopped by request",
    Ending.PREEMPTED: "stopped to be requeued",
    Ending.OUT_OF_MEMORY: "ran out of memory",
    Ending.FAILED: "failed",
}


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A run as its directory describes it."""

    run_dir: Path
    plan: Plan | None
    report: Report | None
    recorded: RecordedSteps = RecordedSteps(())
    overrides: tuple[str, ...] = ()  # of a point of a sweep
    problem: str | None = None  # why there is no report, or no plan

    @property
    def steps(self) -> tuple[Step, ...]:
        """Lines of metrics.jsonl."""
        return self.recorded.steps

    @cached_property
    def curve(self) -> tuple[Step, ...]:
        """The last line of each step."""
        return last_of_each(self.steps)

    @property
    def candidate(self) -> Candidate | None:
        """The configuration that ran; the planned one if there is no report."""
        if self.report is not None:
            return self.report.plan
        return None if self.plan is None else self.plan.chosen

    @property
    def predicted(self) -> Figures:
        if self.report is not None:
            return self.report.predicted
        return Figures() if self.plan is None else predicted_figures(self.plan.chosen)

    @property
    def measured(self) -> Figures:
        return figures_of(self.steps) if self.report is None else self.report.measured

    @property
    def step(self) -> int:
        return self.report.step if self.report is not None else self.curve[-1].step if self.curve else 0

    @property
    def num_steps(self) -> int | None:
        if self.report is not None:
            return self.report.num_steps
        return None if self.plan is None else self.plan.schedule.num_steps

    @property
    def final_loss(self) -> float | None:
        return self.report.final_loss if self.report is not None else self.curve[-1].loss if self.curve else None

    @cached_property
    def eval_losses(self) -> dict[int, float]:
        """Held-out loss by step."""
        scores = {step.step: step.eval_loss for step in self.curve if step.eval_loss is not None}
        recorded = () if self.report is None else self.report.evaluations
        return dict(sorted((scores | {score.step: score.loss for score in recorded}).items()))

    @cached_property
    def recommended(self) -> tuple[Recommendation, ...]:
        """Empty if the run has not ended or has no plan."""
        if self.plan is None or self.report is None:
            return ()
        whole = self.recorded
        found = observed(whole.steps, num_steps=whole.num_steps, training_s=whole.training_s)
        return recommendations(self.plan, self.report, found)


def read_recorded(run_dir: Path, recorded: RecordedSteps | None = None) -> RecordedRun:
    """The run of a directory, with steps that were read already or all of them; InputError if it is none."""
    if not (run_dir / "plan.json").is_file() and not (run_dir / FILE_NAME).is_file():
        raise no_run(run_dir)
    plan, no_plan = _read(run_dir / "plan.json", Plan, "has not begun: it has no plan yet")
    report, no_report = _read(run_dir / "report.json", Report, "has no report yet")
    report = None if report is None else _with_killed_attempts(report, run_dir)
    submission, _ = _read(run_dir / FILE_NAME, Submission, "")
    return RecordedRun(
        run_dir=run_dir,
        plan=plan,
        report=report,
        recorded=read_steps(run_dir / "metrics.jsonl") if recorded is None else recorded,
        overrides=() if submission is None else submission.overrides,
        problem=no_plan or no_report,
    )


def _with_killed_attempts(report: Report, run_dir: Path) -> Report:
    """The report with the attempts that were killed together with their supervisor, which wrote none."""
    known = {record.number for record in report.history}
    killed = [record for record in earlier_history(run_dir) if record.number not in known] if known else []
    if killed and is_alive(run_dir, killed[-1].number):
        killed.pop()
    history = tuple(sorted((*report.history, *killed), key=lambda record: record.number))
    if not killed:
        return report
    return replace(
        report,
        history=history,
        attempts=len(history),
        duration_s=sum(record.duration_s for record in history),
        incidents=(*report.incidents, *(f"attempt {each.number} at step {each.step}: {each.cause}" for each in killed)),
    )


def recorded_runs(paths: Iterable[Path]) -> tuple[RecordedRun, ...]:
    """The runs of these directories; a sweep is replaced by its points."""
    return tuple(read_recorded(run_dir) for path in paths for run_dir in _run_dirs(path))


def state_line(run: RecordedRun) -> str:
    """`finished at step 300 of 300, 612k tokens in 2 min 49 s`, or the reason why the end is not known."""
    report = run.report
    if report is None:
        problem = run.problem or "has no report yet"
        if run.plan is None:
            return problem
        of = run.plan.schedule.num_steps
        return f"{problem}, step {run.step} of {of}: the run has not ended, or was killed before it wrote a report"
    return end_line(report)


def ending_text(report: Report) -> str:
    """`finished`, `stopped by limits.hours`."""
    return ENDINGS[report.ending] if report.limit is None else f"stopped by {report.limit}"


def end_line(report: Report) -> str:
    """Ending, step, tokens and duration of a run."""
    return (
        f"{ending_text(report)} at step {report.step} of {report.num_steps}, {format_count(report.tokens)} tokens "
        f"in {format_seconds(report.duration_s)}" + (f", {report.attempts} attempts" if report.attempts > 1 else "")
    )


def labels_of(runs: Sequence[RecordedRun]) -> list[str]:
    """A short name of each run: its folder's name, or its path if two share that name."""
    names = [run.run_dir.name for run in runs]
    return [name if names.count(name) == 1 else str(run.run_dir) for name, run in zip(names, runs, strict=True)]


def _run_dirs(path: Path) -> list[Path]:
    if (path / "plan.json").is_file() or not path.is_dir():
        return [path]
    from shardwise.launch.rundir.state import points_of

    return points_of(path) or [path]


def _read(path: Path, kind: type[V], missing: str) -> tuple[V | None, str | None]:
    if not path.is_file():
        return None, missing
    try:
        return codec.read(path, kind), None
    except InputError as error:
        return None, str(error)
