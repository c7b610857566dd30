"""Runs of a folder for the pages: what the list shows of each, and whole runs, read again only where files changed.

A run is found by its name among the directories of the folder. No path is ever made from a name, so that a request
cannot reach a file elsewhere. Files of runs may be damaged or hostile: they are read through the codec, which accepts
regular files of a bounded size, and of a long metrics.jsonl a part of the lines.
"""

import os
import subprocess
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import IO, Any, NamedTuple

import msgspec

from shardwise.launch.commands.ui.chats import Chats
from shardwise.launch.rundir.files import is_run_dir, read_run
from shardwise.launch.rundir.lock import LOCK
from shardwise.launch.rundir.metrics import MAX_METRICS_LINES, RecordedSteps, Step
from shardwise.launch.rundir.state import Queue, RunState, RunStatus, read_liveness, runs_below, status_of
from shardwise.launch.show.follow import QUERY_S, Look, WatchedRun
from shardwise.launch.show.recorded_run import RecordedRun, read_recorded
from shardwise.launch.show.run_page import settings_of
from shardwise.trainer.spec.errors import InputError, ShardwiseError
from shardwise.trainer.spec.plan import Plan

MOST_RUNS = 300  # in the list, the newest ones
_MOST_FOLLOWED = 24  # whole runs in memory
_MOST_OUTPUT_BYTES = 4096  # of a training that a page started
_WATCHED = ("plan.json", "metrics.jsonl", "report.json", "submission.json", "cancelled", LOCK, "attempts")
_MAY_CHANGE = (RunState.WAITING, RunState.STARTING, RunState.RUNNING, RunState.UNKNOWN)


class Summary(NamedTuple):
    """A row of the list."""

    name: str
    started_s: float  # in seconds of the epoch
    status: RunStatus | None = None
    plan: Plan | None = None
    problem: str | None = None  # why there is no status
    settings: Mapping[str, Any] = {}  # of the job, by their paths

    @property
    def is_live(self) -> bool:
        return self.status is not None and self.status.state in _MAY_CHANGE


class WholeRun(NamedTuple):
    """One run with its steps."""

    look: Look
    run: RecordedRun

    @property
    def is_live(self) -> bool:
        return self.look.judged.state in _MAY_CHANGE


class Started(NamedTuple):
    """A training that was started by a page."""

    command: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]

    @property
    def state(self) -> str:
        """`running`, or how it ended with the end of its output."""
        code = self.process.poll()
        if code is None:
            return "running"
        file = self.output.fileno()
        content = os.pread(file, _MOST_OUTPUT_BYTES, max(0, os.fstat(file).st_size - _MOST_OUTPUT_BYTES))
        last = content.decode(errors="replace").strip().splitlines()[-3:]
        return "\n".join((f"ended with {code}" if code else "finished", *(last if code else ())))


class Runs:
    """The runs of one folder; a folder that is a run itself is its only one."""

    def __init__(self, folder: Path, own_file: Path | None = None) -> None:
        self.folder = folder
        self.own_file = own_file  # a job or a config.json, which the explorer offers
        self.nonce: str | None = None  # of the forms of actions; None: there are none
        self.started: list[Started] = []
        self.chats = Chats()
        self._lock = Lock()
        self._queue, self._queried_at = Queue(os.environ), time.monotonic()
        self._summaries: dict[str, tuple[object, Summary]] = {}
        self._followed: OrderedDict[str, _Followed] = OrderedDict()

    def names(self) -> dict[str, Path]:
        """The run directories by the names that requests use."""
        if is_run_dir(self.folder):
            return {self.folder.resolve().name: self.folder}
        try:
            return {str(path.relative_to(self.folder)): path for path in runs_below(self.folder)}
        except OSError:
            return {}

    def summaries(self) -> tuple[list[Summary], int]:
        """The newest runs, the newest first, and the number of all runs."""
        names = self.names()
        with self._lock:
            started = sorted(((_started_s(path), name) for name, path in names.items()), reverse=True)
            self._summaries = {name: each for name, each in self._summaries.items() if name in names}
            found = [self._summary(name, names[name], at_s) for at_s, name in started[:MOST_RUNS]]
        return found, len(names)

    def whole(self, name: str) -> WholeRun:
        """One run; InputError for a name that the folder does not have."""
        path = self.names().get(name)
        if path is None:
            raise InputError(f"{name}: there is no such run in {self.folder}")
        with self._lock:
            followed = self._followed.pop(name, None)
            if followed is None or followed.is_too_long:
                followed = _Followed(path, os.environ)
            self._followed[name] = followed
            if len(self._followed) > _MOST_FOLLOWED:
                self._followed.popitem(last=False)
        return followed.whole()

    def _summary(self, name: str, path: Path, started_s: float) -> Summary:
        signature = _signature(path)
        known = self._summaries.get(name)
        if known is not None and known[0] == signature and not known[1].is_live:
            return known[1]
        try:
            summary = self._read(name, path, started_s)
        except (OSError, ShardwiseError) as error:
            summary = Summary(name, started_s, problem=str(error))
        except Exception as error:  # noqa: BLE001 - one run never blanks the list of all
            summary = Summary(name, started_s, problem=f"unreadable: {type(error).__name__}: {error}")
        self._summaries[name] = (signature, summary)
        return summary

    def _read(self, name: str, path: Path, started_s: float) -> Summary:
        if time.monotonic() - self._queried_at >= QUERY_S:
            self._queue, self._queried_at = Queue(os.environ), time.monotonic()
        files = read_run(path)
        liveness = read_liveness(files, self._queue, reads_ended=False, environment=os.environ)
        status = status_of(files, liveness, now_s=time.time(), last_line=None, logs=())
        settings = {} if files.plan is None else settings_of(files.plan.job)
        return Summary(name, started_s, status, files.plan, settings=settings)


class _Followed:
    """A run whose new lines are added to those that were read before."""

    def __init__(self, run_dir: Path, environment: Mapping[str, str]) -> None:
        self._run_dir, self._watched = run_dir, WatchedRun(run_dir, environment=environment)
        self._steps: list[Step] = []
        self._lock = Lock()
        self._last: tuple[object, WholeRun] | None = None  # with the signature of its files

    @property
    def is_too_long(self) -> bool:
        """True if reading it anew would thin it out."""
        return len(self._steps) > 2 * MAX_METRICS_LINES

    def whole(self) -> WholeRun:
        """The run as it is now; InputError if its directory is missing or is no run."""
        with self._lock:
            signature = _signature(self._run_dir)
            if self._last is not None and self._last[0] == signature and not self._last[1].is_live:
                return self._last[1]
            try:
                look = self._watched.look()
            except OSError as error:
                raise InputError(f"{self._run_dir}: cannot be read: {error.strerror}") from error
            self._steps += (msgspec.convert(row, Step) for row in look.rows)
            recorded = RecordedSteps(tuple(self._steps), look.num_steps, look.training_s)
            whole = WholeRun(look, read_recorded(self._run_dir, recorded))
            self._last = signature, whole
        return whole


def _started_s(path: Path) -> float:
    """When the plan, which is never rewritten, or the submission was written; else the time of the directory."""
    for each in (path / "plan.json", path / "submission.json", path):
        try:
            return each.stat().st_mtime
        except OSError:
            continue
    return 0.0


def _signature(path: Path) -> object:
    """Times and sizes of the files that a summary depends on."""
    found: list[tuple[int, int, int] | None] = []
    for name in _WATCHED:
        try:
            status = (path / name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)
