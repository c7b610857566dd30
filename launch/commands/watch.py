"""`shardwise watch`: the live view of a run, from another shell, until the run ends.

Only files are read, so it works on every machine that sees them and does not affect the run: Ctrl-C ends only the view.
"""

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec

from shardwise.launch.options import WatchOptions
from shardwise.launch.rundir.files import is_run_dir
from shardwise.launch.rundir.find import find_runs, one_run
from shardwise.launch.rundir.state import RunState
from shardwise.launch.show.follow import QUERY_S, SETTLE_S, Look, WatchedRun
from shardwise.launch.show.screen import ViewOutput
from shardwise.launch.show.status import NUM_INCIDENTS, shown_path
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode

LOOK_S = 1.0
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
    """Shows the run until it ends, or once; Ctrl-C ends with INTERRUPTED and leaves the run alone."""
    run_dir = _run_dir(options.run, environment)
    run = WatchedRun(run_dir, environment=environment, query_s=query_s, settle_s=settle_s)
    shown = _JsonLines(console) if options.as_json else _Views(console, environment)
    try:
        with shown.opened():
            look = _watch(run, shown, look_s=look_s, once=options.once)
    except KeyboardInterrupt:
        if not options.as_json:
            console.line("no longer watching; the run goes on")
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
        except OSError as error:  # of a shared file system that is away for a while
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
        self._told: tuple[object, ...] | None = None

    def opened(self) -> AbstractContextManager[object]:
        return nullcontext()

    def show(self, look: Look, *, is_last: bool) -> None:
        if self._told is not None:
            for row in look.rows:
                self._line({"kind": "step", **row})
        now = (look.judged.state, look.view.state, look.files.attempt)
        if now != self._told or (is_last and look.rows):
            self._line(_state_line(look))
        self._told = now

    def _line(self, line: dict[str, object]) -> None:
        self._console.line(msgspec.json.encode(line).decode())


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
    """The run's directory; also one that lost its plan, as long as there are attempts in it."""
    path = Path(word)
    if path.is_dir() and not is_run_dir(path) and (path / "attempts").is_dir():
        return path
    return one_run(find_runs(word, environment), word).run_dir
