"""Torch in another process: `ask` is the one way to run it.

`launch` never imports torch, nor any library that does. `ask` starts `python -m MODULE request.json result.json`; on
the other side `trainer.runtime.run.process` reads the request and writes the result. Lines on the worker's stdout are
progress. A `ShardwiseError` of the worker is raised here again, by its exit code.

`run` starts a program that has arguments instead of a request, and no result. `run_together` starts several workers
that need each other, such as the ranks of a measurement.

A worker has a session of its own: Ctrl-C reaches this process alone, which then ends the worker and all its children.
If this process is killed, the kernel sends TERM to the worker, from its first moment on (`ending_with_this_process`).
"""

import contextlib
import ctypes
import importlib.util
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, AnyStr, TypeVar

from shardwise.trainer import FOLDER
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError, NothingFitsError, ShardwiseError
from shardwise.trainer.spec.packages import extra_line
from shardwise.trainer.spec.value import Value

V = TypeVar("V", bound=Value)
QUIET = MappingProxyType(
    {
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",  # stderr holds the error and nothing else
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }
)
REQUEST_NAME, RESULT_NAME, ERROR_NAME = "request.json", "result.json", "result.error"
_NOTHING: Mapping[str, str] = MappingProxyType({})
_ERRORS: dict[int, type[ShardwiseError]] = {
    each.exit_code: each for each in (InputError, NothingFitsError, EnvironmentFaultError)
}
_NUM_LINES = 3  # of stderr, in an error
# The ends of an interpreter that may not allocate: of Python, of the loader of shared libraries, of the kernel.
_NO_MEMORY = ("MemoryError", "failed to map segment from shared object", "annot allocate memory")
_POLL_S = 0.1
_GRACE_S = 2.0  # for the others, after one of several has failed
REAPING_S = 5.0


class WorkerTimeoutError(EnvironmentFaultError):
    """The worker returned no result in time and was killed."""


def ask(
    module: str,
    request: Value | None,
    result_type: type[V],
    *,
    subject: str,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] = _NOTHING,
    inherited: Mapping[str, str] = os.environ,
    on_line: Callable[[str], None] = lambda _: None,
    timeout_s: float | None = None,
    grace_s: float = 0.0,
    memory_hint: str = "",
    python: str = sys.executable,
) -> V:
    """The worker's result; raises the ShardwiseError that it ended with.

    `subject` names the work in messages, and `memory_hint` the memory that it needs. On Ctrl-C and at the end of its
    time the worker gets SIGTERM, and SIGKILL after `grace_s` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-worker-") as name:
        folder = Path(name)
        arguments = [*flags, str(folder / REQUEST_NAME), str(folder / RESULT_NAME)]
        codec.write_bytes(folder / REQUEST_NAME, b"" if request is None else codec.encode(request))
        with (folder / "stderr").open("wb") as errors:
            process = _start(
                [python, "-m", module, *arguments], {**inherited, **QUIET, **environment}, subprocess.PIPE, errors
            )
            try:
                has_ended = _pass_on_lines(process, on_line, timeout_s)
            finally:
                end(process, grace_s)
        if not has_ended:
            raise WorkerTimeoutError(f"{subject} took longer than {timeout_s:g} s")
        if process.returncode:
            raise _error_of(process.returncode, folder, subject, memory_hint)
        return codec.read(folder / RESULT_NAME, result_type)


def run(
    module: str,
    *arguments: str,
    output: IO[bytes] | int,
    errors: IO[bytes],
    environment: Mapping[str, str],
    should_stop: Callable[[], bool] = lambda: False,
    on_poll: Callable[[], None] = lambda: None,
    python: str = sys.executable,
) -> int | None:
    """Exit code of `python -m MODULE ARGUMENTS`; None if `should_stop` returned true and the program was killed."""
    process = _start([python, "-m", module, *arguments], environment, output, errors)
    try:
        while process.poll() is None and not should_stop():
            on_poll()
            time.sleep(_POLL_S)
        return process.returncode
    finally:
        end(process)


def run_together(
    module: str,
    argument_lists: Sequence[Sequence[str]],
    *,
    environment: Mapping[str, str],
    folder: Path,
    timeout_s: float,
) -> tuple[bool, str]:
    """Runs `python -m MODULE` once for each list of arguments, all at the same time.

    Returns whether all ended in time, and the last line that a failed one wrote to stderr (empty if none failed). The
    others of one that failed are not waited for, since they may wait for it. All are killed at the end.
    """
    logs = [folder / f"stderr-{number}" for number in range(len(argument_lists))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for arguments, log in zip(argument_lists, logs, strict=True):
            with log.open("wb") as errors:
                argv = [sys.executable, "-m", module, *arguments]
                processes.append(_start(argv, environment, subprocess.DEVNULL, errors))
        has_ended = _wait_for_all(processes, timeout_s)
        failures = [
            (_last_lines(log.read_text(errors="replace")) or [f"it ended with code {process.returncode}"])[-1]
            for process, log in zip(processes, logs, strict=True)
            if process.returncode
        ]
    finally:
        for process in processes:
            end(process)
    return has_ended, failures[-1] if failures else ""


def python_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a Python that need not have our packages installed: they are found first."""
    return {**environment, **import_settings(environment), "PYTHONWARNINGS": "ignore"}


