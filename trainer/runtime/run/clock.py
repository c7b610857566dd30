"""Time and counters of a rank: phases of a step, repeated work, the GPU through NVML, memory and disk traffic.

Phases of a step: data, forward, backward, optimizer. A GPU works behind Python, so its seconds are those between two
events on the stream; what it allocates follows Python, so a phase's memory is that of its lines. A CPU's allocator
counts nothing; there the profiled step gives memory by phase (memory_profile), from the moments recorded here.

A query of NVML lasts a fraction of a millisecond at best and tens of milliseconds at worst. So a thread queries it once
a second, and a step reads the newest sample. Only the card of this process is queried, found by its UUID, as
CUDA_VISIBLE_DEVICES renumbers cards. Without NVML, without a card, or on a slice (MIG) without counters of its own,
there are no figures.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardwise.trainer.spec.value import Value


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
        self._on_phase = on_phase  # called with each phase when it begins
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
            begin_bytes, _ = _allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
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


class CoreQueue:
    """Time since its creation in which threads of this process waited for a core, by the kernel's scheduler."""

    def __init__(self) -> None:
        self._begin_s, self._begin = time.perf_counter(), _scheduled_s()

    @property
    def share(self) -> float | None:
        """Of the time, or of that of all threads that could run if it is longer; None if the kernel does not count."""
        now = _scheduled_s()
        if now is None or self._begin is None:
            return None
        ran_s, queued_s = (max(0.0, after - before) for after, before in zip(now, self._begin, strict=True))
        return queued_s / max(time.perf_counter() - self._begin_s, ran_s + queued_s)


def _scheduled_s() -> tuple[float, float] | None:
    """Seconds in which the threads that live ran on a core, and waited for one (proc(5), schedstat)."""
    ran_ns = queued_ns = 0
    with suppress(OSError, ValueError):
        for path in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
                ran, queued, _ = (path / "schedstat").read_text().split()
                ran_ns, queued_ns = ran_ns + int(ran), queued_ns + int(queued)
    return (ran_ns / 1e9, queued_ns / 1e9) if ran_ns else None


def _allocated(device: torch.device) -> tuple[int, int]:
    """Bytes allocated now, and at most since the peak was counted anew."""
    counted = torch.cuda.memory.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    return counted["current"], counted["peak"]


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


QUEUED = 10  # repetitions of a queue


def queued_seconds(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Seconds of one of QUEUED repetitions, started one after another and waited for once; the best of some queues.

    As in a run: the host works ahead of the device, and its time counts where it is the longer.
    """
    work()  # compiles, loads kernels and touches pages
    wait_for(device)
    best, ends, queues = float("inf"), time.perf_counter() + budget_s, 0
    while queues < MIN_REPETITIONS or time.perf_counter() < ends:
        best = min(best, _queue_seconds(work, device))
        queues += 1
    return best / QUEUED


def _queue_seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(QUEUED):
            work()
        return time.perf_counter() - started
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(QUEUED):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def wait_for(device: torch.device) -> None:
    """Returns when all work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


SAMPLED_EVERY_S = 1.0
# Old drivers have the last alone.
_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
_THROTTLES = {  # NVML's reasons for lower clocks that a person can do something about
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "temperature",
    0x0000000000000040: "hardware temperature",
    0x0000000000000080: "power brake",
}


class CardSample(Value, frozen=True, kw_only=True):
    """One sample of NVML; None for a counter that the card does not report."""

    utilization: float | None = None  # share of the last sampling period in which a kernel ran
    power_w: float | None = None
    temperature_c: int | None = None
    throttle: str | None = None  # why clocks are held down; None: they are not, or it is not known
    used_bytes: int | None = None  # of the whole card, other processes included


class CardWatch:
    """Queries NVML about one card, in a thread of its own, while the block of `watching` runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.newest = CardSample()  # the last sample; empty before the first
        self._stop = threading.Event()

    @contextmanager
    def watching(self) -> Iterator["CardWatch"]:
        """Samples while the block runs; of a CPU, nothing."""
        if self._device.type != "cuda":
            yield self
            return
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        thread = threading.Thread(target=self._sample, args=(uuid,), name="nvml", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()  # it is not waited for: a driver that hangs must not delay the end of a run

    def _sample(self, uuid: str) -> None:
        with suppress(Exception):  # of NVML or its binding: the run continues without figures of the card
            for sample in card_samples(uuid, self._stop):
                self.newest = sample


def card_samples(uuid: str, stop: threading.Event, *, every_s: float = SAMPLED_EVERY_S) -> Iterator[CardSample]:
    """Samples of a card from NVML until `stop` is set; raises the errors of its binding."""
    import pynvml

    pynvml.nvmlInit()
    try:
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(name.encode())
        while not stop.is_set():
            yield _sample_of(pynvml, handle)
            stop.wait(every_s)
    finally:
        pynvml.nvmlShutdown()


def _sample_of(nvml: Any, handle: Any) -> CardSample:  # noqa: ANN401  # NVML's binding is untyped
    def query(name: str, *more: object) -> Any:  # noqa: ANN401  # as above
        try:
            return getattr(nvml, name)(handle, *more)
        except nvml.NVMLError:  # this card, or this driver, has no such counter
            return None

    utilization = query("nvmlDeviceGetUtilizationRates")
    power, memory = query("nvmlDeviceGetPowerUsage"), query("nvmlDeviceGetMemoryInfo")
    return CardSample(
        utilization=None if utilization is None else utilization.gpu / 100,
        power_w=None if power is None else power / 1000,
        temperature_c=query("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        throttle=throttle_reasons(next((bits for bits in map(query, _REASONS) if bits is not None), None)),
        used_bytes=None if memory is None else memory.used,
    )


def throttle_reasons(reasons: int | None) -> str | None:
    """Why clocks are held down, from NVML's bits; None if nothing holds them, or it is unknown."""
    return ", ".join(name for bit, name in _THROTTLES.items() if (reasons or 0) & bit) or None


class Traffic:
    """Bytes that this process has had the disks read and write since the last look."""

    def __init__(self) -> None:
        self._last = _disk_bytes()

    def since_last(self) -> tuple[int, int] | None:
        """(read, written); None if the kernel does not report them."""
        now, before = _disk_bytes(), self._last
        self._last = now
        if now is None or before is None:
            return None
        return now[0] - before[0], now[1] - before[1]


def _disk_bytes() -> tuple[int, int] | None:
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def pinned_bytes() -> int | None:
    """Host memory that torch holds pinned; None without CUDA."""
    if not torch.cuda.is_initialized():
        return None
    counted = torch.cuda.host_memory_stats_as_nested_dict()
    return int(counted["allocated_bytes"]["current"]) if "allocated_bytes" in counted else None
