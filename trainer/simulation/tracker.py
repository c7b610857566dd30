"""Live bytes of one device: every storage that an operation makes, until the last tensor on it is freed.

A dispatch mode sees what every operation returns; a weak reference to the storage reports when it is freed; FSDP2 frees
and fills storages in place with `UntypedStorage.resize_`, which is watched too. Sizes are rounded up as torch's caching
allocator rounds them in its `allocated` counter.

A storage has a kind. Those made in the forward are activations, others temporaries, until more is known:
`mark` for weights, gradients and optimizer state, a collective for its buffers, a resize for gathered weights.
What is not covered: memory that a kernel allocates and frees inside itself (see `kernels` for attention's).
"""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CUDA_ROUNDING_BYTES = 512
LARGEST_HEAD_DIM = 256  # a longer side of [batch, heads, side, side] is the sequence


class Kind(StrEnum):
    """Content of a storage."""

    WEIGHTS = "weights"
    OPTIMIZER_STATE = "optimizer_state"
    GRADIENTS = "gradients"
    GATHERED_WEIGHTS = "gathered_weights"
    REDUCE_BUFFERS = "reduce_buffers"
    ACTIVATIONS = "activations"  # made in the forward
    TEMPORARIES = "temporaries"  # made later


class TraceEvent(NamedTuple):
    """One allocation, or the freeing of the one with that number."""

    is_free: bool
    number: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class LiveStorage:
    """A storage on the device; its kind may become known after it was seen at the peak."""

    number: int
    num_bytes: int
    kind: Kind
    module: str
    operation: str


