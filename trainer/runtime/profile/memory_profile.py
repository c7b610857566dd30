"""What a rank really holds: live bytes between steps, the peak within one, and by which part.

On a GPU torch's own counters are read. On a CPU there are none, so one steady step runs under torch.profiler with
memory events: live bytes are what the model, the optimizer and the engine hold when the step begins, plus the running
sum of allocations and frees; the peak is its maximum. Interpreter, libraries and allocator slack are no part of it;
anonymous resident memory, which has them, is reported beside it as `host`.

Parts at the peak: weights and optimizer state are what their tensors hold, gradients what had been accumulated by then
(each parameter notes the moment), activations the rest: saved for the backward, temporaries, engine buffers.
"""

import errno
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch._C._autograd import DeviceType  # torch.autograd has it under no public name
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from trainer.runtime.engines.engine_state import partitions
from trainer.runtime.models.build import is_deepspeed
from trainer.runtime.optimizers import unwrapped
from trainer.runtime.optimizers.facts import projectors
from trainer.runtime.profile.memory_timeline import Curve, timeline_of_spans
from trainer.runtime.run.clock import Clock
from trainer.spec.hardware import DeviceKind
from trainer.spec.report import MemoryFigures, MemoryPoint
from trainer.spec.units import MIB

CPU_OVERHEAD_BYTES = 64 * MIB  # a capped process may hold beside its tensors: thread stacks, modules, allocator slack
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
        """Measures the block, which has to be one whole optimizer step, by the phases that `clock` takes of it."""
        clock = clock or Clock(self._device)
        num_spans = len(clock.spans)
        held = held_bytes(self._model, self._optimizer)
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
        """What was measured; the counters that this device lacks are None."""
        is_cuda = self._device.type == "cuda"
        return MemoryFigures(
            steady_allocated_bytes=self._steady_bytes,
            peak_allocated_bytes=self._peak_bytes,
            peak_reserved_bytes=torch.cuda.max_memory_reserved(self._device) if is_cuda else None,
            device_bytes=_device_bytes(self._device) if is_cuda else None,
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


def held_bytes(model: nn.Module, optimizer: Any) -> dict[str, int]:  # noqa: ANN401  # Accelerate's wrapper
    """Bytes held between steps by part; DDP's gradients and ZeRO-3's stay allocated, GaLore's projectors are state."""
    shards = [p.ds_tensor for p in model.parameters() if hasattr(p, "ds_tensor")]  # ZeRO-3 keeps them beside
    weights = [*model.parameters(), *model.buffers(), *shards]
    inner = unwrapped(optimizer)
    states = [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
    states += [matrix for state in inner.state.values() for matrix in projectors(state)]
    masters = [p for group in inner.param_groups for p in group["params"]]  # DeepSpeed's fp32 partitions; else weights
    masters += partitions(model) if is_deepspeed(model) else []  # ZeRO-3 hands them over one by one
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
    zero: Any = model.optimizer if is_deepspeed(model) else None
    flat = getattr(zero, "grad_partitions_flat_buffer", None)
    return flat if isinstance(flat, Tensor) else None


def _engine_buffers(model: nn.Module) -> int:
    """Bytes that ZeRO-3 gathers gradients in before it reduces them, whatever the step does."""
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

    The allocator gets what `outside_bytes` leave, the context and communicators that the plan counts.
    """
    if kind is DeviceKind.CUDA:
        total = torch.cuda.get_device_properties(device).total_memory
        share = min(1.0, max(0, cap_bytes - outside_bytes) / total)
        torch.cuda.set_per_process_memory_fraction(share, device.index)  # Accelerate's device of one process has none
    else:
        limit = status_bytes("VmData") + cap_bytes + CPU_OVERHEAD_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def lift_cap() -> None:
    """Takes a data limit away again, so that the end of a run can be told after the limit was met."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


@contextmanager
def room_for_a_profile() -> Iterator[None]:
    """Takes a data limit away for a block, and adds to it what the block leaves: records are no part of the cap."""
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

    Also where another error was made of it: by a user's own loss, or by what a library does when something failed.
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
    return any(words in str(error) for words in _ALLOCATOR_WORDS)


_ALLOCATOR_WORDS = (
    "DefaultCPUAllocator: ",
    "can't allocate memory",
    "std::bad_alloc",
    "CUDA driver error: out of memory",  # of expandable segments; its "unknown error" is no lack of memory
    "CUDA error: out of memory",  # beside the caching allocator: pinned host memory, a context, a library
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",  # NCCL's buffers
    "Cuda failure 'out of memory'",
)


def held_when_out_of_memory(measured: MemoryFigures) -> MemoryFigures:
    """What a rank held at most when an allocation failed: a lower bound of what it needs, where counters have it."""
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


def _device_bytes(device: torch.device) -> int:
    """What nvidia-smi shows as used on the whole device, other processes included."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def status_bytes(field: str) -> int:
    """A figure of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {field}")
