"""Fetches the kernel of the hub that a plan's attention runs, once and before any rank starts.

Which of its builds fits is for torch to say, so it is loaded in a process of its own
(`trainer.runtime.attention.flash_kernel`): from the cache, and from the hub where the cache has it not and
HF_HUB_OFFLINE is not set. The ranks are started with HF_HUB_OFFLINE set (`launch.engine.command`), so that none of them
fetches anything.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from launch.inputs.hub_files import hub_cache, is_offline
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.plan import Plan

OFFLINE = {"HF_HUB_OFFLINE": "1"}
_POLL_S = 0.1


def fetch_flash_kernel(
    plan: Plan,
    *,
    on_progress: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
    python: str = sys.executable,
) -> None:
    """Has the kernel of the plan in the cache, loaded once on this machine; nothing where the plan takes none.

    EnvironmentFaultError, with the next step, where it cannot be had. Ends early once `should_stop` says so.
    """
    kernel = kernel_of(plan)
    problem = None if kernel is None else load_kernel(kernel, on_progress, should_stop, python)
    if problem is not None:
        raise EnvironmentFaultError(problem)


def kernel_of(plan: Plan) -> str | None:
    """The kernel that the plan, or one of its fallbacks, runs."""
    return next((each.flash_kernel for each in (plan.chosen, *plan.fallbacks) if each.flash_kernel), None)


def load_kernel(
    kernel: str,
    on_progress: Callable[[str], None],
    should_stop: Callable[[], bool] = lambda: False,
    python: str = sys.executable,
) -> str | None:
    """Fetches a kernel where the cache has it not, and loads it once; why it cannot be loaded, in words."""
    problem = _load(kernel, python, OFFLINE, should_stop)
    if problem is not None and not is_offline() and not should_stop():
        on_progress(f"fetching {kernel}, once for this machine")
        problem = _load(kernel, python, {}, should_stop)
    return problem


def has_kernel(kernel: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the cache has a build of the kernel; whether it fits this machine is for torch to say."""
    named = environment.get("HF_KERNELS_CACHE") or environment.get("KERNELS_CACHE")
    cache = Path(named).expanduser() if named else hub_cache(None, environment)
    repository, _, commit = kernel.partition("@")
    builds = cache / f"kernels--{repository.replace('/', '--')}" / "snapshots" / commit / "build"
    return builds.is_dir() and any(builds.iterdir())


def _load(kernel: str, python: str, settings: dict[str, str], should_stop: Callable[[], bool]) -> str | None:
    """What the process has to say where it failed; None where it loaded the kernel or was stopped."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        code = _run([python, "-m", "trainer.runtime.attention.flash_kernel", kernel], settings, errors, should_stop)
        if not code:
            return None
        errors.seek(0)
        lines = [line for line in errors.read().splitlines() if line.strip()]
    starts = [
        number for number, line in enumerate(lines) if line.startswith("attention: ")
    ]  # libraries speak before it
    if starts:
        return "\n".join(lines[starts[-1] :])
    return "\n".join([f"attention: loading {kernel} ended with code {code}", *lines[-2:]])


def _run(argv: list[str], settings: dict[str, str], errors: IO[str], should_stop: Callable[[], bool]) -> int | None:
    """Its exit code; None where it was stopped."""
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
    process = subprocess.Popen(
        argv,
        env=environment | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,  # Ctrl-C reaches us alone, and we end it
    )
    try:
        while process.poll() is None and not should_stop():
            time.sleep(_POLL_S)
        return process.returncode
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
