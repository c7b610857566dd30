"""The runs that a command names, and their state, from their files, Slurm's queue and the processes of this machine.

A run is named by its directory, that of its sweep, or a job of Slurm. A job is searched in the runs below the working
directory's `runs/`, then in Slurm, which knows the script that was submitted, in the folder of the run or of the
sweep.

Files alone do not show if a run is alive or its machine lost power. Slurm shows it, and on this machine the lock of the
run directory. If neither is known, the state is `unknown`.
"""

import os
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from msgspec import field

from shardwise.launch.rundir.files import RunFiles, is_run_dir, point_of, read_run
from shardwise.launch.rundir.lock import LockOwner, local_owner, recorded_owner
from shardwise.launch.rundir.metrics import NUM_RECENT_STEPS, recent_tokens_per_s
from shardwise.launch.rundir.paths import is_open, no_run
from shardwise.launch.rundir.process_record import read_state
from shardwise.slurm.jobs import JOB_ID, EndedJob, QueuedJob, describe_ended, has_slurm, read_job, read_queue
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.messages.submission import FILE_NAME, SCRIPT_NAME
from shardwise.trainer.spec.report import Ending
from shardwise.trainer.spec.units import format_seconds
from shardwise.trainer.spec.value import Value

RUNS = Path("runs")


class Found(NamedTuple):
    """The runs that an argument names, in the order of their points."""

    runs: tuple[RunFiles, ...]
    is_sweep: bool = False


def runs_below(folder: Path) -> list[Path]:
    """Run directories in a folder that this user may read, the points of sweeps in place of the sweep; in no order."""
    entries = [entry for entry in folder.iterdir() if is_open(entry)] if folder.is_dir() else []
    return [run for entry in entries for run in (points_of(entry) or ([entry] if is_run_dir(entry) else []))]


def points_of(folder: Path) -> list[Path]:
    """The runs of a sweep, by number."""
    points = {path.parent: point_of(path.parent) for path in folder.glob(f"*/{FILE_NAME}")}
    return sorted((path for path, number in points.items() if number is not None), key=lambda path: points[path] or 0)


def find_runs(name: str, environment: Mapping[str, str] = os.environ) -> Found:
    """The runs that `name` names; InputError if there are none."""
    path = Path(name)
    if path.is_dir():
        points = points_of(path)
        if not points and not is_run_dir(path):
            raise no_run(path, "plan.json and no submission.json")
        return Found(tuple(map(read_run, points or [path])), bool(points))
    if not JOB_ID.fullmatch(name):
        raise InputError(f"{name}: is neither a run directory nor the id of a job, such as 123 or 123_4")
    return _of_job(name, environment)


def one_run(found: Found, name: str) -> RunFiles:
    """The only run that was found; InputError for a sweep."""
    if len(found.runs) == 1:
        return found.runs[0]
    raise InputError(f"{name}: is a sweep of {len(found.runs)} points; name one: {found.runs[0].run_dir}")


def belongs_to(job: QueuedJob, files: RunFiles) -> bool:
    """True if a job of the queue is one of this run's: named in its files, or submitted with its script."""
    if job.job_id in files.job_ids:
        return True
    script = str(files.run_dir.absolute() / SCRIPT_NAME) if files.submission is None else files.submission.script
    if job.script != script and not job.script.startswith(f"{script} "):
        return False
    return files.point is None or job.job_id.partition("_")[2] == str(files.point)


def run_dirs_of(jobs: Iterable[QueuedJob]) -> list[Path]:
    """Directories of the runs whose scripts these jobs run; jobs of other programs are skipped."""
    found = [_run_dir(job.script, job.job_id.partition("_")[2]) for job in jobs]
    return [path for path in dict.fromkeys(found) if path is not None and is_run_dir(path)]


