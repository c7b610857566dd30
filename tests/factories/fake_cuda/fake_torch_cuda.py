"""The stand-in for CUDA: gives a torch that was built without it a device `cuda`, as a machine file describes it."""

import ctypes
import logging
import os
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import attention_kernel
import torch
from machine import LIBRARY, MIB, Card, Machine, read_machine, slice_uuid_of, uuid_of

NCCL_VERSION = (2, 29, 3)


def install() -> None:
    if hasattr(torch._C, "_cuda_getDeviceCount"):
        return
    machine = read_machine()
    visible = _visible(machine) if machine.is_usable else []
    library = ctypes.CDLL(os.environ[LIBRARY])
    library.fake_cuda_allocated.restype = library.fake_cuda_peak.restype = ctypes.c_int64
    _describe_failures(library, machine, visible)
    torch._C._has_cuda = True
    torch.version.cuda = machine.cuda
    for name, function in _c_functions(library, machine, visible).items():
        setattr(torch._C, name, function)
    _install_module(library, visible)
    _install_streams()
    attention_kernel.register()
    _install_bitsandbytes()
    _install_nccl()
    if machine.idle_share is not None:
        _install_profiler(machine.idle_share)


def _visible(machine: Machine) -> list[tuple[int, Card]]:
    """The cards that CUDA_VISIBLE_DEVICES lets this process see, with their numbers on the machine."""
    cards = list(enumerate(machine.cards))
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return cards
    found = []
    for word in filter(None, (word.strip() for word in asked.split(","))):
        own = [card for card in cards if word == str(card[0]) or f"GPU-{uuid_of(card[0])}".startswith(word)]
        own += [
            (index, replace(card, memory=size, reserved=0))
            for index, card in cards
            for place, (_, size) in enumerate(card.mig_profiles)
            if slice_uuid_of(index, place) == word
        ]
        if not own:
            break  # as CUDA does: the rest is not looked at
        found += own
    return found


def _describe_failures(library: ctypes.CDLL, machine: Machine, visible: list[tuple[int, Card]]) -> None:
    """What the driver answers on this machine: memory that cannot be mapped, a chip that torch has no code for."""
    cannot_map = _expands_segments() and not machine.has_expandable_segments
    library.fake_cuda_set_num_devices(len(visible))
    for index, (_, card) in enumerate(visible):
        library.fake_cuda_set_limit(index, ctypes.c_int64((card.memory - card.reserved) * MIB))
        no_memory = "CUDA driver error: unknown error" if cannot_map else ""
        no_kernels = "" if _has_code(card.capability, machine.architectures) else _NO_KERNELS
        library.fake_cuda_fail(index, no_memory.encode(), no_kernels.encode())


def _expands_segments() -> bool:
    settings = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return "expandable_segments:true" in settings.lower()


_NO_KERNELS = "CUDA error: no kernel image is available for execution on the device"


