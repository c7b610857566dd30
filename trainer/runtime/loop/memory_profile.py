"""Memory of a rank: live bytes between steps, the peak within one by part and over time, and its state out of memory.

On a GPU torch's own counters are read. A CPU has none, so one steady step runs under torch.profiler with memory events:
live bytes are what the model, the optimizer and the engine hold when the step begins, plus the running sum of
allocations and frees; the peak is its maximum. Interpreter, libraries and allocator slack are not included; anonymous
resident memory, which includes them, is reported separately as `host`.

Parts at the peak: weights and optimizer state are what their tensors hold; gradients are what had been accumulated by
then (each parameter records the moment); activations are the rest: saved for the backward, temporaries, engine buffers.

The timeline of a CPU is the running sum of the profiler's memory events. A GPU's counters record no moments, so a phase
has three points: what was held when it began, its peak, put in its middle, and what was held at its end.

When memory runs out, only the GPU's counters include tensors that autograd alone holds; on a CPU, the report lists
tensors that Python holds. Reading that state never prevents the report: a figure that cannot be read is omitted.
"""

import errno
import gc
import resource
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch._C._autograd import DeviceType  # torch.autograd has it under no public name
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.memory.host_embedding import tensors_on_host
from shardwise.trainer.runtime.optimizers import projectors, unwrapped
from shardwise.trainer.runtime.run.clock import Clock, Span
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.rank_files import MemoryState, memory_state_path, read_heartbeat
from shardwise.trainer.spec.report import MemoryFigures, MemoryPoint
from shardwise.trainer.spec.units import MIB

MAX_POINTS = 200
_NS = 1e-9