def _of_job(job_id: str, environment: Mapping[str, str]) -> Found:
    array, _, task = job_id.partition("_")
    here = [read_run(path) for path in runs_below(RUNS)]
    named = [files for files in here if job_id in files.job_ids]
    points = [files for files in here if any(each.startswith(f"{array}_") for each in files.job_ids)]
    if named or (points and not task):
        return Found(tuple(named or sorted(points, key=lambda files: files.point or 0)), not named)
    elsewhere = f"job {job_id}: is of no run in {RUNS.absolute()}"
    if not has_slurm(environment):
        raise InputError(f"{elsewhere}, and there is no Slurm here; name its run directory")
    try:
        job = read_job(job_id, environment)
    except EnvironmentFaultError as error:
        raise EnvironmentFaultError(f"{elsewhere}, and {error}") from None
    run_dir = None if job is None or job.script is None else _run_dir(job.script, task)
    if run_dir is None:
        known = "Slurm has no record of it (any more)" if job is None else "its script is not one of shardwise submit"
        raise InputError(f"{elsewhere}, and {known}; name its run directory")
    return find_runs(str(run_dir), environment)


def _run_dir(script: str, task: str) -> Path | None:
    """The run directory of a script, of an array's task that of its point; None for other scripts."""
    head, is_found, _ = script.partition(f"/{SCRIPT_NAME}")
    folder = Path(head)
    if not is_found or not folder.is_dir():
        return None
    return next((path for path in points_of(folder) if str(point_of(path)) == task), None) if task else folder


class RunState(StrEnum):
    """The state of a run between its submission and its end."""

    WAITING = "waiting"  # in Slurm's queue
    STARTING = "starting"  # before the first attempt: planning, preparing data, building operators
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    PREEMPTED = "preempted"  # stopped to be requeued, but no job waits
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"
    LOST = "lost"  # ended without a report
    NOT_STARTED = "not_started"
    UNKNOWN = "unknown"  # neither Slurm nor this machine knows whether it is alive

    @property
    def is_alive(self) -> bool:
        return self in (RunState.WAITING, RunState.STARTING, RunState.RUNNING)


class Liveness(NamedTuple):
    """The jobs and processes of a run."""

    jobs: tuple[QueuedJob, ...] | None  # of this run, in the queue; None: Slurm was not queried, or did not respond
    problem: str | None = None  # why Slurm did not respond
    ended: EndedJob | None = None  # its newest job, if that was queried
    owner: LockOwner | None = None  # the process of this machine that supervises it
    recorded_owner: LockOwner | None = None  # the last supervisor, on any machine
    is_owner_stopped: bool = False  # by a signal


class Judged(NamedTuple):
    """The state of a run and the reason for it."""

    state: RunState
    reason: str


class RunStatus(Value, frozen=True, kw_only=True):
    """A run as `shardwise status` shows it."""

    run_dir: str
    state: RunState
    reason: str = field(name="words")  # for the state
    cancelled: str | None = None  # when and by whom
    overrides: tuple[str, ...] = ()  # of a point of a sweep
    jobs: tuple[QueuedJob, ...] = ()
    ended_job: EndedJob | None = None
    phase: str | None = None
    problem: str | None = None  # why the last checkpoint was not saved
    step: int | None = None
    num_steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    lr: float | None = None
    tokens_per_s: float | None = None  # of all ranks
    memory_peak_bytes: int | None = None  # of rank 0
    seconds_left: float | None = None
    duration_s: float | None = None  # of a run that has ended
    predicted_s: float | None = None  # of the whole run
    silent_s: float | None = None  # since the last heartbeat
    strategy: str | None = None
    num_ranks: int | None = None
    num_attempts: int = 0
    incidents: tuple[str, ...] = ()
    error: str | None = None
    checkpoint: str | None = None
    last_line: str | None = None
    logs: tuple[str, ...] = ()


class Queue:
    """Slurm's queue at the first query: one query for each owner of runs."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = environment
        self._jobs: dict[int, tuple[QueuedJob, ...] | None] = {}
        self.problem: str | None = None if has_slurm(environment) else "there is no Slurm here"

    def jobs_of(self, user: int) -> tuple[QueuedJob, ...] | None:
        """A user's jobs that wait or run; None if Slurm does not respond, with the reason in `problem`."""
        if user not in self._jobs:
            self._jobs[user] = None
            try:
                if self.problem is None:
                    self._jobs[user] = read_queue(user=user, environment=self._environment)
            except EnvironmentFaultError as error:
                self.problem = str(error).splitlines()[0]
        return self._jobs[user]

    def jobs_of_run(self, files: RunFiles) -> tuple[QueuedJob, ...] | None:
        """The jobs of one run, running ones first."""
        jobs = self.jobs_of(files.run_dir.stat().st_uid)
        if jobs is None:
            return None
        return tuple(sorted((job for job in jobs if belongs_to(job, files)), key=lambda job: not job.is_running))