def _has_code(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    for name in architectures:
        kind, _, digits = name.partition("_")
        major, minor = int(digits[:-1]), int(digits[-1])
        if kind == "compute" and (major, minor) <= capability:
            return True
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
    return False


def _c_functions(
    library: ctypes.CDLL, machine: Machine, visible: list[tuple[int, Card]]
) -> dict[str, Callable[..., Any]]:
    """What `torch._C` has in a CUDA build, as far as torch.cuda, DeepSpeed, Accelerate and the product ask for it."""

    def initialise() -> None:
        if not visible:
            raise RuntimeError("No CUDA GPUs are available" if machine.is_usable else _OLD_DRIVER)
        torch.cuda.default_generators = tuple(
            torch.ops.fake_cuda.default_generator(index) for index in range(len(visible))
        )

    def set_fraction(fraction: float, device: int) -> None:
        total = (visible[device][1].memory - visible[device][1].reserved) * MIB
        library.fake_cuda_set_limit(device, ctypes.c_int64(int(fraction * total)))

    def exchange(device: int) -> int:  # torch._dynamo wants to hash what it finds, which a function of ctypes forbids
        return library.fake_cuda_exchange_device(device)

    def stream(device: int) -> tuple[int, int, int]:
        return 0, exchange(-1) if device < 0 else device, _CUDA

    return {
        "_cuda_getDeviceCount": lambda: len(visible),
        "_cuda_init": initialise,
        "_cuda_getDevice": lambda: exchange(-1),
        "_cuda_setDevice": exchange,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_getArchFlags": lambda: " ".join(machine.architectures),
        "_cuda_synchronize": lambda: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_emptyCache": lambda: None,
        "_cuda_getCurrentStream": stream,
        "_cuda_getDefaultStream": stream,
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_cuda_setStream": lambda **ids: None,
        "_cuda_canDeviceAccessPeer": lambda device, peer: False,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_memoryStats": lambda device: _memory_stats(library, device),
        "_cuda_resetPeakMemoryStats": lambda device: library.fake_cuda_reset_peak(device),
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_hostMemoryStats": lambda: {"allocated_bytes": {"current": 0, "peak": 0, "allocated": 0, "freed": 0}},
        "_cuda_memorySnapshot": lambda ids=None: {"segments": _segments(visible), "device_traces": []},
        "_cuda_record_memory_history": lambda *settings: None,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_nccl_version": lambda: NCCL_VERSION[0] << 32 | NCCL_VERSION[1] << 16 | NCCL_VERSION[2],
        "_nccl_version_suffix": lambda: b"",
    }


_CUDA = 1  # c10::DeviceType::CUDA
_OLD_DRIVER = "The NVIDIA driver on your system is too old"


def _segments(visible: list[tuple[int, Card]]) -> list[dict[str, Any]]:
    """One on each card, of the kind that the settings ask for."""
    sizes = dict.fromkeys(("address", "total_size", "allocated_size", "active_size", "requested_size", "stream"), 0)
    kind = {"segment_type": "large", "is_expandable": _expands_segments(), "blocks": [], "frames": []}
    return [{"device": device, **sizes, **kind} for device in range(len(visible))]


def _memory_stats(library: ctypes.CDLL, device: int) -> dict[str, Any]:
    now, peak = library.fake_cuda_allocated(device), library.fake_cuda_peak(device)
    counted = {"current": now, "peak": peak, "allocated": peak, "freed": peak - now}
    nothing = dict.fromkeys(counted, 0)
    pools = {"all": counted, "small_pool": nothing, "large_pool": counted}
    of_bytes = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    of_nothing = ("inactive_split_bytes", "allocation", "segment", "active", "inactive_split")
    return {
        **dict.fromkeys(of_bytes, pools),
        **dict.fromkeys(of_nothing, dict.fromkeys(pools, nothing)),
        **dict.fromkeys(("oversize_allocations", "oversize_segments"), nothing),
        **dict.fromkeys(("num_alloc_retries", "num_ooms", "num_sync_all_streams"), 0),
        **dict.fromkeys(("num_device_alloc", "num_device_free", "max_split_size"), 0),
    }


def _install_module(library: ctypes.CDLL, visible: list[tuple[int, Card]]) -> None:
    """What torch.cuda took from `torch._C` when it was imported, and the CUDA runtime."""

    def memory(device: int) -> tuple[int, int]:
        card = visible[device][1]
        used = library.fake_cuda_allocated(device)
        return max(0, card.free * MIB - used), (card.memory - card.reserved) * MIB

    done = _Fields(success=0)
    cuda, none = torch.cuda, lambda *_: 0
    cuda._exchange_device = cuda._maybe_exchange_device = torch._C._cuda_exchangeDevice
    cuda._get_device_properties = lambda device: _properties(*visible[device])
    cuda._cudart = _Fields(cudaError=done, cudaMemGetInfo=memory, cudaHostRegister=none, cudaHostUnregister=none)
    cuda.memory._dump_snapshot = lambda filename="dump_snapshot.pickle": open(filename, "wb").close()  # noqa: PTH123
    cuda.graphs._cuda_isCurrentStreamCapturing = lambda: False
    cuda.nvtx._nvtx = _Fields(rangePushA=none, rangePop=none, markA=none, rangeStartA=none, rangeEnd=none)
    torch.UntypedStorage.resize_, torch.UntypedStorage.__new__ = _resize_storage, _new_storage


class _Fields(types.SimpleNamespace):
    """Attributes; torch._dynamo wants to hash whatever it finds below torch.cuda."""

    __hash__ = object.__hash__


def _properties(index: int, card: Card) -> "_Fields":
    return _Fields(
        name=card.name, major=card.capability[0], minor=card.capability[1],
        total_memory=(card.memory - card.reserved) * MIB, multi_processor_count=card.num_multiprocessors,
        uuid=uuid_of(index), pci_domain_id=0, pci_bus_id=index + 1, pci_device_id=0, warp_size=32,
        L2_cache_size=32 * MIB, gcnArchName="", is_integrated=0, is_multi_gpu_board=0,
        max_threads_per_multi_processor=1536, max_threads_per_block=1024, regs_per_multiprocessor=65536,
        shared_memory_per_block=49152, shared_memory_per_block_optin=101376, shared_memory_per_multiprocessor=102400,
    )  # fmt: skip


_RESIZE, _NEW = torch.UntypedStorage.resize_, torch.UntypedStorage.__new__


def _resize_storage(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _RESIZE(storage, num_bytes)
    holder = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    torch.ops.fake_cuda.resize_storage(holder, num_bytes)
    return storage


def _new_storage(cls: type, *size: Any, device: Any = None, **settings: Any) -> torch.UntypedStorage:
    if device is None or torch.device(device).type != "cuda":
        return _NEW(cls, *size, **settings, **({} if device is None else {"device": device}))
    return torch.empty(*size or (0,), dtype=torch.uint8, device=device).untyped_storage()


def _install_streams() -> None:
    """One stream a device, which has always finished; an event knows when it was recorded."""

    class Stream(torch.Stream):
        cuda_stream = 0

        def __new__(cls, device: Any = None, priority: int = 0, **ids: int) -> "Stream":
            if ids:
                return super().__new__(cls, priority=priority, **ids)
            index = torch.cuda._utils._get_device_index(device, optional=True)
            return super().__new__(cls, torch.device("cuda", index), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
            return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

        def record(self, stream: torch.Stream | None = None) -> None:
            self.recorded_s = time.perf_counter()
            super().record(stream or torch.cuda.current_stream())

        def elapsed_time(self, end_event: "Event") -> float:
            return (end_event.recorded_s - self.recorded_s) * 1000

    for module in (torch.cuda, torch.cuda.streams):
        module.Stream, module.Event = Stream, Event


def _install_bitsandbytes() -> None:
    """bitsandbytes with its library for the CPU, whatever the device, and ordinary memory where it manages memory."""
    is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: False
    logging.disable(logging.WARNING)  # a CPU lacks a kernel, it says
    try:
        from bitsandbytes import functional
    finally:
        torch.cuda.is_available = is_available
        logging.disable(logging.NOTSET)
    managed: list[Any] = []

    def allocate(num_bytes: ctypes.c_size_t) -> int:
        managed.append(ctypes.create_string_buffer(num_bytes.value))
        return ctypes.addressof(managed[-1])

    library = functional.lib
    library.cget_managed_ptr = allocate
    library.cprefetch = lambda *_: None
    library.cfill_fp32 = lambda place, _other, value, count: _clear(place, value, 4 * count.value)
    library.cfill_uint8 = lambda place, _other, value, count: _clear(place, value, count.value)


def _clear(place: ctypes.c_void_p, value: Any, num_bytes: int) -> None:
    assert value.value == 0, "managed memory is filled with zeros alone"
    ctypes.memset(place, 0, num_bytes)


def _install_profiler(idle_share: float) -> None:
    """A profiler of the device alone: kernels of two kinds, and none for a share of the time that it records."""
    whole = torch.profiler.profile

    class Recording:
        def __init__(self, *, activities: list[Any]) -> None:
            self.begin_ns = self.end_ns = 0
            results = _Fields(events=lambda: list(_recorded(self.begin_ns, self.end_ns, idle_share)))
            self.profiler = _Fields(kineto_results=results)

        def start(self) -> None:
            self.begin_ns = time.time_ns()

        def stop(self) -> None:
            self.end_ns = time.time_ns()

    def profile(*, activities: list[Any], **settings: Any) -> Any:
        is_device_alone = activities == [torch.profiler.ProfilerActivity.CUDA]
        return Recording(activities=activities) if is_device_alone else whole(activities=activities, **settings)

    torch.profiler.profile = profile
    torch.profiler.supported_activities = lambda: set(torch.profiler.ProfilerActivity.__members__.values())


_NUM_RECORDED = 50  # kernels, each followed by a gap


def _recorded(begin_ns: int, end_ns: int, idle_share: float) -> Iterator["_Fields"]:
    each = (end_ns - begin_ns) / _NUM_RECORDED
    events = [("nccl:all_gather", begin_ns, end_ns, True)]  # a range that a program names, as long as all
    for index in range(_NUM_RECORDED):
        start, name = begin_ns + index * each, "sm90_xmma_gemm_bf16" if index % 2 else "Memcpy HtoD (Pinned -> Device)"
        events.append((name, int(start), int(start + each * (1 - idle_share)), False))
    kind = torch._C._autograd.DeviceType.CUDA
    for name, start_ns, stop_ns, is_named in events:
        values = {"name": name, "start_ns": start_ns, "end_ns": stop_ns, "device_type": kind}
        values["is_user_annotation"] = is_named
        yield _Fields(**{key: lambda value=value: value for key, value in values.items()})


def _install_nccl() -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    class ProcessGroupNCCL(dist.ProcessGroupGloo):
        """Gloo for tensors of the device; those of the CPU are refused, as by NCCL."""

        supports_splitting = False

        class Options:
            _timeout = timedelta(minutes=10)

        def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
            super().__init__(store, rank, size, timeout=options._timeout)

    register, types_of = dist.ProcessGroup._register_backend, dist.ProcessGroup._device_types.fget

    def register_backend(group: Any, device: torch.device, kind: Any, backend: Any = None) -> None:
        register(group, device, kind, backend)
        if device.type == "cuda":  # where `run_on_gloo` of device.cpp looks
            register(group, torch.device("privateuseone"), kind, backend)

    def device_types(group: Any) -> list[torch.device]:
        return [device for device in types_of(group) if device.type != "privateuseone"]

    dist.ProcessGroup._register_backend = register_backend
    dist.ProcessGroup._device_types = property(device_types)
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
