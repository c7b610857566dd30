"""`shardwise status`, `logs` and `cancel`: the state and the output of runs, and their end, from files and from Slurm.

A cancelled run saves a checkpoint and ends for good, with every job that would continue it. The order matters, because
each step would otherwise start what the previous one prevents: first the cancel flag, so that no job that starts or is
requeued continues; then the waiting jobs; then a signal to the running one.
"""

import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from shardwise.launch.options import CancelOptions, LogsOptions, StatusOptions
from shardwise.launch.rundir.cancel_flag import write_cancel_flag
from shardwise.launch.rundir.files import (
    NUM_SIDE_LINES,
    LogFollower,
    RunFiles,
    last_lines,
    main_log,
    outputs_of,
    read_run,
    side_logs,
    tail_lines,
)
from shardwise.launch.rundir.find import RUNS, find_runs, one_run, run_dirs_of, runs_below
from shardwise.launch.rundir.lock import LockOwner, local_owner, recorded_owner
from shardwise.launch.rundir.state import Queue, RunState, RunStatus, judge, read_liveness, status_of
from shardwise.launch.show.status import render_status, render_table, submitted_s
from shardwise.launch.terminal import Console
from shardwise.slurm.jobs import QueuedJob, cancel, cancel_waiting, signal_batch_script
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError

_LAST_LINE_BYTES = 4096
_LONGEST_LINE = 200
LOOK_S = 1.0
ASK_S = 15.0  # between two questions to Slurm: it serves everybody
_BETWEEN_SIGNALS_S = 0.3  # two that come at once are one


class _EndOfRun:
    """Detects the end of a run; queries Slurm only once in a while."""

    def __init__(self, environment: Mapping[str, str], ask_s: float) -> None:
        self._environment, self._ask_s = environment, ask_s
        self._requested_at = float("-inf")
        self.words: str | None = None

    def has_come(self, run_dir: Path) -> bool:
        """True if the run has ended; False as long as its state is unknown. Called while no new lines arrive."""
        now = time.monotonic()
        if now - self._requested_at < self._ask_s:
            return False
        self._requested_at = now
        files = read_run(run_dir)
        judged = judge(
            files, read_liveness(files, Queue(self._environment), environment=self._environment), now_s=time.time()
        )
        self.words = judged.reason
        return not judged.state.is_alive and judged.state is not RunState.UNKNOWN


def run_status(options: StatusOptions, console: Console, *, environment: Mapping[str, str] = os.environ) -> ExitCode:
    """Shows one run, the points of a sweep, or all of the user's."""
    queue, base = Queue(environment), Path.cwd()
    if options.run is None:
        found, others = _own_runs(queue)
        statuses = [_status(files, queue, environment, reads_ended=False) for files in found]
        if options.sync:
            return _sync(statuses, console, environment)
        if options.as_json:
            console.line(_as_json(statuses))
            return ExitCode.DONE
        console.line(
            render_table(statuses, base=base) if statuses else f"no runs in {base / RUNS}, and none in a queue"
        )
        if others:
            console.line(f"runs of others in {RUNS} are left out: {others}; name one to see it")
        if queue.problem is not None and any(files.submission is not None for files in found):
            console.line(f"from files alone: {queue.problem}")
        return ExitCode.DONE
    runs = find_runs(options.run, environment)
    statuses = [_status(files, queue, environment, reads_ended=not runs.is_sweep) for files in runs.runs]
    if options.sync:
        return _sync(statuses, console, environment)
    if options.as_json:
        console.line(_as_json(statuses if runs.is_sweep else statuses[0]))
    elif runs.is_sweep:
        console.line(render_table(statuses, base=base))
    else:
        console.line(render_status(statuses[0], base=base))
        _offer_sync(runs.runs[0].run_dir, console)
    return ExitCode.DONE


def _status(files: RunFiles, queue: Queue, environment: Mapping[str, str], *, reads_ended: bool) -> RunStatus:
    liveness = read_liveness(files, queue, reads_ended=reads_ended, environment=environment)
    logs = log_places(files)
    return status_of(files, liveness, now_s=time.time(), last_line=last_line(files), logs=tuple(map(str, logs)))


def _sync(statuses: Sequence[RunStatus], console: Console, environment: Mapping[str, str]) -> ExitCode:
    from shardwise.launch.track.offline import sync_runs  # for --sync alone

    return sync_runs([(Path(status.run_dir), status.state) for status in statuses], console, environment)


def _offer_sync(run_dir: Path, console: Console) -> None:
    if (run_dir / "wandb.json").is_file():
        from shardwise.launch.track.offline import unsynced_folders

        folders = unsynced_folders(run_dir)
        if folders:
            console.line(f"  wandb: {len(folders)} written offline; to send: shardwise status {run_dir} --sync")