def read_liveness(
    files: RunFiles, queue: Queue, *, reads_ended: bool = True, environment: Mapping[str, str] = os.environ
) -> Liveness:
    """The jobs and processes of a run; with `reads_ended` also the end of its last job, one more query to Slurm."""
    may_be_queued = files.submission is not None or bool(files.starts)
    jobs = queue.jobs_of_run(files) if may_be_queued else None
    newest = files.starts[-1].job_id if files.starts else files.job_ids[-1] if files.job_ids else None
    ended = None
    if jobs == () and reads_ended and newest is not None:
        try:
            ended = read_job(newest, environment)
        except EnvironmentFaultError:
            ended = None
    owner = local_owner(files.run_dir)
    state = None if owner is None else read_state(owner.pid)
    return Liveness(
        jobs=jobs,
        problem=queue.problem if may_be_queued else None,
        ended=ended,
        owner=owner,
        recorded_owner=recorded_owner(files.run_dir),
        is_owner_stopped=state is not None and state[0] == "T",
    )


def judge(files: RunFiles, liveness: Liveness, *, now_s: float) -> Judged:
    """The state of a run. Pure."""
    if liveness.owner is not None:
        hint = (
            f", stopped by a signal; kill -CONT {liveness.owner.pid} continues it" if liveness.is_owner_stopped else ""
        )
        return _alive(files, f"supervised by {liveness.owner} of this machine{hint}")
    jobs = liveness.jobs or ()
    running = [job for job in jobs if job.is_running]
    if running:
        return _alive(files, f"job {running[0].job_id} runs")
    if jobs:
        return Judged(RunState.WAITING, f"job {jobs[0].job_id} {'waits to continue' if files.attempt else 'waits'}")
    is_queue_unknown = files.submission is not None and liveness.jobs is None
    problem = liveness.problem or "Slurm was not queried"
    if files.report is not None and files.has_final_report:
        ended = _reported(files)
        if ended.state is RunState.PREEMPTED and is_queue_unknown:
            return Judged(RunState.UNKNOWN, f"stopped at step {files.report.step} to be started again; {problem}")
        return ended
    if is_queue_unknown:
        return Judged(RunState.UNKNOWN, f"{problem}{_silence(files, now_s)}")
    if files.submission is not None:
        return _ended_without_report(files, liveness)
    owner = liveness.recorded_owner
    if owner is not None and not owner.is_local:
        silence = _silence(files, now_s)
        return Judged(RunState.UNKNOWN, f"supervised by {owner}, which cannot be seen from here{silence}")
    if not files.attempt:
        return Judged(RunState.NOT_STARTED, "no attempt was made, and nothing runs on this machine")
    if files.phase is None and files.heartbeat_s is None:
        attempt = files.run_dir / "attempts" / str(files.attempt)
        command = f"accelerate launch --config_file {attempt}/accelerate.yaml -m shardwise.trainer {attempt}/plan.json"
        return Judged(RunState.NOT_STARTED, f"prepared, and no rank has started; by hand: {command}")
    return Judged(RunState.LOST, "it left no report, and nothing of it runs on this machine")


