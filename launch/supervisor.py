"""Starts the launcher of one attempt, watches it, passes stop requests on, and leaves no process behind.

    shardwise (supervisor) -> accelerate launch (own session, INT and USR1 ignored) -> ranks (own sessions)

- torchrun gives each rank a session of its own: a signal to the launcher's group never reaches a rank, and killing the
  launcher leaves them alive. So ranks register themselves in `pids/`, and a stop request (Ctrl-C, USR1, TERM) becomes
  USR1 to exactly those processes. A rank that registers later gets it later.
- The launcher dies with this process, and each rank with its launcher (PR_SET_PDEATHSIG on both links).
- A second Ctrl-C ends the attempt at once, without a checkpoint.
- A rank that fails or dies leaves the others waiting in a collective: they get `END_GRACE_S`, then the end.
- Ranks that give no sign of life (`watchdog`) write their stacks into their logs, and then the attempt is ended.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from launch.attempt_end import AttemptEnd, Observed, attempt_end, rank_reports
from launch.cgroup import read_oom_kills
from launch.process_record import ProcessRecord, descendants, read_records, record_of, write_record
from launch.watchdog import Silence, Stack, Watchdog, read_stack, with_stacks
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.report import Ending

POLL_S = 0.1
END_GRACE_S = 15.0  # torchrun has said by then which rank failed first
DUMP_S = 2.0  # for the ranks to write their stacks
KILL_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1


class StopKind(StrEnum):
    """Who asked for the end."""

    INTERRUPT = "interrupt"  # Ctrl-C
    REQUEUE = "requeue"  # TERM or USR1


class StoppedEarlyError(KeyboardInterrupt):
    """A stop while nothing runs yet that would have to be saved; whatever cleans up after Ctrl-C cleans up after it."""


class StopRequest:
    """What has been asked of this process by signals, since `listening` began."""

    def __init__(self) -> None:
        self.kind: StopKind | None = None
        self.num_interrupts = 0
        self._is_raising = False

    def note(self, number: int, _frame: object) -> None:
        """Signal handler: remembers, and does nothing else unless `raising`."""
        if number == signal.SIGINT:
            self.num_interrupts += 1
        if self.kind is None:
            self.kind = StopKind.INTERRUPT if number == signal.SIGINT else StopKind.REQUEUE
        if self._is_raising:
            self._is_raising = False
            raise StoppedEarlyError

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Ends the block with StoppedEarlyError at the first signal: for what may be broken off anywhere."""
        self._is_raising = True
        try:
            yield
        finally:
            self._is_raising = False

    @property
    def is_urgent(self) -> bool:
        """True after a second Ctrl-C."""
        return self.num_interrupts > 1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes INT, TERM and USR1 while the block runs."""
        before = {number: signal.signal(number, self.note) for number in _STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_attempt(
    argv: Sequence[str],
    *,
    attempt_dir: Path,
    environment: Mapping[str, str],
    stop: StopRequest,
    on_tick: Callable[[], None],
    watchdog: Watchdog,
) -> AttemptEnd:
    """Runs one attempt to its end and tells how it ended, with the report of its ranks or one made for them."""
    kills_before = read_oom_kills()
    hung: str | None = None
    with open_launcher_log(attempt_dir) as log:
        launcher = _start(argv, environment, log.fileno())
        try:
            silence = _watch(launcher, attempt_dir, stop, on_tick, watchdog)
            hung = None if silence is None else _ask_where(silence, attempt_dir)
            return_code = launcher.poll()
        finally:
            end_all(launcher, attempt_dir)
    on_tick()
    kills = read_oom_kills()
    seen = Observed(
        return_code=return_code,
        hung=hung,
        step=watchdog.step,
        was_cut_short=stop.is_urgent,
        num_oom_kills=None if kills is None or kills_before is None else kills - kills_before,
    )
    return attempt_end(attempt_dir, seen)


def open_launcher_log(attempt_dir: Path) -> BinaryIO:
    """The file that takes what the launcher prints."""
    folder = attempt_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / "launcher.log").open("ab")


def _start(argv: Sequence[str], environment: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
    supervisor = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare_child() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)

    try:
        return subprocess.Popen(
            list(argv),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=prepare_child,  # this process has one thread
        )
    except OSError as error:
        raise EnvironmentFaultError(f"{argv[0]}: cannot be started: {error.strerror}") from error


def _watch(
    launcher: subprocess.Popen[bytes],
    attempt_dir: Path,
    stop: StopRequest,
    on_tick: Callable[[], None],
    watchdog: Watchdog,
) -> Silence | None:
    """Returns when the attempt has ended, or has to be ended; with the ranks that hang, if that is why."""
    record = record_of(launcher.pid)
    if record is not None:
        write_record(attempt_dir / "pids" / "launcher.json", record)
    told: set[ProcessRecord] = set()
    failed_since: float | None = None
    while launcher.poll() is None and not stop.is_urgent:
        if stop.kind is not None:
            told |= _tell(attempt_dir, told)
        if failed_since is None and _has_failed(attempt_dir):
            failed_since = time.monotonic()
        if failed_since is not None and time.monotonic() - failed_since > END_GRACE_S:
            return None
        silence = watchdog.look()
        if silence is not None:  # after the last word, only the end of the processes is missing
            return None if watchdog.has_ended else silence
        on_tick()
        time.sleep(POLL_S)
    return None


def _has_failed(attempt_dir: Path) -> bool:
    """Whether a rank reported a failure, or is gone without a report."""
    reports = rank_reports(attempt_dir)
    if any(report.ending in (Ending.OUT_OF_MEMORY, Ending.FAILED) for report in reports.values()):
        return True
    gone = {rank for rank, record in _rank_records(attempt_dir).items() if not record.is_alive}
    return bool(gone - reports.keys()) and not gone <= rank_reports(attempt_dir).keys()  # it may have left in between


def _ask_where(silence: Silence, attempt_dir: Path) -> str:
    """Has every rank write its stacks into its log; who hangs, and where, in a sentence."""
    ranks = _rank_records(attempt_dir)
    logs = {rank: attempt_dir / "logs" / f"rank-{rank}.log" for rank in ranks}
    ends = {rank: log.stat().st_size if log.is_file() else 0 for rank, log in logs.items()}
    for record in ranks.values():
        record.send(signal.SIGUSR2)
    time.sleep(DUMP_S)
    stacks: dict[int, Stack] = {
        rank: read_stack(logs[rank], begin=ends[rank], pid=record.pid) for rank, record in ranks.items()
    }
    return with_stacks(silence, stacks)


def _rank_records(attempt_dir: Path) -> dict[int, ProcessRecord]:
    records = read_records(attempt_dir / "pids")
    return {int(name.removeprefix("rank-")): record for name, record in records.items() if name.startswith("rank-")}


def _tell(attempt_dir: Path, told: set[ProcessRecord]) -> set[ProcessRecord]:
    return {record for record in {*_rank_records(attempt_dir).values()} - told if record.send(signal.SIGUSR1)}


def end_all(launcher: subprocess.Popen[bytes], attempt_dir: Path) -> None:
    """Kills whatever of the attempt is alive and waits until it is gone."""
    ranks = [*_rank_records(attempt_dir).values()]
    if launcher.poll() is None:
        ranks += descendants(launcher.pid)  # ranks that have not registered yet
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    for rank in ranks:
        rank.send(signal.SIGKILL)
    deadline = time.monotonic() + KILL_GRACE_S
    while any(rank.is_alive for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
