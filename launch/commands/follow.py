"""`shardwise status`, `logs`, `watch` and `cancel`: the state and the output of runs, and their end.

They read files, and query Slurm. `watch` is the live view of a run from another shell: it only reads files, so it works
on every machine that sees them and does not affect the run.

A cancelled run saves a checkpoint and ends for good, with every job that would continue it. The order matters, because
each step would otherwise start what the previous one prevents: first the cancel flag, so that no job that starts or is
requeued continues; then the waiting jobs; then a signal to the running one.
"""

import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path

from shardwise.launch.options import CancelOptions, LogsOptions, StatusOptions, WatchOptions
from shardwise.launch.rundir.files import (
    NUM_SIDE_LINES,
    RunFiles,
    is_run_dir,
    main_log,
    outputs_of,
    read_run,
    side_logs,
)
from shardwise.launch.rundir.lock import LockOwner, local_owner, recorded_owner, write_cancel_flag
from shardwise.launch.rundir.metrics import NewLines, last_lines, tail_lines
from shardwise.launch.rundir.paths import CONSOLE_LOG
from shardwise.launch.rundir.state import (
    RUNS,
    Queue,
    RunState,
    RunStatus,
    find_runs,
    judge,
    one_run,
    read_liveness,
    run_dirs_of,
    runs_below,
    status_of,
)
from shardwise.launch.show.follow import (
    NUM_INCIDENTS,
    QUERY_S,
    SETTLE_S,
    Look,
    WatchedRun,
    render_status,
    render_table,
    shown_path,
    submitted_s,
)
from shardwise.launch.show.screen import ViewOutput
from shardwise.launch.terminal import Console, folded, terminal_columns
from shardwise.slurm.jobs import QueuedJob, cancel, cancel_waiting, signal_batch_script
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError

_LAST_LINE_BYTES = 4096
_LONGEST_LINE = 200
LOOK_S = 1.0
_BETWEEN_SIGNALS_S = 0.3  # two at once count as one


class _EndOfRun:
    """Detects the end of a run; queries Slurm only once in a while."""

    def __init__(self, environment: Mapping[str, str], query_s: float) -> None:
        self._environment, self._query_s = environment, query_s
        self._requested_at = float("-inf")
        self.reason: str | None = None

    def has_come(self, run_dir: Path) -> bool:
        """True if the run has ended; False as long as its state is unknown. Called while no new lines arrive."""
        now = time.monotonic()
        if now - self._requested_at < self._query_s:
            return False
        self._requested_at = now
        files = read_run(run_dir)
        judged = judge(
            files, read_liveness(files, Queue(self._environment), environment=self._environment), now_s=time.time()
        )
        self.reason = judged.reason
        return not judged.state.is_alive and judged.state is not RunState.UNKNOWN


