"""The state of a run, from its files, Slurm's queue and the processes of this machine.

Files alone cannot tell a run that works from one whose machine lost power. Slurm can, and on this machine the lock of
the run directory. If neither is known, the state is `unknown`.
"""

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from launch.rundir.files import RunFiles
from launch.rundir.find import belongs_to
from launch.rundir.lock import Holder, holder_here, last_holder
from slurm.jobs import EndedJob, QueuedJob, ended_words, has_slurm, read_job, read_queue
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.report import Ending
from trainer.spec.units import format_seconds
from trainer.spec.value import Value

_ROWS_FOR_RATE = 50


class RunState(StrEnum):
    """Where a run is between its submission and its end."""

    WAITING = "waiting"  # in Slurm's queue
    STARTING = "starting"  # before the first attempt: planning, preparing data, building operators
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    PREEMPTED = "preempted"  # stopped to be requeued, and nothing will do it
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    LOST = "lost"  # ended without a report
    NOT_STARTED = "not_started"
    UNKNOWN = "unknown"  # nobody can tell whether it is alive

    @property
    def is_alive(self) -> bool:
        return self in (RunState.WAITING, RunState.STARTING, RunState.RUNNING)


class Witness(NamedTuple):
    """Who was asked whether a run is alive, and the answers."""

    jobs: tuple[QueuedJob, ...] | None  # of this run, in the queue; None: Slurm was not asked, or did not answer
    problem: str | None = None  # why Slurm did not answer
    ended: EndedJob | None = None  # how its newest job ended, where that was asked
    holder: Holder | None = None  # the process of this machine that supervises it
    last_holder: Holder | None = None  # who supervised it last, wherever that is


class Judged(NamedTuple):
    """The state and what it rests on, in words."""

    state: RunState
    words: str


class RunStatus(Value, frozen=True, kw_only=True):
    """A run as `shardwise status` shows it."""

    run_dir: str
    state: RunState
    words: str
    cancelled: str | None = None  # when and by whom
    overrides: tuple[str, ...] = ()  # of a point of a sweep
    jobs: tuple[QueuedJob, ...] = ()
    ended_job: EndedJob | None = None
    phase: str | None = None
    step: int | None = None
    num_steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    lr: float | None = None
    tokens_per_s: float | None = None  # of all ranks
    memory_peak_bytes: int | None = None  # of rank 0
    seconds_left: float | None = None
    silent_s: float | None = None  # since the last sign of life
    strategy: str | None = None
    num_ranks: int | None = None
    num_attempts: int = 0
    incidents: tuple[str, ...] = ()
    error: str | None = None
    checkpoint: str | None = None
    last_line: str | None = None
    logs: tuple[str, ...] = ()


def judge(files: RunFiles, witness: Witness, *, now_s: float) -> Judged:
    """The state of a run."""
    if witness.holder is not None:
        return _alive(files, f"supervised by {witness.holder.words} of this machine")
    jobs = witness.jobs or ()
    running = [job for job in jobs if job.is_running]
    if running:
        return _alive(files, f"job {running[0].job_id} runs")
    if jobs:
        verb = "waits" if not files.attempt else "waits to go on"
        return Judged(RunState.WAITING, f"job {jobs[0].job_id} {verb}")
    is_asked_in_vain = files.submission is not None and witness.jobs is None
    if files.report is not None and files.has_told_its_end:
        told = _told(files)
        if told.state is RunState.PREEMPTED and is_asked_in_vain:
            why = witness.problem or "Slurm was not asked"
            return Judged(RunState.UNKNOWN, f"stopped at step {files.report.step} to be started again; {why}")
        return told
    if is_asked_in_vain:
        return Judged(RunState.UNKNOWN, f"{witness.problem or 'Slurm was not asked'}{_silence(files, now_s)}")
    if files.submission is not None:
        return _ended_silently(files, witness)
    if witness.last_holder is not None and not witness.last_holder.is_of_this_machine:
        silence = _silence(files, now_s)
        return Judged(
            RunState.UNKNOWN, f"supervised by {witness.last_holder.words}, which cannot be seen from here{silence}"
        )
    if not files.attempt:
        return Judged(RunState.NOT_STARTED, "no attempt was made, and nothing runs on this machine")
    return Judged(RunState.LOST, "it left no report, and nothing of it runs on this machine")


def status_of(
    files: RunFiles, witness: Witness, *, now_s: float, last_line: str | None, logs: tuple[str, ...]
) -> RunStatus:
    """Everything there is to show of a run."""
    judged = judge(files, witness, now_s=now_s)
    plan, report = files.plan, files.report
    row = files.rows[-1] if files.rows else {}
    held_out = next((line["eval_loss"] for line in reversed(files.rows) if line.get("eval_loss") is not None), None)
    peaks = [line["memory_peak_bytes"] for line in files.rows if line.get("memory_peak_bytes")]
    num_steps = plan.schedule.num_steps if plan is not None else report.num_steps if report is not None else None
    is_running = judged.state is RunState.RUNNING
    may_be_alive = judged.state.is_alive or judged.state is RunState.UNKNOWN
    return RunStatus(
        run_dir=str(files.run_dir),
        state=judged.state,
        words=judged.words,
        cancelled=files.mark,
        overrides=files.submission.overrides if files.submission is not None else (),
        jobs=witness.jobs or (),
        ended_job=None if judged.state.is_alive else witness.ended,
        phase=files.phase if may_be_alive and not files.has_told_its_end else None,
        step=files.step,
        num_steps=num_steps,
        loss=row.get("loss"),
        eval_loss=held_out,
        lr=row.get("lr"),
        tokens_per_s=row.get("tokens_per_s"),
        memory_peak_bytes=max(peaks, default=None),
        seconds_left=seconds_left(files) if is_running else None,
        silent_s=None if files.sign_s is None or not judged.state.is_alive else max(0.0, now_s - files.sign_s),
        strategy=plan.chosen.strategy.name if plan is not None else None,
        num_ranks=plan.chosen.num_ranks if plan is not None else None,
        num_attempts=files.attempt,
        incidents=report.incidents if report is not None else (),
        error=report.error if report is not None and files.has_told_its_end else None,
        checkpoint=None if files.checkpoint is None else str(files.checkpoint),
        last_line=last_line,
        logs=logs,
    )


