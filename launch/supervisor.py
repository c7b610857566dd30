"""Starts the launcher of one attempt, watches it, passes stop requests on, and leaves no process behind.

    shardwise (supervisor) -> accelerate launch (own session, INT and USR1 ignored) -> ranks (own sessions)

- torchrun gives each rank a session of its own: a signal to the launcher's group never reaches a rank, and killing the
  launcher leaves them alive. So ranks register themselves in `pids/`, and a stop request (Ctrl-C, USR1, TERM) becomes
  USR1 to exactly those processes. A rank that registers later gets it later.
- The launcher dies with this process, and each rank with its launcher (PR_SET_PDEATHSIG on both links).
- A second Ctrl-C ends the attempt at once, without a checkpoint.
- A rank that reports out of memory leaves the others waiting in a collective: they get `OOM_GRACE_S`, then the end.
"""

import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

import msgspec

from launch.process_record import ProcessRecord, descendants, read_records, record_of, write_record
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.report import Ending, Report

POLL_S = 0.1
OOM_GRACE_S = 15.0
KILL_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1


class StopKind(StrEnum):
    """Who asked for the end."""

    INTERRUPT = "interrupt"  # Ctrl-C
    REQUEUE = "requeue"  # TERM or USR1


class StopRequest:
    """What has been asked of this process by signals, since `listening` began."""

    def __init__(self) -> None:
        self.kind: StopKind | None = None
        self.num_interrupts = 0

    def note(self, number: int, _frame: object) -> None:
        """Signal handler: remembers, does nothing else."""
        if number == signal.SIGINT:
            self.num_interrupts += 1
        if self.kind is None:
            self.kind = StopKind.INTERRUPT if number == signal.SIGINT else StopKind.REQUEUE

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
) -> Report:
    """Runs one attempt to its end and returns the report of its ranks, or one made for ranks that left none."""
    with open_launcher_log(attempt_dir) as log:
        launcher = _start(argv, environment, log.fileno())
        try:
            _watch(launcher, attempt_dir, stop, on_tick)
        finally:
            end_all(launcher, attempt_dir)
    on_tick()
    return collect_report(attempt_dir, launcher.returncode, stop)


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
    launcher: subprocess.Popen[bytes], attempt_dir: Path, stop: StopRequest, on_tick: Callable[[], None]
) -> None:
    record = record_of(launcher.pid)
    if record is not None:
        write_record(attempt_dir / "pids" / "launcher.json", record)
    told: set[ProcessRecord] = set()
    out_of_memory_since: float | None = None
    while launcher.poll() is None:
        if stop.is_urgent:
            return
        if stop.kind is not None:
            told |= _tell(attempt_dir, told)
        if out_of_memory_since is None and _reports_out_of_memory(attempt_dir):
            out_of_memory_since = time.monotonic()
        if out_of_memory_since is not None and time.monotonic() - out_of_memory_since > OOM_GRACE_S:
            return
        on_tick()
        time.sleep(POLL_S)


def _tell(attempt_dir: Path, told: set[ProcessRecord]) -> set[ProcessRecord]:
    ranks = {record for name, record in read_records(attempt_dir / "pids").items() if name.startswith("rank-")}
    return {record for record in ranks - told if record.send(signal.SIGUSR1)}


def end_all(launcher: subprocess.Popen[bytes], attempt_dir: Path) -> None:
    """Kills whatever of the attempt is alive and waits until it is gone."""
    ranks = [record for name, record in read_records(attempt_dir / "pids").items() if name.startswith("rank-")]
    if launcher.poll() is None:
        ranks += descendants(launcher.pid)  # ranks that have not registered yet
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
    for rank in ranks:
        rank.send(signal.SIGKILL)
    deadline = time.monotonic() + KILL_GRACE_S
    while any(rank.is_alive for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)


def _rank_reports(attempt_dir: Path) -> list[Report]:
    reports = []
    for path in sorted(attempt_dir.glob("report*.json")):
        try:
            reports.append(codec.read(path, Report))
        except InputError:
            continue  # damaged by the very fault it reports: the others, or the log, tell
    return reports


def _reports_out_of_memory(attempt_dir: Path) -> bool:
    return any(report.ending is Ending.OUT_OF_MEMORY for report in _rank_reports(attempt_dir))


def collect_report(attempt_dir: Path, return_code: int, stop: StopRequest) -> Report:
    """The report that tells most: out of memory on any rank, else rank 0's.

    A rank that a signal ended leaves none, and the others report that they lost it: the signal is the cause then.
    EnvironmentFaultError, with the signal or the last line of the log, where no rank left one.
    """
    reports = _rank_reports(attempt_dir)
    for ending in (Ending.OUT_OF_MEMORY, Ending.FINISHED, Ending.STOPPED, Ending.PREEMPTED, Ending.FAILED):
        for report in reports:
            if report.ending is ending:
                killed = killed_rank(attempt_dir) if ending is Ending.FAILED else None
                return report if killed is None else msgspec.structs.replace(report, error=killed)
    if stop.kind is not None:
        raise AttemptCutShortError(f"stopped before the first step: nothing was trained ({attempt_dir})")
    killed = killed_rank(attempt_dir)
    cause = (
        f"{killed}\nlast words: {last_words(attempt_dir)}"
        if killed is not None
        else f"no rank left a report, the launcher ended with code {return_code}\nlast words: {last_words(attempt_dir)}"
    )
    raise EnvironmentFaultError(f"the run failed: {cause}\nlogs: {attempt_dir / 'logs'}")


def killed_rank(attempt_dir: Path) -> str | None:
    """`rank 1 was killed by SIGKILL, often out of host memory`, where the launcher saw a signal end a rank.

    torchrun lists every rank that did not end well, with minus the signal for a code, and says which of them it ended
    itself. Accelerate's launcher of a single rank says it in subprocess's words.
    """
    log = attempt_dir / "logs" / "launcher.log"
    text = log.read_text(errors="replace") if log.is_file() else ""
    ended_by_torchrun = set(_ENDED_BY_TORCHRUN.findall(text))
    found = [(rank, number) for rank, number, pid in _LISTED_BY_TORCHRUN.findall(text) if pid not in ended_by_torchrun]
    found += [("0", number) for number in _DIED_ALONE.findall(text)]
    if not found:
        return None
    rank, number = found[0]
    name = signal.Signals(int(number)).name if int(number) in set(signal.Signals) else f"signal {number}"
    hint = ", often out of host memory" if int(number) == signal.SIGKILL else ""
    return f"rank {rank} was killed by {name}{hint}"


_LISTED_BY_TORCHRUN = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: -(\d+) \(pid: (\d+)\)")
_ENDED_BY_TORCHRUN = re.compile(r"Sending process (\d+) closing signal")
_DIED_ALONE = re.compile(r"died with <Signals\.\w+: (\d+)>")


class AttemptCutShortError(Exception):
    """A stop that left nothing to resume from; the caller turns it into an exit code."""


def last_words(attempt_dir: Path) -> str:
    """The last line of a rank's or the launcher's log that looks like an error, else the last line."""
    lines: list[str] = []
    for path in [*sorted((attempt_dir / "logs").glob("rank-*.log")), attempt_dir / "logs" / "launcher.log"]:
        if path.is_file():
            lines += [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return (errors or lines or ["(no output)"])[-1].strip()[:300]
