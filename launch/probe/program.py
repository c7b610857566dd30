"""Programs and calls with a time limit. A program that exceeds it is killed, with everything it started.

Calls run in threads of their own, so that one that hangs costs no result but its own. (On a network mount whose server
is down, no signal ends a call.)
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from shardwise.trainer.spec.value import Value

T = TypeVar("T")


class ProgramResult(Value, frozen=True, kw_only=True):
    """Output of a program; `exit_code` is None if it exceeded its time and was killed, or could not be started."""

    output: str = ""
    errors: str = ""
    exit_code: int | None = None
    obstacle: str | None = None  # the reason, if it could not be started

    @property
    def printed(self) -> str:
        """Output and errors."""
        return self.output + self.errors

    @property
    def last_line(self) -> str:
        """The last line of its error stream, else of its output."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return lines[-1] if lines else "it printed nothing"


def run_program(argv: Sequence[str], *, environment: Mapping[str, str], timeout_s: float) -> ProgramResult:
    """Runs a program in a session of its own."""
    import subprocess  # a probe of a machine without a card starts no program

    try:
        process = subprocess.Popen(
            argv,
            env={**environment, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return ProgramResult(obstacle=f"{argv[0]}: {error.strerror}")
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        from shardwise.launch.worker import end

        end(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=0.1)  # closes the pipes
        return ProgramResult()
    return ProgramResult(output=output, errors=errors, exit_code=process.returncode)


class BackgroundCall(Generic[T]):
    """A call in a thread that the caller need not wait for."""

    def __init__(self, call: Callable[[], T]) -> None:
        import threading  # as above

        self._call = call
        self._result: list[T] = []
        self._error: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, until_s: float) -> T | None:
        """Its result by this time of the monotonic clock, or None; raises the error of the call."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self._error:
            raise self._error[0]
        return self._result[0] if self._result else None

    def _run(self) -> None:
        try:
            self._result.append(self._call())
        except BaseException as error:  # noqa: BLE001  # the caller raises it
            self._error.append(error)
