"""Runs processes that measure, with an end: what has not finished by then is killed, with everything it started.

They run in processes of their own since the figures need torch, which this package never imports, and since a GPU in a
bad state may hold whoever asks it for ever. A process that cannot even be killed is left behind.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.probe.gpu_selection import visible_devices
from trainer.spec.hardware import Gpu

_POLL_S = 0.05
_GRACE_S = 2.0
_REAPING_S = 5.0


def run_modules(
    module: str,
    argument_lists: Sequence[Sequence[str]],
    *,
    environment: Mapping[str, str],
    folder: Path,
    timeout_s: float,
) -> tuple[bool, str]:
    """Runs `python -m module` with each list of arguments, all at once; whether they ended in time, and what failed.

    The failure is the last line that one of them wrote to its error stream; empty where none failed.
    """
    errors = [folder / f"stderr-{number}" for number in range(len(argument_lists))]
    processes = [
        _start([sys.executable, "-m", module, *arguments], environment, error)
        for arguments, error in zip(argument_lists, errors, strict=True)
    ]
    try:
        has_ended = _wait(processes, timeout_s)
        failures = [
            _failure(process.returncode, error)
            for process, error in zip(processes, errors, strict=True)
            if process.returncode
        ]
    finally:
        for process in processes:
            _end(process)
    return has_ended, failures[-1] if failures else ""


def measuring_environment(gpus: Sequence[Gpu], *, num_threads: int | None = None, **more: str) -> dict[str, str]:
    """This process's environment, with exactly these GPUs in it."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", **more}
    environment["CUDA_VISIBLE_DEVICES"] = visible_devices(gpus)
    if num_threads:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    return environment


def _start(argv: Sequence[str], environment: Mapping[str, str], error: Path) -> subprocess.Popen[bytes]:
    with error.open("wb") as stream:
        return subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stream,
            start_new_session=True,  # so that what it starts can be ended with it
        )


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Whether all ended by themselves; the others of one that failed are not waited for, since they wait for it."""
    ends = time.monotonic() + timeout_s
    while None in (codes := [process.poll() for process in processes]):
        has_failed = any(codes)
        if has_failed:
            ends = min(ends, time.monotonic() + _GRACE_S)
        if time.monotonic() > ends:
            return has_failed
        time.sleep(_POLL_S)
    return True


def _failure(code: int, error: Path) -> str:
    lines = error.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it ended with code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAPING_S)
