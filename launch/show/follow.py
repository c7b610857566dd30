"""The state of runs: as text for `shardwise status`, and followed for a view until a run ends.

A supervisor shows its attempt, `shardwise watch` the run directory that it reads.

On a terminal a block is redrawn; in CI and under Slurm a plain line appears every few seconds, so that a log stays
readable. The files of the run are only read, so a view cannot disturb the training. Whether a
run without news is still alive is known only on the supervisor's machine and to Slurm. If neither can be reached, a run
is watched until its report states an end.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.launch.rundir.files import Position, RunFiles, read_position, read_run
from shardwise.launch.rundir.lock import recorded_owner
from shardwise.launch.rundir.metrics import MetricsTail
from shardwise.launch.rundir.state import Judged, Queue, RunState, RunStatus, judge, read_liveness
from shardwise.launch.show.screen import ViewOutput
from shardwise.launch.show.view import RECENT_STEPS, LiveView, StepLog, view_of
from shardwise.launch.terminal import Console, wrapped
from shardwise.slurm.jobs import describe_ended, describe_queued
from shardwise.trainer.spec.messages.rank_files import TRAINING_PHASE
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds


class Progress:
    """The view of one attempt, as its supervisor shows it."""

    def __init__(
        self,
        console: Console,
        *,
        attempt_dir: Path,
        plan: Plan,
        incidents: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempt_dir, self._plan, self._incidents = attempt_dir, plan, incidents
        self._clock = clock
        self._output = ViewOutput(console, environment, clock)
        self._tail = MetricsTail(attempt_dir.parent.parent / "metrics.jsonl")
        self._steps = StepLog()
        self._has_step = False  # of this attempt
        self._phase, self._position = "", Position()
        for row in self._tail.read_new():  # of earlier attempts
            self._steps.note(row)

    @contextmanager
    def shown(self) -> Iterator["Progress"]:
        """Shows the attempt while the block runs; ends with its newest state."""
        with self._output.screen.shown():
            try:
                yield self
            finally:
                self._read_rows()
                if self._has_step:
                    self._output.show(self.view(is_running=False))

    def tick(self) -> None:
        """Reads the files once and shows what is new."""
        self._read_rows()
        self._read_position()
        if self._output.is_due and (self._has_step or self._output.screen.is_block):
            self._output.show(self.view())

    def view(self, *, is_running: bool = True) -> LiveView:
        """The state of the attempt, as far as its files show it."""
        state = self._phase if self._phase or not self._has_step else TRAINING_PHASE
        problem = self._position.problem
        return view_of(
            self._steps,
            self._plan,
            title=self._attempt_dir.parent.parent.name,
            state=state,
            step=self._position.step or 0,
            attempt=int(self._attempt_dir.name),
            incidents=(*self._incidents, *([problem] if problem else ())),
            is_running=is_running,
        )

    def _read_rows(self) -> None:
        now = self._clock()
        for row in self._tail.read_new():
            self._steps.note(row, seen_s=now)
            self._has_step = True
            if row.get("eval_loss") is not None:
                self._output.screen.print_line(f"step {row['step']}: held-out loss {row['eval_loss']:.4f}")
            for incident in row.get("incidents", ()):
                self._output.screen.print_line(f"step {row['step']}: {incident}")

    def _read_position(self) -> None:
        before, self._position = self._position, read_position(self._attempt_dir)
        phase, problem = self._position.phase, self._position.problem
        if problem and not before.problem:
            self._output.screen.print_line(problem)
        elif before.problem and not problem:
            self._output.screen.print_line("checkpoints are saved again")
        if phase is None or phase == self._phase:
            return
        self._phase = phase
        if phase != TRAINING_PHASE and not self._output.screen.is_block:
            self._output.screen.print_line(f"{phase} ...")


QUERY_S = 15.0  # between two queries of Slurm, which serves all users
SETTLE_S = 3.0  # an end must last: between two attempts there is a report of the earlier one
FOREIGN_SETTLE_S = 60.0  # the same, if the supervisor is on another machine
SILENT_S = 120.0  # a write to a shared file system may appear a minute late
NUM_INCIDENTS = 5  # that `shardwise status` shows
_OVER = (RunState.FINISHED, RunState.STOPPED)  # no attempt follows these by itself


class Look(NamedTuple):
    """The state of a run at one moment."""

    view: LiveView
    judged: Judged
    files: RunFiles
    rows: tuple[dict[str, Any], ...]  # since the previous look
    has_ended: bool
    num_steps: int = 0  # lines of metrics.jsonl, those that `rows` lack included
    training_s: float = 0.0  # of all of them


class WatchedRun:
    """Reads a run directory until the run ends."""

    def __init__(
        self,
        run_dir: Path,
        *,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        query_s: float = QUERY_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._run_dir, self._environment, self._clock = run_dir, environment, clock
        self._query_s, self._settle_s = query_s, settle_s
        self._tail, self._steps = MetricsTail(run_dir / "metrics.jsonl"), StepLog()
        self._has_looked = False
        self._queue, self._requested_at = Queue(environment), clock()
        self._ended: tuple[RunState, int, float] | None = (
            None  # the end, the attempt, and the time since which both are unchanged
        )

    def look(self) -> Look:
        """Reads what is new; OSError if the directory cannot be read."""
        self._run_dir.stat()
        now = self._clock()
        rows = self._tail.read_new()
        for row in rows:
            self._steps.note(row, seen_s=now if self._has_looked else None)
        self._has_looked = True
        files = read_run(self._run_dir)
        judged = self._judged(files, now)
        view = self._view(files, judged)
        has_ended = self._has_ended(files, judged, now)
        return Look(view, judged, files, tuple(rows), has_ended, self._tail.num_steps, self._tail.training_s)

    def _judged(self, files: RunFiles, now: float) -> Judged:
        if now - self._requested_at >= self._query_s:
            self._queue, self._requested_at = Queue(self._environment), now
        liveness = read_liveness(files, self._queue, reads_ended=False, environment=self._environment)
        return judge(files, liveness, now_s=time.time())

    def _has_ended(self, files: RunFiles, judged: Judged, now: float) -> bool:
        """True if the run has ended. If another attempt may follow, only after a pause without news."""
        state = judged.state
        if state.is_alive or state is RunState.UNKNOWN:
            self._ended = None
            return False
        if state in _OVER or (files.heartbeat_s is not None and time.time() - files.heartbeat_s > FOREIGN_SETTLE_S):
            return True
        if self._ended is None or self._ended[:2] != (state, files.attempt):
            self._ended = (state, files.attempt, now)
        owner = None if files.submission is not None else recorded_owner(files.run_dir)
        is_foreign = owner is not None and not owner.is_local
        return now - self._ended[2] >= (FOREIGN_SETTLE_S if is_foreign else self._settle_s)

    def _view(self, files: RunFiles, judged: Judged) -> LiveView:
        report = files.report
        return view_of(
            self._steps,
            files.plan,
            title=self._run_dir.resolve().name,
            state=state_text(files, judged, now_s=time.time()),
            step=files.step or 0,
            attempt=max(1, files.attempt),
            incidents=(*(() if report is None else report.incidents), *([files.problem] if files.problem else ())),
            is_running=judged.state in (RunState.RUNNING, RunState.UNKNOWN) and not files.has_final_report,
            report=report if files.has_final_report else None,
        )


def state_text(files: RunFiles, judged: Judged, *, now_s: float) -> str:
    """`training`, `waiting: job 12 waits`, `running, no heartbeat for 5 min 00 s`."""
    if judged.state is RunState.STARTING:
        return "starting"
    if judged.state not in (RunState.RUNNING, RunState.UNKNOWN):
        name = judged.state.value.replace("_", " ")
        return name if judged.reason.startswith(name) else f"{name}: {judged.reason}"
    if files.has_final_report and files.report is not None:
        is_done = files.report.ending is Ending.FINISHED
        return "ending" if is_done else f"between attempts: {files.report.ending.value.replace('_', ' ')}"
    phase = files.phase or "starting"
    silent_s = 0.0 if files.heartbeat_s is None else now_s - files.heartbeat_s
    return phase if silent_s < SILENT_S else f"{phase}, no heartbeat for {format_seconds(silent_s)}"


def render_table(statuses: Sequence[RunStatus], *, base: Path, width: int | None = None) -> str:
    """One line a run, of more than `width` columns two; paths below `base` are shown relative to it."""
    rows = [
        (shown_path(status.run_dir, base), status.state.value.replace("_", " "), _steps(status), _figures(status))
        for status in statuses
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    starts = [f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}" for row in rows]
    lines = [f"{start}  {row[3]}".rstrip() for start, row in zip(starts, rows, strict=True)]
    if width is not None and max(map(len, lines), default=0) > width:
        pairs = zip(starts, rows, strict=True)
        lines = [line for start, row in pairs for line in (start, *(wrapped("    ", row[3], width) if row[3] else ()))]
    return "\n".join(lines)


def render_status(status: RunStatus, *, base: Path) -> str:
    """All facts about one run."""
    head = f"{shown_path(status.run_dir, base)}: {status.state.value.replace('_', ' ')}"
    of = f" of {status.num_steps}" if status.num_steps is not None else ""
    at = f", step {status.step}{of}" if status.step is not None else ""
    is_known = status.state is RunState.FINISHED or status.reason in {f"job {job.job_id} runs" for job in status.jobs}
    lines = [f"{head}{at}"] + ([] if is_known else [f"  {status.reason}"])
    lines += [f"  {' '.join(status.overrides)}"] if status.overrides else []
    lines += [f"  {status.cancelled}"] if status.cancelled else []
    lines += [f"  {describe_queued(job)}" for job in status.jobs]
    if status.ended_job is not None and describe_ended(status.ended_job) not in status.reason:
        lines.append(f"  {describe_ended(status.ended_job)}")
    ranks = "1 rank" if status.num_ranks == 1 else f"{status.num_ranks} ranks"
    strategy = "" if status.strategy is None else f"{status.strategy} on {ranks}"
    lines += [f"  error: {line}" for line in (status.error or "").splitlines()[:1]]
    lines += [f"  {line}" for line in (strategy, _learning(status), _clock(status)) if line]
    lines += [f"  {status.problem}"] if status.problem else []
    lines += _history(status)
    lines += [f"  checkpoint: {status.checkpoint}"] if status.checkpoint else []
    lines += [f"  last line: {status.last_line}"] if status.last_line else []
    lines += [f"  logs: {log}" for log in status.logs]
    return "\n".join(lines)


def shown_path(path: str, base: Path) -> str:
    """The path, relative to `base` if it is below it."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(base)) if absolute.is_relative_to(base) and absolute != base else path