def import_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables with which this installation is imported first, in any working directory."""
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": with_first(FOLDER.parent, environment.get("PYTHONPATH", ""))}


def with_first(folder: Path, path: str) -> str:
    """`path` with `folder` before its entries; an empty entry, which means the working directory, is dropped."""
    return os.pathsep.join([str(folder), *(entry for entry in path.split(os.pathsep) if entry)])


def _start(
    argv: Sequence[str], environment: Mapping[str, str], output: IO[bytes] | int, errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv,
            env={**environment, "PYTHONSAFEPATH": "1"},  # a user's trainer.py must not shadow ours
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            preexec_fn=ending_with_this_process(signal.SIGTERM),
        )
    except OSError as error:
        raise EnvironmentFaultError(f"{argv[0]}: cannot be started: {error.strerror}") from error


_PR_SET_PDEATHSIG = 1


def ending_with_this_process(number: signal.Signals, *, ignored: Sequence[signal.Signals] = ()) -> Callable[[], None]:
    """The `preexec_fn` of a process to which the kernel sends `number` when the thread that starts it ends.

    The setting survives `exec`, so there is no moment at which a kill of this process leaves the other one running.
    """
    parent, libc = os.getpid(), ctypes.CDLL(None, use_errno=True)

    def prepare_child() -> None:
        for each in ignored:
            signal.signal(each, signal.SIG_IGN)
        libc.prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)

    return prepare_child


def _pass_on_lines(process: subprocess.Popen[bytes], on_line: Callable[[str], None], timeout_s: float | None) -> bool:
    """Passes on the lines of stdout until it is closed; true if the process ended in time."""
    assert process.stdout is not None
    ends = None if timeout_s is None else time.monotonic() + timeout_s
    rest, poll = b"", select.poll()
    with process.stdout as stdout:
        poll.register(stdout, select.POLLIN)
        while ends is None or time.monotonic() < ends:
            if not poll.poll(None if ends is None else max(0.0, ends - time.monotonic()) * 1000):
                continue
            content = os.read(stdout.fileno(), 65536)
            *lines, rest = (rest + content).split(b"\n")
            for line in [*lines, rest] if rest and not content else lines:
                on_line(line.decode("utf-8", "replace").rstrip("\r"))
            if not content:
                break
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(None if ends is None else max(0.0, ends - time.monotonic()))
    return process.returncode is not None


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    ends = time.monotonic() + timeout_s
    while None in (codes := [process.poll() for process in processes]):
        has_failed = any(codes)
        if has_failed:
            ends = min(ends, time.monotonic() + _GRACE_S)
        if time.monotonic() > ends:
            return has_failed
        time.sleep(_POLL_S)
    return True


def end(process: subprocess.Popen[AnyStr], grace_s: float = 0.0) -> None:
    """Kills a process that leads a session, and its children, after `grace_s` seconds to end by itself.

    One that is stuck in the kernel remains.
    """
    if process.poll() is None and grace_s:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAPING_S)


def _error_of(exit_code: int, folder: Path, subject: str, memory_hint: str) -> ShardwiseError:
    """The error that the worker wrote, or the end of its stderr for one that could not write any."""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = f":\n{memory_hint}" if memory_hint else ""
        return EnvironmentFaultError(
            f"{subject} was ended by {name}; SIGKILL often means that host memory ran out{hint}"
        )
    written = folder / ERROR_NAME
    lines = _last_lines((folder / "stderr").read_text(errors="replace")) or ["no message"]
    message = written.read_text().strip() if written.is_file() else "\n".join(lines)
    if lines[-1].startswith("ModuleNotFoundError") and importlib.util.find_spec("torch") is None:
        return EnvironmentFaultError(f"{subject} needs torch, which is not installed here:\n{extra_line('train')}")
    if any(sign in lines[-1] for sign in _NO_MEMORY):
        hint = f":\n{memory_hint}" if memory_hint else "; see free -h and ulimit -v"
        return EnvironmentFaultError(f"{subject} could not allocate host memory{hint}")
    kind = _ERRORS.get(exit_code)
    return ShardwiseError(f"{subject} failed: {lines[-1]}") if kind is None else kind(message)


def _last_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()][-_NUM_LINES:]