class Curve:
    """The running sum of (moment in ns, bytes allocated or freed), in order, above the bytes held before."""

    def __init__(self, events: Sequence[tuple[int, int]], held_bytes: int, spans: Sequence[Span]) -> None:
        self._held_bytes, self._spans = held_bytes, spans
        self._points = list(running_bytes(events, held_bytes, spans))

    def peaks(self) -> dict[str, int]:
        """Peak bytes of each phase; a phase without an event has the bytes held when it began."""
        found: dict[str, int] = {}
        for span in self._spans:
            inside = [num_bytes for when, num_bytes, _ in self._points if span.begin_ns <= when <= span.end_ns]
            found[span.phase] = max([found.get(span.phase, 0), self._at(span.begin_ns), *inside])
        return found

    def timeline(self) -> tuple[MemoryPoint, ...]:
        """At most MAX_POINTS points; the highest point is always among them."""
        if not self._points:
            return ()
        begin = min([self._points[0][0], *(span.begin_ns for span in self._spans)])
        width = max(1, (self._points[-1][0] - begin) // MAX_POINTS + 1)
        slots = groupby(self._points, key=lambda point: (point[0] - begin) // width)
        highest = (max(slot, key=lambda point: point[1]) for _, slot in slots)
        return tuple(
            MemoryPoint(at_s=(when - begin) * _NS, allocated_bytes=num_bytes, phase=phase)
            for when, num_bytes, phase in highest
        )

    def _at(self, moment_ns: int) -> int:
        before = [num_bytes for when, num_bytes, _ in self._points if when <= moment_ns]
        return before[-1] if before else self._held_bytes


def running_bytes(
    events: Sequence[tuple[int, int]], held_bytes: int, spans: Sequence[Span]
) -> Iterator[tuple[int, int, str]]:
    """(moment, bytes allocated from then on, phase) of events in order."""
    running, place = held_bytes, 0
    for when, num_bytes in events:
        running += num_bytes
        while place < len(spans) and spans[place].end_ns < when:
            place += 1
        is_in = place < len(spans) and spans[place].begin_ns <= when
        yield when, running, spans[place].phase if is_in else ""


def timeline_of_spans(spans: Sequence[Span]) -> tuple[MemoryPoint, ...]:
    """Of phases that know their own bytes."""
    points = []
    for span in spans:
        middle = (span.begin_ns + span.end_ns) // 2
        counted = ((span.begin_ns, span.begin_bytes), (middle, span.peak_bytes), (span.end_ns, span.end_bytes))
        points += [
            MemoryPoint(at_s=(when - spans[0].begin_ns) * _NS, allocated_bytes=num_bytes, phase=span.phase)
            for when, num_bytes in counted
            if num_bytes is not None
        ]
    return tuple(points)


CPU_OVERHEAD_BYTES = 64 * MIB  # of a capped process, in addition to its tensors: thread stacks, modules, slack
WEIGHTS, OPTIMIZER_STATE, GRADIENTS, ACTIVATIONS = "weights", "optimizer_state", "gradients", "activations"


class MemoryProfile:
    """Measures one steady step: `with profile.step(): run_step(...)`, then `figures()`."""

    def __init__(self, model: nn.Module, optimizer: Any, device: torch.device) -> None:  # noqa: ANN401  # Accelerate's wrapper
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._steady_bytes: int | None = None
        self._peak_bytes: int | None = None
        self._parts: dict[str, int] = {}
        self._peaks: dict[str, int] = {}
        self._timeline: tuple[MemoryPoint, ...] = ()

    @contextmanager
    def step(self, clock: Clock | None = None) -> Iterator[None]:
        """Measures the block, which has to be one whole optimizer step, by the phases that `clock` records."""
        clock = clock or Clock(self._device)
        num_spans = len(clock.spans)
        held = held_bytes(self._model, self._optimizer, self._device)
        arrivals: list[tuple[int, int]] = []
        with _noting_gradients(self._model, arrivals):
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
                self._steady_bytes = torch.cuda.memory_allocated(self._device)
                yield
                self._peak_bytes = max(torch.cuda.max_memory_allocated(self._device), clock.highest_bytes or 0)
                self._peaks, self._timeline = dict(clock.peaks), timeline_of_spans(clock.spans[num_spans:])
                gradients = sum(num_bytes for _, num_bytes in arrivals)
            else:
                self._steady_bytes = sum(held.values()) + _engine_buffers(self._model)
                with room_for_a_profile():
                    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                        yield
                    events = sorted(_memory_events(profiler), key=lambda event: event[0])
                    rise, peak_ns = highest_rise(events)
                self._peak_bytes = self._steady_bytes + rise
                curve = Curve(events, self._steady_bytes, clock.spans[num_spans:])
                self._peaks, self._timeline = curve.peaks(), curve.timeline()
                gradients = sum(num_bytes for moment_ns, num_bytes in arrivals if moment_ns <= peak_ns)
        self._parts = self._split(held, gradients)

    def figures(self) -> MemoryFigures:
        """The measured figures; counters that this device lacks are None."""
        is_cuda = self._device.type == "cuda"
        free, total = torch.cuda.mem_get_info(self._device) if is_cuda else (0, 0)  # other processes included
        return MemoryFigures(
            steady_allocated_bytes=self._steady_bytes,
            peak_allocated_bytes=self._peak_bytes,
            peak_reserved_bytes=torch.cuda.max_memory_reserved(self._device) if is_cuda else None,
            device_bytes=total - free if is_cuda else None,
            host_bytes=anonymous_bytes(),
            parts=self._parts,
            peaks=self._peaks,
            timeline=self._timeline,
        )

    def _split(self, held: dict[str, int], gradients: int) -> dict[str, int]:
        assert self._peak_bytes is not None
        parts = {name: held[name] for name in (WEIGHTS, OPTIMIZER_STATE)}
        # ZeRO-3 frees a parameter's gradient once its share is in the flat partition.
        is_flat = _zero3_gradients(self._model) is not None
        parts[GRADIENTS] = held[GRADIENTS] if is_flat else max(gradients, held[GRADIENTS])
        parts[ACTIVATIONS] = max(0, self._peak_bytes - sum(parts.values()))
        return parts


def held_bytes(model: nn.Module, optimizer: Any, device: torch.device) -> dict[str, int]:  # noqa: ANN401  # Accelerate's wrapper
    """Bytes held between steps by part; DDP's gradients and ZeRO-3's stay allocated, GaLore's projectors are state.

    A table of embeddings in host RAM is not held by a GPU.
    """
    shards = [p.ds_tensor for p in model.parameters() if hasattr(p, "ds_tensor")]  # ZeRO-3 stores them separately
    elsewhere = tensors_on_host(model) if device.type == "cuda" else set()
    weights = [each for each in (*model.parameters(), *model.buffers(), *shards) if each not in elsewhere]
    inner = unwrapped(optimizer)
    states = [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
    states += [matrix for state in inner.state.values() for matrix in projectors(state)]
    masters = [p for group in inner.param_groups for p in group["params"]]  # DeepSpeed's fp32 partitions; else weights
    masters += running_engine(model).masters(model)
    held_weights = storage_bytes(weights)
    return {
        WEIGHTS: held_weights,
        OPTIMIZER_STATE: storage_bytes([*weights, *masters, *states]) - held_weights,
        GRADIENTS: _held_gradients(model),
    }


def _held_gradients(model: nn.Module) -> int:
    """DDP's buckets, or the flat partition that ZeRO-3 adds its gradients up in."""
    if isinstance(model, DistributedDataParallel):
        return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    flat = _zero3_gradients(model)
    return 0 if flat is None else storage_bytes([flat])


def _zero3_gradients(model: nn.Module) -> Tensor | None:
    flat = getattr(getattr(model, "optimizer", None), "grad_partitions_flat_buffer", None)
    return flat if isinstance(flat, Tensor) else None


def _engine_buffers(model: nn.Module) -> int:
    """Bytes of the buffers in which ZeRO-3 gathers gradients before it reduces them; allocated in every step."""
    zero: Any = model.optimizer if _zero3_gradients(model) is not None else None
    buckets = getattr(zero, "ipg_buckets", {}).values()
    return storage_bytes(bucket.buffer for bucket in buckets if bucket.buffer is not None)


def highest_rise(events: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """(largest running sum, the moment it was reached) of (moment in ns, bytes allocated or freed)."""
    running, highest, moment = 0, 0, 0
    for when, num_bytes in sorted(events, key=lambda event: event[0]):
        running += num_bytes
        if running > highest:
            highest, moment = running, when
    return highest, moment


def anonymous_bytes() -> int:
    """Resident memory of this process that no file backs."""
    return status_bytes("RssAnon")


def cap_memory(kind: DeviceKind, device: torch.device, cap_bytes: int, *, outside_bytes: int) -> None:
    """Makes this device as small as `cap_bytes`: a share for the allocator, or a data limit on the process.

    The allocator gets what remains after `outside_bytes`, the context and communicators that the plan counts.
    """
    if kind is DeviceKind.CUDA:
        total = torch.cuda.get_device_properties(device).total_memory
        share = min(1.0, max(0, cap_bytes - outside_bytes) / total)
        torch.cuda.set_per_process_memory_fraction(share, device.index)  # Accelerate's device of one process has none
    else:
        limit = status_bytes("VmData") + cap_bytes + CPU_OVERHEAD_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def lift_cap() -> None:
    """Removes a data limit, so that the report can be written after the limit was reached."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


@contextmanager
def room_for_a_profile() -> Iterator[None]:
    """Lifts a data limit for a block and extends it by what the block still holds: records do not count."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY:
        yield
        return
    before = status_bytes("VmData")
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        left = max(0, status_bytes("VmData") - before)
        resource.setrlimit(resource.RLIMIT_DATA, (soft + left if hard < 0 else min(hard, soft + left), hard))


def is_out_of_memory(error: BaseException | None) -> bool:
    """True for a failed allocation on a GPU or on the CPU, and for nothing that merely mentions one.

    Also if another error was raised from it: by a user's own loss, or by a library's handling of the failure.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if _is_failed_allocation(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _is_failed_allocation(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    if "can't start new thread" in str(error):  # its stack is data: the limit was met
        return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    return any(message in str(error) for message in _ALLOCATOR_MESSAGES)


_ALLOCATOR_MESSAGES = (
    "DefaultCPUAllocator: ",
    "can't allocate memory",
    "std::bad_alloc",
    "CUDA driver error: out of memory",  # of expandable segments; its "unknown error" is no lack of memory
    "CUDA error: out of memory",  # outside the caching allocator: pinned host memory, a context, a library
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",  # NCCL's buffers
    "Cuda failure 'out of memory'",
)


def held_when_out_of_memory(measured: MemoryFigures) -> MemoryFigures:
    """The figures with the most that was held when an allocation failed: a lower bound of the need, from counters."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return replace(measured, host_bytes=anonymous_bytes())
    return replace(
        measured,
        peak_allocated_bytes=torch.cuda.max_memory_allocated(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(),
        host_bytes=anonymous_bytes(),
    )


@contextmanager
def _noting_gradients(model: nn.Module, arrivals: list[tuple[int, int]]) -> Iterator[None]:
    """Appends (moment in ns, bytes) when a parameter gets its gradient for the first time in the block."""
    seen: set[Tensor] = set()

    def note(parameter: Tensor) -> None:
        if parameter not in seen and parameter.grad is not None:
            seen.add(parameter)
            arrivals.append((time.time_ns(), parameter.grad.numel() * parameter.grad.element_size()))

    trained = [p for p in model.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(note) for p in trained]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _memory_events(profiler: Any) -> Iterator[tuple[int, int]]:  # noqa: ANN401  # torch.profiler.profile, whose results are untyped
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU:
            yield event.start_ns(), event.nbytes()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages under the tensors; of a DTensor, this rank's part."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def status_bytes(field: str) -> int:
    """A figure of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")


MOST_BLOCKS = 10


def write_memory_state(attempt_dir: Path, *, rank: int, step: int, data_limit: int) -> None:
    """Writes the state next to the report of the rank; `data_limit` is the limit that was in force."""
    try:
        codec.write(memory_state_path(attempt_dir, rank), memory_state(attempt_dir, rank, step, data_limit))
    except Exception as error:  # noqa: BLE001  # nothing may prevent the report
        print(f"the memory state could not be written: {type(error).__name__}: {error}")  # noqa: T201  # into its log


def memory_state(attempt_dir: Path, rank: int, step: int, data_limit: int) -> MemoryState:
    """Memory state of this process now."""
    beat = read_heartbeat(attempt_dir, rank)
    return MemoryState(
        rank=rank,
        phase="" if beat is None else beat.phase,
        step=step + 1,
        tensors=held_tensors(),
        host_bytes=anonymous_bytes(),
        data_bytes=status_bytes("VmData"),
        data_limit_bytes=None if data_limit == resource.RLIM_INFINITY else data_limit,
        **_allocator_state(),
    )


def held_tensors() -> dict[str, int]:
    """Bytes of the tensors that Python holds, each storage once."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # tensors of torch.compile warn that they have no storage
        found = list(_tensors())
    weights = [tensor for tensor in found if isinstance(tensor, nn.Parameter)]
    gradients = [weight.grad for weight in weights if weight.is_leaf and weight.grad is not None]
    held = {"weights": storage_bytes(weights), "gradients": storage_bytes(gradients)}
    return held | {"other tensors": storage_bytes([*found, *gradients]) - sum(held.values())}


def _tensors() -> Iterator[Tensor]:
    """By their types: isinstance() on any object may run its code."""
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and _has_storage(thing):
            yield thing


def _has_storage(tensor: Tensor) -> bool:
    """Fake, meta and sparse tensors have none; a wrapped tensor is counted by itself."""
    try:
        return tensor.device.type != "meta" and bool(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError, UserWarning):
        return False


def _allocator_state() -> dict[str, Any]:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    used = sorted((block["size"] for block in blocks if block["state"] == "active_allocated"), reverse=True)
    unused = [block["size"] for block in blocks if block["state"] == "inactive"]
    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "free_device_bytes": free_bytes,
        "total_device_bytes": total_bytes,
        "largest_blocks": tuple(used[:MOST_BLOCKS]),
        "largest_free_bytes": max(unused, default=0),
        "summary": torch.cuda.memory_summary(),
    }