class Tracker(TorchDispatchMode):
    """Counts the live bytes of `device` while it is active, by event, with the live storages at the peak."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._rounding = CUDA_ROUNDING_BYTES if device == "cuda" else 1
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._live: dict[int, LiveStorage] = {}  # by the address of the storage
        self._num_seen = 0
        self._new_kind = Kind.TEMPORARIES
        self._snapshot: list[LiveStorage] | None = None
        self._follows_peak = False
        self._operation = "load"
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_event = ""
        self.event = ""
        self.events: dict[str, int] = {}
        self.modules: list[str] = []  # being run, innermost last
        self.block = ""  # whose backward runs
        self.trace: list[TraceEvent] = []
        self.forward_operations: Counter[str] = Counter()
        self.backward_operations: Counter[str] = Counter()
        self.product_types: set[torch.dtype] = set()  # of matrix products in the forward
        self.square_bytes: dict[int, int] = {}  # by length: the largest scores or mask of that length

    def begin(self, event: str, *, is_forward: bool = False) -> None:
        """From here on live bytes count for `event`."""
        self.event = event
        self._new_kind = Kind.ACTIVATIONS if is_forward else Kind.TEMPORARIES
        self.events[event] = max(self.events.get(event, 0), self.live_bytes)
        self._note_peak()

    def start_measuring(self) -> None:
        """Forgets peaks so far and keeps the live storages of the peak from here on."""
        self.events.clear()
        self.peak_bytes, self._follows_peak = 0, True

    def mark(self, tensors: Iterable[Tensor], kind: Kind) -> None:
        """Sets the kind of the storages of `tensors`; those not seen before are counted from now on."""
        for tensor in tensors:
            local = _local(tensor)
            self._see(local)
            found = self._live.get(local.untyped_storage()._cdata)
            if found is not None:
                found.kind = kind

    def omit(self, tensors: Iterable[Tensor]) -> None:
        """Never counts the storages under `tensors`, which are the data loader's."""
        for tensor in tensors:
            self._watch(tensor.untyped_storage())

    def name_gradients(self) -> None:
        """Marks gradients: storages made in a backward that outlive it; shards of them are outputs of reductions."""
        for storage in self._live.values():
            if storage.kind in (Kind.TEMPORARIES, Kind.REDUCE_BUFFERS):
                storage.kind = Kind.GRADIENTS

    def at_peak(self) -> list[LiveStorage]:
        """The storages that were alive at the peak."""
        return self._snapshot or []

    def __enter__(self) -> Self:
        self._resize = torch.UntypedStorage.resize_
        tracker, resize = self, self._resize

        def resize_and_report(storage: torch.UntypedStorage, num_bytes: int) -> Any:  # noqa: ANN401  # torch's
            result = resize(storage, num_bytes)
            tracker._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resize_and_report  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's
        result = func(*args, **(kwargs or {}))
        self._operation = name = func.__name__
        if func.namespace == "c10d":
            self._mark_buffers(name, (*args, result))
        for tensor in _tensors((result,)):
            self._see(tensor)
        (self.forward_operations if self._new_kind is Kind.ACTIVATIONS else self.backward_operations)[name] += 1
        if name in _PRODUCTS and self._new_kind is Kind.ACTIVATIONS:
            self.product_types.add(result.dtype)
        return result

    def _mark_buffers(self, name: str, values: Any) -> None:  # noqa: ANN401  # arguments of a collective
        kind = Kind.GATHERED_WEIGHTS if "allgather" in name else Kind.REDUCE_BUFFERS
        buffers = [tensor for tensor in _tensors(values) if tensor.numel() > 1 and self._is_unnamed(tensor)]
        self.mark(buffers, kind)

    def _is_unnamed(self, tensor: Tensor) -> bool:
        found = self._live.get(_local(tensor).untyped_storage()._cdata)
        return found is None or found.kind in (Kind.ACTIVATIONS, Kind.TEMPORARIES)

    def _see(self, tensor: Tensor) -> None:
        tensor = _local(tensor)
        if tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._watched:
            return
        num_bytes = self._rounded(storage.nbytes())
        if num_bytes == 0:
            return
        self._watch(storage)
        if tensor.ndim == 4 and tensor.shape[-1] == tensor.shape[-2] > LARGEST_HEAD_DIM:
            self.square_bytes[tensor.shape[-1]] = max(self.square_bytes.get(tensor.shape[-1], 0), num_bytes)
        self._add(address, num_bytes, self._new_kind, self._operation)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        self._watched[address] = weakref.ref(storage, lambda _: self._forget(address))

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._rounding) * self._rounding

    def _add(self, address: int, num_bytes: int, kind: Kind, operation: str) -> None:
        self._num_seen += 1
        module = self.modules[-1] if self.modules else self.block
        self._live[address] = LiveStorage(self._num_seen, num_bytes, kind, module, operation)
        self.trace.append(TraceEvent(is_free=False, number=self._num_seen, num_bytes=num_bytes))
        self.live_bytes += num_bytes
        if self.live_bytes > self.events.get(self.event, 0):
            self.events[self.event] = self.live_bytes
        self._note_peak()

    def _note_peak(self) -> None:
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_event = self.live_bytes, self.event
            if self._follows_peak:
                self._snapshot = list(self._live.values())

    def _remove(self, address: int) -> None:
        found = self._live.pop(address, None)
        if found is not None:
            self.live_bytes -= found.num_bytes
            self.trace.append(TraceEvent(is_free=True, number=found.number, num_bytes=found.num_bytes))

    def _forget(self, address: int) -> None:
        self._watched.pop(address, None)
        self._remove(address)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address not in self._watched:
            return
        num_bytes, found = self._rounded(storage.nbytes()), self._live.get(address)
        if found is not None and found.num_bytes == num_bytes:
            return
        self._remove(address)
        if num_bytes:
            self._add(address, num_bytes, Kind.GATHERED_WEIGHTS, "resize_")


_PRODUCTS = frozenset({"mm.default", "addmm.default"})


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    inner = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(inner, Tensor)
    return inner


def _tensors(values: Any) -> Iterable[Tensor]:  # noqa: ANN401  # what operations take and return
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