def log_places(files: RunFiles) -> list[Path]:
    """Places of the run's logs: the newest output of Slurm, and the folder of the newest attempt."""
    outputs = outputs_of(files)[-1:]
    folder = None if files.attempt_dir is None else files.attempt_dir / "logs"
    return [*outputs, *([folder] if folder is not None and folder.is_dir() else [])]


def last_line(files: RunFiles) -> str | None:
    """The last line with something in it of the newest output, else of rank 0."""
    outputs = outputs_of(files)
    rank_0 = [] if files.attempt_dir is None else [files.attempt_dir / "logs" / "rank-0.log"]
    for path in (*outputs[-1:], *rank_0):
        lines = [line.strip() for line in tail_lines(path, _LAST_LINE_BYTES) if line.strip()]
        if lines:
            return "".join(each if each.isprintable() else " " for each in lines[-1])[:_LONGEST_LINE]
    return None


def _own_runs(queue: Queue) -> tuple[list[RunFiles], int]:
    """The user's runs, the newest first, and how many runs of others are beside them."""
    mine = os.getuid()
    here = runs_below(RUNS)
    own = [path for path in here if path.stat().st_uid == mine]
    known = {path.resolve() for path in here}
    queued = [path for path in run_dirs_of(queue.jobs_of(mine) or ()) if path.resolve() not in known]
    return sorted(map(read_run, [*own, *queued]), key=_age), len(here) - len(own)


def _age(files: RunFiles) -> tuple[float, str, int, str]:
    """Smaller for what is newer; points of a sweep by their numbers."""
    submission, folder = files.submission, files.run_dir
    began_s = (folder / "plan.json").stat().st_mtime if submission is None else submitted_s(submission.submitted)
    return -began_s, str(folder.parent), len(folder.name), folder.name


def _as_json(status: RunStatus | Sequence[RunStatus]) -> str:
    return msgspec.json.format(msgspec.json.encode(status), indent=1).decode()


def run_logs(
    options: LogsOptions,
    console: Console,
    *,
    environment: Mapping[str, str] = os.environ,
    look_s: float = LOOK_S,
    ask_s: float = ASK_S,
) -> ExitCode:
    """Shows the end of the most informative log, or of the selected one; Ctrl-C ends following."""
    word = options.run or _newest()
    files = one_run(find_runs(word, environment), word)
    try:
        return _show_and_follow(files, options, console, environment, _EndOfRun(environment, ask_s), look_s)
    except KeyboardInterrupt:
        if not options.follow:
            raise
        console.line()
        return ExitCode.DONE


def _show_and_follow(
    files: RunFiles,
    options: LogsOptions,
    console: Console,
    environment: Mapping[str, str],
    end: "_EndOfRun",
    look_s: float,
) -> ExitCode:
    path = main_log(files, rank=options.rank, attempt=options.attempt)
    if path is not None:
        _show(path, options.num_lines, console)
    if options.follow:
        _follow(files.run_dir, path, options, console, end, look_s)
    elif path is None:
        console.line(f"{files.run_dir}: nothing was written yet{_why(files, environment)}")
    elif options.rank is None:
        for side in side_logs(files, attempt=options.attempt):
            _show(side, min(NUM_SIDE_LINES, options.num_lines), console)
    return ExitCode.DONE


def _follow(
    run_dir: Path, path: Path | None, options: LogsOptions, console: Console, end: _EndOfRun, look_s: float
) -> None:
    growing = None if path is None else LogFollower(path, from_end=True)
    is_ending = False
    while True:
        lines = growing.read_new() if growing is not None else ()
        for line in lines:
            console.line(line)
        if lines:
            is_ending = False
            continue
        newer = main_log(read_run(run_dir), rank=options.rank, attempt=options.attempt)
        if newer is not None and (growing is None or newer != growing.path):
            console.line(f"==> {newer} <==")
            growing = LogFollower(newer, from_end=False)
            continue
        if is_ending:  # and what was written before the end has been read
            console.line(f"{run_dir}: {end.words}")
            return
        is_ending = end.has_come(run_dir)
        if not is_ending:
            time.sleep(look_s)


def _show(path: Path, count: int, console: Console) -> None:
    console.line(f"==> {path} <==")
    for line in last_lines(path, count):
        console.line(line)


def _newest() -> str:
    """The run of ./runs that was begun last."""
    found = sorted(runs_below(RUNS), key=lambda path: path.stat().st_mtime)
    if not found:
        raise InputError(f"there is no run in {RUNS.absolute()}; name one, or a job")
    return str(found[-1])


def _why(files: RunFiles, environment: Mapping[str, str]) -> str:
    liveness = read_liveness(files, Queue(environment), environment=environment)
    return f": {judge(files, liveness, now_s=time.time()).reason}"


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
        removed = [job_id for job_id in waiting if job_id not in {job.job_id for job in jobs}]
        console.line(f"taken out of the queue: {', '.join(removed)}" if removed else "a job started meanwhile")
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
    """Signals the supervisor of a run without a job; returns the reason if that is not possible."""
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
