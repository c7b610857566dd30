"""Time of a GPU by kind of kernel, and its idle time, in a sample of steps under torch's profiler.

Two steps of rank 0 are sampled early in a run, each in a recording of its own, after one whose recording is discarded:
the first loads CUPTI. Only the device's activities are recorded, no operators and no shapes. CUPTI adds some
microseconds to the launch of a kernel, so a step that is limited by the host shows slightly more idle time than the
others; sampled steps do not count for the measured speed. Time between steps is not included.

The device is idle while no stream runs a kernel or a copy. A kernel of a collective that waits for other ranks runs.
"""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.profiler
from torch._C._autograd import DeviceType  # torch.autograd has it under no public name
from torch.profiler import ProfilerActivity

from shardwise.trainer.spec.report import DeviceTime

NUM_SAMPLED = 2  # after one that warms up
LEAST_STEPS = 8  # from the sample on: of fewer, too few would be left to measure the speed
LEAST_FREE_BYTES = 256 << 20  # of the card: CUPTI allocates its buffers there, outside torch's allocator

Interval = tuple[int, int]  # begin and end in nanoseconds since the epoch

# By the names of kernels, the first pattern that is found: cuBLAS, CUTLASS, cuDNN, NCCL, torch, Triton, bitsandbytes.
_KINDS = (
    ("copies", r"^Memcpy|^Memset"),
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter"),
    ("attention", r"flash|fmha|attention|sdpa|flex_"),
    ("optimizer", r"multi_tensor_apply|adam|lion|optimizer|lamb"),
    ("matrix products", r"gemm|gemv|nvjet|cutlass|xmma|wgmma|s?16816|splitk|cublas|_mm(_|$)|matmul|bmm|dot_kernel"),
    (
        "elementwise",
        r"elementwise|triton_|reduce|norm|softmax|index|gather|scatter|cat|copy|rope|swiglu|silu|embedding",
    ),
)
OTHER = "other kernels"


class Kernel(NamedTuple):
    """A kernel or a copy that ran on the device."""

    name: str
    begin_ns: int
    end_ns: int


def kind_of(name: str) -> str:
    """The kind of a kernel by its name."""
    found = (kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE))
    return next(found, OTHER)


def busy_ns(intervals: Iterable[Interval], window: Interval) -> int:
    """Nanoseconds of `window` that at least one of the intervals covers; they may overlap and come in any order."""
    busy, (covered, end) = 0, window
    for first, last in sorted(intervals):
        first, last = max(first, covered), min(last, end)
        if last > first:
            busy, covered = busy + last - first, last
    return busy


def idle_share(intervals: Sequence[Interval], windows: Sequence[Interval]) -> float | None:
    """Share of the windows in which no interval lies; None if they are empty."""
    whole = sum(max(0, end - begin) for begin, end in windows)
    return 1 - sum(busy_ns(intervals, window) for window in windows) / whole if whole else None


def device_time(kernels: Sequence[Kernel], windows: Sequence[Interval]) -> DeviceTime | None:
    """The summary of sampled steps, of which `windows` are the time; None if no kernel was recorded in them."""
    by_kind: dict[str, list[Interval]] = defaultdict(list)
    for kernel in kernels:
        by_kind[kind_of(kernel.name)].append((kernel.begin_ns, kernel.end_ns))
    idle = idle_share(list(chain.from_iterable(by_kind.values())), windows)
    if idle is None or idle == 1:
        return None
    whole = sum(end - begin for begin, end in windows)
    shares = {
        kind: sum(busy_ns(intervals, window) for window in windows) / whole for kind, intervals in by_kind.items()
    }
    kinds = dict(sorted(shares.items(), key=lambda share: -share[1]))
    return DeviceTime(num_steps=len(windows), idle_share=idle, kinds=kinds)


def sampled_steps(*, after: int, num_steps: int) -> range:
    """The steps of a sample that begins after a step of a run; empty if the run is too short."""
    return range(after + 1, after + 2 + NUM_SAMPLED) if num_steps - after >= LEAST_STEPS else range(0)


class DeviceSample:
    """The sample of a run, which one rank records; the time of these steps counts on no rank."""

    def __init__(self, device: torch.device, steps: range, *, is_recording: bool) -> None:
        self._device, self._steps, self._is_recording = device, steps, is_recording
        self._running: Any = None  # torch.profiler.profile, whose results are untyped
        self._begin_ns = 0
        self._kernels: list[Kernel] = []
        self._windows: list[Interval] = []

    def includes(self, step: int) -> bool:
        """True for a step that is sampled, and for the one before, whose recording is discarded."""
        return step in self._steps

    def begin(self, step: int) -> None:
        """Starts to record, if the step is sampled and the profiler has what it needs."""
        if not (self._is_recording and self.includes(step)):
            return
        has_room = torch.cuda.mem_get_info(self._device)[0] >= LEAST_FREE_BYTES
        if ProfilerActivity.CUDA not in torch.profiler.supported_activities() or not has_room:
            self._is_recording = False
            return
        recording = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
        with suppress(RuntimeError):  # another profiler is active: the run continues without a sample
            recording.start()
            self._running, self._begin_ns = recording, time.time_ns()

    def end(self, step: int) -> DeviceTime | None:
        """Ends the recording of a step whose work is done; the summary after the last, if kernels were recorded."""
        if self._running is None:
            return None
        window, recording, self._running = (self._begin_ns, time.time_ns()), self._running, None
        with suppress(RuntimeError):  # of CUPTI: the run continues without this step
            recording.stop()
            if step > self._steps[0]:
                self._kernels += _kernels_of(recording)
                self._windows.append(window)
        return device_time(self._kernels, self._windows) if step == self._steps[-1] else None


def _kernels_of(profiler: Any) -> list[Kernel]:  # noqa: ANN401  # torch.profiler.profile, whose results are untyped
    """Kernels and copies; ranges that a program names span several and the gaps between them."""
    return [
        Kernel(event.name(), event.start_ns(), event.end_ns())
        for event in profiler.profiler.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]