def _steps(status: RunStatus) -> str:
    if status.step is None:
        return "-" if status.num_steps is None else f"0/{status.num_steps}"
    return str(status.step) if status.num_steps is None else f"{status.step}/{status.num_steps}"


def _figures(status: RunStatus) -> str:
    parts = [f"loss {status.loss:.4f}"] if status.loss is not None else []
    if status.state is RunState.RUNNING:
        parts += [f"{format_count(status.tokens_per_s)} tokens/s"] if status.tokens_per_s else []
        parts += [f"{format_seconds(status.seconds_left)} left"] if status.seconds_left is not None else []
    elif status.state not in (RunState.FINISHED, RunState.WAITING):
        parts.append(status.reason)
    for job in status.jobs:
        if job.is_running:
            parts.append(f"job {job.job_id}" + (f" on {job.nodes}" if job.nodes else ""))
        else:
            expected = f", expected {job.start}" if job.start else ""
            parts.append(f"job {job.job_id} waits ({job.reason or 'not looked at yet'}{expected})")
    return "  ".join([*parts, *status.overrides])


def _learning(status: RunStatus) -> str:
    parts = [f"loss {status.loss:.4f}"] if status.loss is not None else []
    parts += [f"held-out loss {status.eval_loss:.4f}"] if status.eval_loss is not None else []
    parts += [f"learning rate {status.lr:.3g}"] if status.lr is not None else []
    recent = f" in the {RECENT_STEPS}" if status.state is RunState.RUNNING else ""
    parts += [f"{format_count(status.tokens_per_s)} tokens/s{recent}"] if status.tokens_per_s else []
    parts += [f"peak {format_bytes(status.memory_peak_bytes)} on rank 0"] if status.memory_peak_bytes else []
    return ", ".join(parts)


