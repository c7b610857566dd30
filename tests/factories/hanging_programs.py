"""Programs that hang in a test: they are ended by a short limit, and that they are gone is waited for."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

LIMITS_S = (0.5, 5.0, 60.0)
Answer = TypeVar("Answer")


def under_a_limit(run: Callable[[float], Answer], has_begun: Callable[[Answer], bool]) -> tuple[Answer, float]:
    """The answer of `run(limit_s)` and the limit: the shortest one within which the program had begun."""
    for limit_s in LIMITS_S:
        answer = run(limit_s)
        if has_begun(answer):
            return answer, limit_s
    raise AssertionError(f"the program did not begin within {LIMITS_S[-1]:g} s: {answer}")


def pids_in(path: Path) -> list[int]:
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} is still there"
            time.sleep(0.01)
