"""The process of a rank before any heavy import, and of a worker that runs one request.

A rank ends with its launcher, records stop requests, and writes the stacks of its threads into its log on USR2. It
makes the kernel end it first when the machine runs out of RAM: the supervisor can start a rank again, but not itself.

torchrun starts each rank in its own session. So a signal to the launcher's group does not reach the rank, and the rank
would survive the launcher. Hence PR_SET_PDEATHSIG, and a record in `pids/` by which the supervisor finds the rank. The
handler only sets a flag; the loop agrees on it with the other ranks at the next step boundary. Nothing here imports
torch: that takes seconds, in which a stop request may arrive.

`launch.worker` starts a worker as `python -m MODULE REQUEST.json RESULT.json`. Progress goes to stdout, a line at a
time. An error goes to stderr and to RESULT.error, because libraries write to stderr as well; the exit code is that of
the error.
"""

import ctypes
import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, ShardwiseError
from shardwise.trainer.spec.messages.rank_files import READY, SUPERVISED
from shardwise.trainer.spec.value import Value

_PR_SET_PDEATHSIG = 1
_STDERR = 2  # a descriptor, which may become the log's
_OOM_SCORE = 500  # of 1000, added to the share of the RAM that a process holds
_STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
_CLEANING_S = 5  # after TERM
_COMPANION_S = 120.0  # for trackers to send what they have


class StopFlag:
    """Flag of a stop request to this rank; set by a signal handler, read at step boundaries."""

    def __init__(self) -> None:
        self.is_set = False
        self.companion: Companion | None = None  # gets Ctrl-C as well

    def note(self, number: int, _frame: object) -> None:
        """Signal handler: only sets the flag."""
        self.is_set = True
        if number == signal.SIGINT and self.companion is not None:
            self.companion.interrupt()


def end_with_parent() -> None:
    """Ends this process, cleaning up for a few seconds at most, when its parent ends or sends TERM.

    `launch.worker` has the kernel send TERM from the first moment of the process on; a process that another one starts
    gets it from here on.
    """
    signal.signal(signal.SIGTERM, _raise_stop_requested)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _raise_stop_requested(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # the parent's end and its launcher may both send TERM: cleaning goes on
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a time limit for a template may have its own handler
    signal.alarm(_CLEANING_S)  # ALRM ends the process, also if a library swallows the exception
    raise SystemExit(128 + number)


def rank_of_this_process() -> int:
    """The rank that torchrun numbered this process with; 0 where nothing did."""
    return int(os.environ.get("RANK", "0"))


def world_size_of_launch() -> int:
    """How many ranks the launcher started; 1 if the environment has no number."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_supervised() -> bool:
    """True if a supervisor started this rank; false of a start by hand."""
    return SUPERVISED in os.environ


def install_stop_flag() -> StopFlag:
    """Makes USR1 and TERM requests to stop cleanly, and Ctrl-C if no supervisor handles it."""
    flag = StopFlag()
    for number in _STOP_SIGNALS:
        signal.signal(number, flag.note)
    signal.signal(signal.SIGINT, signal.SIG_IGN if is_supervised() else flag.note)
    return flag


def dump_stacks_on_request() -> None:
    """Writes the stacks of all threads to stderr on USR2 and on a crash, also while C code holds the interpreter."""
    faulthandler.enable(file=_STDERR, all_threads=True)
    faulthandler.register(signal.SIGUSR2, file=_STDERR, all_threads=True)


def volunteer_for_oom_kill() -> None:
    """Makes the kernel end this process first when memory runs out; has no effect without permission."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))


def die_with_launcher(attempt_dir: Path) -> None:
    """Makes the kernel end this process when the launcher ends; ends it now if the launcher has ended already.

    A launcher by hand ends at Ctrl-C, and its ranks then stop with a checkpoint.
    """
    launcher = os.getppid()
    number = signal.SIGKILL if is_supervised() else signal.SIGTERM
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != launcher or _recorded_launcher_has_ended(attempt_dir):
        sys.exit("the launcher of this rank has ended")


class Companion:
    """A process for ranks that were started by hand: it does what a supervisor does for them.

    It holds the run directory, prints the course, runs the trackers, passes stop requests on and writes the report of
    the run. Rank 0 starts it, and waits for it at its end.
    """

    def __init__(self, attempt_dir: Path) -> None:
        """Starts it and waits until it holds the run directory; EnvironmentFaultError with the reason if it cannot."""
        own, theirs = os.pipe()
        argv = [sys.executable, "-m", "shardwise.launch.run.by_hand", str(attempt_dir), str(os.getppid()), str(theirs)]
        # In a session of its own: torchrun signals the whole group of a rank.
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=(theirs,), start_new_session=True)
        os.close(theirs)
        with open(own, encoding="utf-8") as stream:  # noqa: PTH123  # a descriptor
            line = stream.readline()
        reply = json.loads(line) if line else "the process that watches this run could not be started"
        if reply != READY:
            raise EnvironmentFaultError(reply)

    def interrupt(self) -> None:
        """Passes a Ctrl-C on, the second of which ends the run at once."""
        self._process.send_signal(signal.SIGINT)

    def wait(self) -> None:
        """Waits until it has reported the end of the run."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_COMPANION_S)


@contextmanager
def importing_libraries() -> Iterator[None]:
    """Imports of the block run without the cyclic garbage collector, a sixth of their processor time.

    Modules stay until the process ends, so the collector never searches their objects later either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def write_pid_record(attempt_dir: Path, *, rank: int) -> None:
    """Registers this rank: pid and start time, because another process may have the same pid later.

    EnvironmentFaultError names a rank of this attempt that runs already.
    """
    path = attempt_dir / "pids" / f"rank-{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        before = json.loads(path.read_text())
        if before["pid"] != os.getpid() and _start_time(int(before["pid"])) == before["start_time"]:
            raise EnvironmentFaultError(f"{attempt_dir}: runs already: its rank {rank} is process {before['pid']}")
    record = {"pid": os.getpid(), "start_time": _start_time(os.getpid()), "rank": rank}
    codec.write_bytes(path, json.dumps(record).encode())


