"""Runs as a report tells of them, read from their directories: ended, still going, killed, or not begun.

What is missing or cannot be read is a problem in words, so that one bad run among many does not hide the others.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec

from launch.show.report.steps import Step, figures_of, last_of_each, observed, read_steps
from trainer.planning.recommend import Recommendation, recommendations
from trainer.spec import codec
from trainer.spec.errors import InputError
from trainer.spec.messages.submission import FILE_NAME, Submission
from trainer.spec.plan import Candidate, Plan
from trainer.spec.report import Ending, Figures, Report, predicted_figures
from trainer.spec.units import format_count, format_seconds
from trainer.spec.value import Value

V = TypeVar("V", bound=Value)

ENDINGS = {
    Ending.FINISHED: "finished",
    Ending.STOPPED: "stopped by request",
    Ending.PREEMPTED: "stopped to be requeued",
    Ending.OUT_OF_MEMORY: "ran out of memory",
    Ending.FAILED: "failed",
}


class RecordedRun(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A run with everything that its directory tells."""

    run_dir: Path
    plan: Plan | None
    report: Report | None
    steps: tuple[Step, ...] = ()  # every line of metrics.jsonl
    overrides: tuple[str, ...] = ()  # of a point of a sweep
    problem: str | None = None  # why there is no report, or no plan

    @cached_property
    def curve(self) -> tuple[Step, ...]:
        """The line that counts of each step."""
        return last_of_each(self.steps)

    @property
    def candidate(self) -> Candidate | None:
        """What ran: of a run without a report, what was planned."""
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
        return self.report.step if self.report is not None else max((step.step for step in self.steps), default=0)

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
        told = () if self.report is None else self.report.evaluations
        return dict(sorted((scores | {score.step: score.loss for score in told}).items()))

    @cached_property
    def recommended(self) -> tuple[Recommendation, ...]:
        """Nothing where the run has not ended, or left no plan."""
        if self.plan is None or self.report is None:
            return ()
        return recommendations(self.plan, self.report, observed(self.steps))


def read_recorded(run_dir: Path) -> RecordedRun:
    """The run of a directory; InputError where it is none."""
    if not (run_dir / "plan.json").is_file() and not (run_dir / FILE_NAME).is_file():
        raise InputError(f"{run_dir}: is not a run directory: it has no plan.json")
    plan, no_plan = _read(run_dir / "plan.json", Plan, "has not begun: it has no plan yet")
    report, no_report = _read(run_dir / "report.json", Report, "has no report yet")
    submission, _ = _read(run_dir / FILE_NAME, Submission, "")
    return RecordedRun(
        run_dir=run_dir,
        plan=plan,
        report=report,
        steps=read_steps(run_dir / "metrics.jsonl"),
        overrides=() if submission is None else submission.overrides,
        problem=no_plan or no_report,
    )


def recorded_runs(paths: Iterable[Path]) -> tuple[RecordedRun, ...]:
    """The runs of these directories; that of a sweep counts as its points."""
    return tuple(read_recorded(run_dir) for path in paths for run_dir in _run_dirs(path))


def state_line(run: RecordedRun) -> str:
    """`finished at step 300 of 300, 612k tokens in 2 min 49 s`, or why nobody knows."""
    report = run.report
    if report is None:
        words = run.problem or "has no report yet"
        if run.plan is None:
            return words
        of = run.plan.schedule.num_steps
        return f"{words}, step {run.step} of {of}: the run has not ended, or was killed before it could say how"
    return end_line(report)


def ending_words(report: Report) -> str:
    """`finished`, `stopped by limits.hours`."""
    return ENDINGS[report.ending] if report.limit is None else f"stopped by {report.limit}"


def end_line(report: Report) -> str:
    """How a run ended, where, and after how long."""
    return (
        f"{ending_words(report)} at step {report.step} of {report.num_steps}, {format_count(report.tokens)} tokens "
        f"in {format_seconds(report.duration_s)}" + (f", {report.attempts} attempts" if report.attempts > 1 else "")
    )


def labels_of(runs: Sequence[RecordedRun]) -> list[str]:
    """A short name of each: its folder's, and where two share it, its path."""
    names = [run.run_dir.name for run in runs]
    return [name if names.count(name) == 1 else str(run.run_dir) for name, run in zip(names, runs, strict=True)]


def _run_dirs(path: Path) -> list[Path]:
    if (path / "plan.json").is_file() or not path.is_dir():
        return [path]
    from launch.rundir.find import points_of

    return points_of(path) or [path]


def _read(path: Path, kind: type[V], missing: str) -> tuple[V | None, str | None]:
    if not path.is_file():
        return None, missing
    try:
        return codec.read(path, kind), None
    except InputError as error:
        return None, str(error)