def run_status(options: StatusOptions, console: Console, *, environment: Mapping[str, str] = os.environ) -> ExitCode:
    """Shows one run, the points of a sweep, or all of the user's."""
    queue, base, width = Queue(environment), Path.cwd(), terminal_columns(console)
    if options.run is None:
        found, others = _own_runs(queue)
        statuses = [_status(files, queue, environment, reads_ended=False) for files in found]
        if options.sync:
            return _sync(statuses, console, environment)
        if options.as_json:
            console.json(statuses)
            return ExitCode.DONE
        console.line(
            render_table(statuses, base=base, width=width)
            if statuses
            else f"no runs in {base / RUNS}, and none in a queue"
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
        console.json(statuses if runs.is_sweep else statuses[0])
    elif runs.is_sweep:
        console.line(render_table(statuses, base=base, width=width))
    else:
        console.line(folded(render_status(statuses[0], base=base), width))
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
    """The last line that is not blank of the newest output, else of the run's console, else of rank 0."""
    outputs = outputs_of(files)
    rank_0 = [] if files.attempt_dir is None else [files.attempt_dir / "logs" / "rank-0.log"]
    for path in (*outputs[-1:], files.run_dir / CONSOLE_LOG, *rank_0):
        lines = [line.strip() for line in tail_lines(path, _LAST_LINE_BYTES) if line.strip()]
        if lines:
            return lines[-1][:_LONGEST_LINE]
    return None


def _own_runs(queue: Queue) -> tuple[list[RunFiles], int]:
    """The user's runs, the newest first, and the number of runs of other users in the same folder."""
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


def run_logs(
    options: LogsOptions,
    console: Console,
    *,
    environment: Mapping[str, str] = os.environ,
    look_s: float = LOOK_S,
    query_s: float = QUERY_S,
) -> ExitCode:
    """Shows the end of the most informative log, or of the selected one; Ctrl-C ends following."""
    word = options.run or _newest()
    files = one_run(find_runs(word, environment), word)
    try:
        return _show_and_follow(files, options, console, environment, _EndOfRun(environment, query_s), look_s)
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
    growing = None if path is None else NewLines(path, from_end=True)
    is_ending = False
    while True:
        has_new_lines = False
        for line in growing.read() if growing is not None else ():
            has_new_lines = True
            for text in line.decode(errors="replace").splitlines() or [""]:  # a bar of progress has carriage returns
                console.line(text)
        if has_new_lines:
            is_ending = False
            continue
        newer = main_log(read_run(run_dir), rank=options.rank, attempt=options.attempt)
        if newer is not None and (growing is None or newer != growing.path):
            console.line(f"==> {newer} <==")
            growing = NewLines(newer)
            continue
        if is_ending:  # the output up to the end has been read
            console.line(f"{run_dir}: {end.reason}")
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
    unreached = [reason for files in alive if (reason := _end_here(files, options, console, queue)) is not None]
    if unreached:
        raise EnvironmentFaultError("\n".join(unreached[:3]))
    return ExitCode.DONE


def _end_jobs(
    runs: Sequence[RunFiles], options: CancelOptions, console: Console, environment: Mapping[str, str]
) -> None:
    """Removes waiting jobs from the queue and requests the end of running ones."""
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
        console.line(f"removed from the queue: {', '.join(removed)}" if removed else "a job started meanwhile")
    running = [job for job in jobs if job.is_running and job.state != "COMPLETING"]
    for job in running:
        signal_batch_script(job.job_id, environment)
    if running:
        console.line(f"requested to save a checkpoint and end: {_named(running)}")
        console.line(f"to see it end: shardwise logs {shlex.quote(str(runs[0].run_dir))} --follow")


def _jobs(runs: Sequence[RunFiles], environment: Mapping[str, str]) -> list[QueuedJob]:
    queue = Queue(environment)
    return [job for files in runs for job in queue.jobs_of_run(files) or ()]


def _end_here(files: RunFiles, options: CancelOptions, console: Console, queue: Queue) -> str | None:
    """Signals the supervisor of a run without a job; returns the reason if that is not possible."""
    if queue.problem is not None and files.submission is not None:
        return f"{files.run_dir} is marked, so that no job continues it, but its jobs stay: {queue.problem}"
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
    console.line(f"{files.run_dir}: requested to {how}: {owner}")
    return None


def _elsewhere(files: RunFiles, owner: LockOwner | None) -> str | None:
    if owner is None or owner.is_local:
        return None  # it ended meanwhile
    return (
        f"{files.run_dir} is marked, so that nothing continues it, but {owner} supervises it; "
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


_MOST_MISSED = 30  # looks in a row at a directory that cannot be read


def run_watch(
    options: WatchOptions,
    console: Console,
    *,
    environment: Mapping[str, str] = os.environ,
    look_s: float = LOOK_S,
    query_s: float = QUERY_S,
    settle_s: float = SETTLE_S,
) -> ExitCode:
    """Shows the run until it ends, or once; Ctrl-C ends the view with INTERRUPTED and does not affect the run."""
    run_dir = _run_dir(options.run, environment)
    run = WatchedRun(run_dir, environment=environment, query_s=query_s, settle_s=settle_s)
    shown = _JsonLines(console) if options.as_json else _Views(console, environment)
    try:
        with shown.opened():
            look = _watch(run, shown, look_s=look_s, once=options.once)
    except KeyboardInterrupt:
        if not options.as_json:
            console.line("no longer watching; the run continues")
        return ExitCode.INTERRUPTED
    if not options.as_json and (look.has_ended or options.once):
        for line in ending_lines(look, base=Path.cwd()):
            console.line(line)
    return ExitCode.DONE


def ending_lines(look: Look, *, base: Path) -> list[str]:
    """The end or the state of the run, with its newest incidents and the commands that show more."""
    report, place = look.files.report, shown_path(str(look.files.run_dir), base)
    lines = [f"{place}: {look.judged.reason}"]
    is_reported = report is not None and look.files.has_final_report and not look.judged.state.is_alive
    if report is None or not is_reported:
        return lines
    lines += [f"  error: {line}" for line in (report.error or "").splitlines()[:1]]
    lines += [f"  {incident}" for incident in report.incidents[-NUM_INCIDENTS:]]
    return [*lines, f"  shardwise report {place}"]


def _watch(run: WatchedRun, shown: "_Views | _JsonLines", *, look_s: float, once: bool) -> Look:
    num_missed = 0
    while True:
        try:
            look = run.look()
        except OSError as error:  # of a shared file system that is unavailable for a while
            num_missed += 1
            if once or num_missed > _MOST_MISSED:
                raise EnvironmentFaultError(f"{error.filename}: cannot be read: {error.strerror}") from error
        else:
            num_missed = 0
            shown.show(look, is_last=once or look.has_ended)
            if once or look.has_ended:
                return look
        time.sleep(look_s)


class _Views:
    """The view for a person."""

    def __init__(self, console: Console, environment: Mapping[str, str]) -> None:
        self._output = ViewOutput(console, environment)
        self._state = ""

    def opened(self) -> AbstractContextManager[object]:
        return self._output.screen.shown()

    def show(self, look: Look, *, is_last: bool) -> None:
        screen = self._output.screen
        if screen.is_closed:
            raise BrokenPipeError
        if not screen.is_block and look.view.state != self._state:
            screen.print_line(f"{look.view.title}: {look.view.state}")
        self._state = look.view.state
        if is_last or self._output.is_due:
            self._output.show(look.view)


class _JsonLines:
    """A line for the state when it changes, and one for each new step; the first line is the state as it is found."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed: tuple[object, ...] | None = None

    def opened(self) -> AbstractContextManager[object]:
        return nullcontext()

    def show(self, look: Look, *, is_last: bool) -> None:
        if self._printed is not None:
            for row in look.rows:
                self._line({"kind": "step", **row})
        now = (look.judged.state, look.view.state, look.files.attempt)
        if now != self._printed or (is_last and look.rows):
            self._line(_state_line(look))
        self._printed = now

    def _line(self, line: dict[str, object]) -> None:
        self._console.json(line, is_indented=False)


def _state_line(look: Look) -> dict[str, object]:
    view, files = look.view, look.files
    return {
        "kind": "state",
        "run_dir": str(files.run_dir),
        "state": look.judged.state.value,
        "words": look.judged.reason,
        "phase": files.phase if look.judged.state in (RunState.RUNNING, RunState.UNKNOWN) else None,
        "attempt": files.attempt,
        "step": view.step,
        "num_steps": view.num_steps,
        "seconds_left": view.seconds_left,
        "loss": view.loss,
        "eval_loss": view.eval_loss,
        "tokens_per_s": view.tokens_per_s,
        "predicted_tokens_per_s": view.predicted_tokens_per_s,
        "num_skipped": view.num_skipped,
        "incidents": view.incidents,
        "has_ended": look.has_ended,
    }


def _run_dir(word: str, environment: Mapping[str, str]) -> Path:
    """The run's directory; also one without a plan, as long as it contains attempts."""
    path = Path(word)
    if path.is_dir() and not is_run_dir(path) and (path / "attempts").is_dir():
        return path
    return one_run(find_runs(word, environment), word).run_dir
