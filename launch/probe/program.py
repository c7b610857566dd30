"""Runs a program for `doctor`, with an end: what has not answered by then is killed, with everything it started.

And runs checks beside each other, so that one that hangs (a network mount that is gone holds whoever looks at it, and
no signal ends that) costs its own answer and nobody else's.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from trainer.spec.value import Value

T = TypeVar("T")
_REAPING_S = 1.0
_PACKAGES = Path(__file__).resolve().parent.parent


class Answer(Value, frozen=True, kw_only=True):
    """What a program said; `exit_code` None: it was killed for taking too long, or could not be started."""

    output: str = ""
    errors: str = ""
    exit_code: int | None = None
    obstacle: str | None = None  # why it could not be started

    @property
    def last_words(self) -> str:
        """The last line of its error stream, else of its output."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def python_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment that our processes get: our packages first, nothing of the working directory."""
    inherited = environment.get("PYTHONPATH")
    packages = f"{_PACKAGES}{os.pathsep}{inherited}" if inherited else str(_PACKAGES)
    return {**environment, "PYTHONSAFEPATH": "1", "PYTHONPATH": packages, "PYTHONWARNINGS": "ignore"}


def ask(
    argv: Sequence[str], *, environment: Mapping[str, str], timeout_s: float, standard_input: str | None = None
) -> Answer:
    """Runs a program in a session of its own."""
    try:
        process = subprocess.Popen(
            argv,
            env={**environment, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL if standard_input is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Answer(obstacle=f"{argv[0]}: {error.strerror}")
    try:
        output, errors = process.communicate(standard_input, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it is left behind
            process.communicate(timeout=_REAPING_S)
        return Answer()
    return Answer(output=output, errors=errors, exit_code=process.returncode)


class Beside(Generic[T]):
    """A call in a thread that nobody has to wait for."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._result: list[T] = []
        self._error: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, until_s: float) -> T | None:
        """What it answered by this moment of the monotonic clock, None where it did not; raises what it raised."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self._error:
            raise self._error[0]
        return self._result[0] if self._result else None

    def _run(self) -> None:
        try:
            self._result.append(self._call())
        except BaseException as error:  # noqa: BLE001  # whatever it is, the caller raises it
            self._error.append(error)
