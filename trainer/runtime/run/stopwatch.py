"""Times one piece of work on a device: the fastest of several repetitions, the first of which is not counted."""

import time
from collections.abc import Callable

import torch

MIN_REPETITIONS = 3


def best_seconds(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Seconds of the fastest repetition; at least three, then as many as the time allows."""
    work()  # loads kernels and touches pages
    wait_for(device)
    best, ends, repetitions = float("inf"), time.perf_counter() + budget_s, 0
    while repetitions < MIN_REPETITIONS or time.perf_counter() < ends:
        started = time.perf_counter()
        work()
        wait_for(device)
        best = min(best, time.perf_counter() - started)
        repetitions += 1
    return best


def wait_for(device: torch.device) -> None:
    """Returns when everything that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