def redirect_output(log_dir: Path, *, rank: int) -> None:
    """Sends what this process and its libraries print to `rank-R.log`."""
    log_dir.mkdir(parents=True, exist_ok=True)
    log = os.open(log_dir / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _start_time(pid: int) -> int | None:
    """Clock ticks after boot at which the process started (field 22 of /proc/PID/stat); None if it has ended.

    A process that has ended and that its parent has not waited for is still in /proc, as a zombie.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _launcher_record() -> str:
    """Where this machine's launcher is recorded: each machine of a run has one, numbered by torchrun's GROUP_RANK."""
    node_rank = os.environ.get("GROUP_RANK", "0")
    return "launcher.json" if node_rank == "0" else f"launcher-{node_rank}.json"


def _recorded_launcher_has_ended(attempt_dir: Path) -> bool:
    """True if this attempt's launcher ended and this process has another parent.

    The supervisor records the launcher after starting it, so a missing record means nothing. Neither does a record of
    a dead launcher whose successor is the parent: the attempt was started again by hand.
    """
    try:
        record = json.loads((attempt_dir / "pids" / _launcher_record()).read_text())
        pid, start_time = int(record["pid"]), int(record["start_time"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return False
    if _start_time(pid) == start_time:
        return False
    parent_start_time = _start_time(os.getppid())
    return parent_start_time is None or parent_start_time <= start_time


R = TypeVar("R", bound=Value)


def run_request(
    arguments: Sequence[str], request_type: type[R], work: Callable[[R], Value], *, clean: Callable[[str], str] = str
) -> int:
    """Writes `work(request)` to the second file of `arguments`; returns the exit code.

    `clean` makes a message that quotes foreign files safe for a terminal.
    """
    if len(arguments) != 2:
        sys.stderr.write("give two files: REQUEST.json RESULT.json\n")
        return ExitCode.INPUT
    request_path, result_path = map(Path, arguments)
    try:
        request = codec.read(request_path, request_type)
        try:
            result = work(request)
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            raise EnvironmentFaultError(f"{place}{error.strerror or error}") from error
        codec.write(result_path, result)
    except ShardwiseError as error:
        message = clean(str(error)) + "\n"
        sys.stderr.write(message)
        if result_path.parent.is_dir():
            result_path.with_suffix(".error").write_text(message)
        return error.exit_code
    return ExitCode.DONE


def run_request_and_exit(request_type: type[R], work: Callable[[R], Value]) -> None:
    """`run_request` for the arguments of this process, which ends with its parent."""
    end_with_parent()
    sys.exit(run_request(sys.argv[1:], request_type, work))


def report_progress(line: str) -> None:
    """Sends a line of progress to the parent process."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