def seconds_left(files: RunFiles) -> float | None:
    """Seconds until the last step, at the mean of the last steps; evaluations and saves between are not in it."""
    steps_s = [float(row["step_s"]) for row in files.rows[-_ROWS_FOR_RATE:] if row.get("step_s") is not None]
    if not steps_s or files.plan is None or files.step is None:
        return None
    return max(0, files.plan.schedule.num_steps - files.step) * sum(steps_s) / len(steps_s)


def _alive(files: RunFiles, words: str) -> Judged:
    if not files.attempt:
        return Judged(RunState.STARTING, f"{words}; before the first attempt")
    if files.report is not None and files.has_told_its_end:
        ending = "finished" if files.report.ending is Ending.FINISHED else f"ended ({files.report.ending.value})"
        return Judged(RunState.RUNNING, f"{words}; attempt {files.attempt} has {ending}")
    return Judged(RunState.RUNNING, words)


def _told(files: RunFiles) -> Judged:
    assert files.report is not None
    ending, step = files.report.ending, files.report.step
    state = RunState(ending.value)
    words = {
        Ending.FINISHED: f"finished at step {step}",
        Ending.STOPPED: f"stopped by {files.report.limit or 'request'} at step {step}",
        Ending.PREEMPTED: f"stopped at step {step} to be started again, and nothing waits to do it",
        Ending.OUT_OF_MEMORY: f"ran out of memory at step {step}",
        Ending.FAILED: f"failed at step {step}",
    }[ending]
    if ending is Ending.PREEMPTED and files.mark is not None:
        return Judged(RunState.STOPPED, f"stopped by request at step {step}")
    return Judged(state, words)


def _ended_silently(files: RunFiles, witness: Witness) -> Judged:
    """Of a run whose jobs are gone from the queue without a report of the last attempt."""
    end = "its job is no longer in the queue" if witness.ended is None else ended_words(witness.ended)
    if files.mark is not None:
        return Judged(RunState.STOPPED, end)
    if not files.attempt and not files.starts:
        return Judged(RunState.NOT_STARTED, f"{end}; it never started")
    if not files.attempt:
        return Judged(RunState.FAILED, f"{end}; before the first attempt")
    return Judged(RunState.LOST, f"{end}; attempt {files.attempt} left no report")


def _silence(files: RunFiles, now_s: float) -> str:
    if files.sign_s is None:
        return ""
    return f"; last sign of life {format_seconds(max(1.0, now_s - files.sign_s))} ago"


class Queue:
    """The queue as it was at the first question: one question to Slurm for each owner of runs."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._jobs: dict[int, tuple[QueuedJob, ...] | None] = {}
        self.problem: str | None = None if has_slurm(environment) else "there is no Slurm here"

    def jobs_of(self, user: int) -> tuple[QueuedJob, ...] | None:
        """A user's jobs that wait or run; None where Slurm does not answer, with `problem` saying why."""
        if user not in self._jobs:
            self._jobs[user] = self._ask(user)
        return self._jobs[user]

    def jobs_of_run(self, files: RunFiles) -> tuple[QueuedJob, ...] | None:
        """Those of one run, the one that runs first."""
        jobs = self.jobs_of(files.run_dir.stat().st_uid)
        if jobs is None:
            return None
        mine = [job for job in jobs if belongs_to(job, files)]
        return tuple(sorted(mine, key=lambda job: not job.is_running))

    def _ask(self, user: int) -> tuple[QueuedJob, ...] | None:
        if self.problem is not None:
            return None
        try:
            return read_queue(user=user, environment=self._environment)
        except EnvironmentFaultError as error:
            self.problem = str(error).splitlines()[0]
            return None


def witness_of(
    files: RunFiles, queue: Queue, *, asks_ended: bool = True, environment: Mapping[str, str] = os.environ
) -> Witness:
    """Who knows whether the run is alive; with `asks_ended` also how its last job ended, a question more to Slurm."""
    may_be_queued = files.submission is not None or bool(files.starts)
    jobs = queue.jobs_of_run(files) if may_be_queued else None
    return Witness(
        jobs=jobs,
        problem=queue.problem if may_be_queued else None,
        ended=_ended(files, environment) if jobs == () and asks_ended else None,
        holder=holder_here(files.run_dir),
        last_holder=last_holder(files.run_dir),
    )


def _ended(files: RunFiles, environment: Mapping[str, str]) -> EndedJob | None:
    newest = files.starts[-1].job_id if files.starts else files.job_ids[-1] if files.job_ids else None
    if newest is None:
        return None
    try:
        return read_job(newest, environment)
    except EnvironmentFaultError:
        return None