def status_of(
    files: RunFiles, liveness: Liveness, *, now_s: float, last_line: str | None, logs: tuple[str, ...]
) -> RunStatus:
    """The status of a run. Pure."""
    judged = judge(files, liveness, now_s=now_s)
    plan, report = files.plan, files.report
    row = files.rows[-1] if files.rows else {}
    rate = report.tokens_per_s if report is not None and files.has_final_report else None
    scores = [] if report is None else [score.loss for score in report.evaluations]
    scores += [line["eval_loss"] for line in files.rows if line.get("eval_loss") is not None]
    peaks = [line["memory_peak_bytes"] for line in files.rows if line.get("memory_peak_bytes")]
    num_steps = plan.schedule.num_steps if plan is not None else report.num_steps if report is not None else None
    is_running = judged.state is RunState.RUNNING
    may_be_alive = judged.state.is_alive or judged.state is RunState.UNKNOWN
    is_silent = files.heartbeat_s is not None and judged.state.is_alive
    return RunStatus(
        run_dir=str(files.run_dir),
        state=judged.state,
        reason=judged.reason,
        cancelled=files.cancelled,
        overrides=files.submission.overrides if files.submission is not None else (),
        jobs=liveness.jobs or (),
        ended_job=None if judged.state.is_alive else liveness.ended,
        phase=files.phase if may_be_alive and not files.has_final_report else None,
        problem=files.problem if may_be_alive and not files.has_final_report else None,
        step=files.step,
        num_steps=num_steps,
        loss=row.get("loss") if row or report is None else report.final_loss,
        eval_loss=scores[-1] if scores else None,
        lr=row.get("lr"),
        tokens_per_s=rate or recent_tokens_per_s(files.rows[-NUM_RECENT_STEPS:]),
        memory_peak_bytes=max(peaks, default=None),
        seconds_left=seconds_left(files) if is_running else None,
        duration_s=report.duration_s if report is not None and files.has_final_report else None,
        predicted_s=report.predicted_s if report is not None and files.has_final_report else None,
        silent_s=max(0.0, now_s - (files.heartbeat_s or 0.0)) if is_silent else None,
        strategy=plan.chosen.strategy.name if plan is not None else None,
        num_ranks=plan.chosen.num_ranks if plan is not None else None,
        num_attempts=files.attempt,
        incidents=report.incidents if report is not None else (),
        error=report.error if report is not None and files.has_final_report else None,
        checkpoint=None if files.checkpoint is None else str(files.checkpoint),
        last_line=last_line,
        logs=logs,
    )


def seconds_left(files: RunFiles) -> float | None:
    """Seconds until the last step, at the mean of the last steps, without evaluations and saves between them."""
    steps_s = [float(row["step_s"]) for row in files.rows[-NUM_RECENT_STEPS:] if row.get("step_s") is not None]
    if not steps_s or files.plan is None or files.step is None:
        return None
    return max(0, files.plan.schedule.num_steps - files.step) * sum(steps_s) / len(steps_s)


def _alive(files: RunFiles, reason: str) -> Judged:
    if not files.attempt:
        return Judged(RunState.STARTING, f"{reason}; before the first attempt")
    if files.report is not None and files.has_final_report:
        ending = "finished" if files.report.ending is Ending.FINISHED else f"ended ({files.report.ending.value})"
        return Judged(RunState.RUNNING, f"{reason}; attempt {files.attempt} has {ending}")
    return Judged(RunState.RUNNING, reason)


def _reported(files: RunFiles) -> Judged:
    assert files.report is not None
    ending, step = files.report.ending, files.report.step
    if ending is Ending.PREEMPTED and files.cancelled is not None:
        return Judged(RunState.STOPPED, f"stopped by request at step {step}")
    reasons = {
        Ending.FINISHED: f"finished at step {step}",
        Ending.STOPPED: f"stopped by {files.report.limit or 'request'} at step {step}",
        Ending.PREEMPTED: f"stopped at step {step} to be started again, and nothing waits to do it",
        Ending.OUT_OF_MEMORY: f"ran out of memory at step {step}",
        Ending.FAILED: f"failed at step {step}",
    }
    return Judged(RunState(ending.value), reasons[ending])


def _ended_without_report(files: RunFiles, liveness: Liveness) -> Judged:
    """The state of a run whose jobs have left the queue without a report of the last attempt."""
    end = "its job is no longer in the queue" if liveness.ended is None else describe_ended(liveness.ended)
    if files.cancelled is not None:
        return Judged(RunState.STOPPED, end)
    if not files.attempt and not files.starts:
        return Judged(RunState.NOT_STARTED, f"{end}; it never started")
    if not files.attempt:
        return Judged(RunState.FAILED, f"{end}; before the first attempt")
    return Judged(RunState.LOST, f"{end}; attempt {files.attempt} left no report")


def _silence(files: RunFiles, now_s: float) -> str:
    if files.heartbeat_s is None:
        return ""
    return f"; last heartbeat {format_seconds(max(1.0, now_s - files.heartbeat_s))} ago"