def _clock(status: RunStatus) -> str:
    """The time of a run that has ended, the time left, and the time since the last heartbeat."""
    parts = [status.phase] if status.phase and status.phase != "training" else []
    if status.duration_s is not None:
        expected = "" if status.predicted_s is None else f", predicted {format_seconds(status.predicted_s)}"
        parts.append(f"{format_seconds(status.duration_s)} in all{expected}")
    if status.seconds_left is not None:
        parts.append(f"about {format_seconds(status.seconds_left)} of training left")
        limit = next((job.seconds_left for job in status.jobs if job.is_running), None)
        if limit is not None and limit < status.seconds_left:
            parts.append("more than the time limit: the run continues in another job")
    if status.silent_s is not None and status.state is RunState.RUNNING:
        ago = format_seconds(max(1.0, status.silent_s))
        parts.append(f"last heartbeat {ago} ago" + (", which is long" if status.silent_s > SILENT_S else ""))
    return "; ".join(parts)


def _history(status: RunStatus) -> list[str]:
    if not status.num_attempts:
        return []
    attempts = "1 attempt" if status.num_attempts == 1 else f"{status.num_attempts} attempts"
    if not status.incidents:
        return [f"  {attempts}"]
    lines = [f"  {attempts}, {len(status.incidents)} incident{'s' if len(status.incidents) > 1 else ''}"]
    return lines + [f"    {incident}" for incident in status.incidents[-NUM_INCIDENTS:]]


def submitted_s(submitted: str) -> float:
    """Seconds of the epoch of `2026-11-22T17:30:00Z`; 0 if the text is no time."""
    try:
        return datetime.fromisoformat(submitted).timestamp()
    except ValueError:
        return 0.0
