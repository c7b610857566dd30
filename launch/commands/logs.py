"""`shardwise logs`: the end of what a run said, and with --follow what it says from now on, until it ends."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from launch.options import LogsOptions
from launch.rundir.files import NUM_SIDE_LINES, LogFollower, RunFiles, last_lines, main_log, read_run, side_logs
from launch.rundir.find import RUNS, find_runs, one_run, runs_below
from launch.rundir.state import Queue, RunState, judge, read_liveness
from launch.terminal import Console
from trainer.spec.errors import ExitCode, InputError

LOOK_S = 1.0
ASK_S = 15.0  # between two questions to Slurm: it serves everybody


def run_logs(
    options: LogsOptions,
    console: Console,
    *,
    environment: Mapping[str, str] = os.environ,
    look_s: float = LOOK_S,
    ask_s: float = ASK_S,
) -> ExitCode:
    """Shows the end of the log that tells most, or of the one that is asked for; Ctrl-C ends following in order."""
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


class _EndOfRun:
    """Tells whether a run has ended; asks Slurm seldom."""

    def __init__(self, environment: Mapping[str, str], ask_s: float) -> None:
        self._environment, self._ask_s = environment, ask_s
        self._asked_at = float("-inf")
        self.words: str | None = None

    def has_come(self, run_dir: Path) -> bool:
        """Asked while nothing new is written; what nobody can tell has not ended."""
        now = time.monotonic()
        if now - self._asked_at < self._ask_s:
            return False
        self._asked_at = now
        files = read_run(run_dir)
        judged = judge(
            files, read_liveness(files, Queue(self._environment), environment=self._environment), now_s=time.time()
        )
        self.words = judged.reason
        return not judged.state.is_alive and judged.state is not RunState.UNKNOWN


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
