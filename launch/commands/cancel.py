"""`shardwise cancel`: has a run save a checkpoint and end for good, with every job that would go on with it.

The order matters, as each step would otherwise start what the one before was to prevent: the mark first, so that no job
that starts or is queued again goes on; then the jobs that wait; then a signal to what runs.
"""

import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from launch.options import CancelOptions
from launch.rundir.cancel_flag import write_cancel_flag
from launch.rundir.files import RunFiles
from launch.rundir.find import find_runs
from launch.rundir.lock import LockOwner, local_owner, recorded_owner
from launch.rundir.state import Queue, RunState, judge, read_liveness
from launch.terminal import Console
from slurm.jobs import QueuedJob, cancel, cancel_waiting, signal_batch_script
from trainer.spec.errors import EnvironmentFaultError, ExitCode

_BETWEEN_SIGNALS_S = 0.3  # two that come at once are one


def run_cancel(options: CancelOptions, console: Console, *, environment: Mapping[str, str] = os.environ) -> ExitCode:
    """Cancels the runs that were named; EnvironmentFaultError where one is marked and cannot be reached."""
    queue, alive = Queue(environment), []
    for files in find_runs(options.run, environment).runs:
        liveness = read_liveness(files, queue, reads_ended=False, environment=environment)
        judged = judge(files, liveness, now_s=time.time())
        if judged.state.is_alive or judged.state is RunState.UNKNOWN:
            queued = (job.job_id for job in liveness.jobs or ())
            write_cancel_flag(files.run_dir, now=datetime.now(UTC), job_ids=[*dict.fromkeys((*files.job_ids, *queued))])
            alive.append(files)
        else:
            console.line(f"{files.run_dir}: nothing to cancel: {judged.reason}")
    _end_jobs(alive, options, console, environment)
    unreached = [words for files in alive if (words := _end_here(files, options, console, queue)) is not None]
    if unreached:
        raise EnvironmentFaultError("\n".join(unreached[:3]))
    return ExitCode.DONE


def _end_jobs(
    runs: Sequence[RunFiles], options: CancelOptions, console: Console, environment: Mapping[str, str]
) -> None:
    """Takes jobs that wait out of the queue, and has those that run end."""
    jobs = _jobs(runs, environment)
    waiting = [job.job_id for job in jobs if job.is_waiting]
    if options.now and jobs:
        cancel([job.job_id for job in jobs], environment)
        console.line(f"cancelled: {_named(jobs)}; what was learned after the newest checkpoint may be lost")
        return
    if waiting:
        cancel_waiting(waiting, environment)
        jobs = _jobs(runs, environment)  # one may have started meanwhile
        gone = [job_id for job_id in waiting if job_id not in {job.job_id for job in jobs}]
        console.line(f"taken out of the queue: {', '.join(gone)}" if gone else "a job started meanwhile")
    running = [job for job in jobs if job.is_running and job.state != "COMPLETING"]
    for job in running:
        signal_batch_script(job.job_id, environment)
    if running:
        console.line(f"asked to save a checkpoint and end: {_named(running)}")
        console.line(f"to see it end: shardwise logs {shlex.quote(str(runs[0].run_dir))} --follow")


def _jobs(runs: Sequence[RunFiles], environment: Mapping[str, str]) -> list[QueuedJob]:
    queue = Queue(environment)
    return [job for files in runs for job in queue.jobs_of_run(files) or ()]


def _end_here(files: RunFiles, options: CancelOptions, console: Console, queue: Queue) -> str | None:
    """Signals the supervisor where no job holds it; why that is not possible, in words."""
    if queue.problem is not None and files.submission is not None:
        return f"{files.run_dir} is marked, so that no job goes on with it, but its jobs stay: {queue.problem}"
    if queue.problem is None and queue.jobs_of_run(files):
        return None
    owner = local_owner(files.run_dir)
    if owner is None:
        return _elsewhere(files, recorded_owner(files.run_dir))
    _interrupt(owner)
    if options.now:
        time.sleep(_BETWEEN_SIGNALS_S)
        _interrupt(owner)
    how = "end at once" if options.now else "save a checkpoint and end"
    console.line(f"{files.run_dir}: asked to {how}: {owner}")
    return None


def _elsewhere(files: RunFiles, owner: LockOwner | None) -> str | None:
    if owner is None or owner.is_local:
        return None  # it ended meanwhile
    return (
        f"{files.run_dir} is marked, so that nothing goes on with it, but {owner} supervises it; "
        f"on {owner.host} run: kill -INT {owner.pid}"
    )


def _interrupt(owner: LockOwner) -> None:
    try:
        with suppress(ProcessLookupError):
            os.kill(owner.pid, signal.SIGINT)
    except PermissionError:
        raise EnvironmentFaultError(f"{owner} is another user's: only they can stop it") from None


def _named(jobs: Sequence[QueuedJob]) -> str:
    return ", ".join(f"job {job.job_id}" for job in jobs)
