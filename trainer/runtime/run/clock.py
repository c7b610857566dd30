"""What each phase of a step takes: seconds, and on a GPU the most that torch had allocated meanwhile.

Phases: data, forward, backward, optimizer. A GPU works behind Python, so its seconds are those between two events on
the stream; what it allocates follows Python, so a phase's memory is that of its lines. A CPU's allocator counts
nothing; there the profiled step tells memory by phase (memory_profile), from the moments noted here.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Span(NamedTuple):
    """One phase of a step, in nanoseconds since the epoch, with allocated bytes of a GPU."""

    phase: str
    begin_ns: int
    end_ns: int
    begin_bytes: int | None = None
    peak_bytes: int | None = None
    end_bytes: int | None = None


class Clock:
    """Of one step."""

    def __init__(self, device: torch.device, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._on_phase = on_phase  # told of each phase when it begins
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.spans: list[Span] = []
        self.peaks: dict[str, int] = {}  # the most that was allocated in each phase; empty on a CPU

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Adds the time of the block to `phase`."""
        self._on_phase(phase)
        begin_ns = time.time_ns()
        if self._is_cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin_bytes = self._begin_peak()
            begin.record()
            yield
            end.record()
            self._events.append((phase, begin, end))
            end_bytes, peak_bytes = _allocated(self._device)
            self.peaks[phase] = max(self.peaks.get(phase, 0), peak_bytes)
            self.spans.append(Span(phase, begin_ns, time.time_ns(), begin_bytes, peak_bytes, end_bytes))
        else:
            start = time.perf_counter()
            yield
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start
            self.spans.append(Span(phase, begin_ns, time.time_ns()))

    def seconds(self, phase: str) -> float:
        """Seconds of a phase so far; waits for the device."""
        for name, begin, end in self._events:
            end.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000
        self._events.clear()
        return self._seconds.get(phase, 0.0)

    @property
    def highest_bytes(self) -> int | None:
        """The most that was allocated in any phase; None on a CPU."""
        return max(self.peaks.values(), default=None)

    def _begin_peak(self) -> int:
        """Has the peak counted anew from here; the bytes that are allocated."""
        held, _ = _allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return held


def _allocated(device: torch.device) -> tuple[int, int]:
    """Bytes allocated now, and at most since the peak was counted anew."""
    counted = torch.cuda.memory.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return counted["current"], counted["peak"]
