"""Bytes of one device: those of live storages, and those that torch's caching allocator would reserve for them.

Every storage that an operation makes is live until the last tensor on it is freed. A dispatch mode sees what every
operation returns; a weak reference to the storage reports when it is freed; FSDP2 frees and fills storages in place
with `UntypedStorage.resize_`, which is watched too. Sizes are rounded up as torch's caching allocator rounds them in
its `allocated` counter.

A storage has a kind. Those made in the forward are activations, others temporaries, until more is known:
`mark` for weights, gradients and optimizer state, a collective for its buffers, a resize for gathered weights.
What is not covered: memory that a kernel allocates and frees inside itself (see `kernels` for attention's).

The allocator is replayed on the trace of these allocations. After c10/cuda/CUDACachingAllocator.cpp, for one stream and
default settings:

    sizes       rounded up to 512 bytes; up to 1 MiB from the small pool, else from the large one
    segments    requests to the device: 2 MiB in the small pool, 20 MiB for requests below 10 MiB, else the
                request rounded up to 2 MiB
    a request   uses the smallest free block of its pool that holds it (of the lowest address among equals), and gives
                the rest back as a block where that is at least 512 bytes (small pool) or more than 1 MiB (large pool)
    a free      joins the block with free neighbours in its segment
    at a limit  whole free segments are returned to the device and the request is tried again; then it is out of memory

With expandable segments there is one segment a pool that grows at its end, in steps of 2 or 20 MiB, and every rest of
512 bytes is a block. Pages in its middle are never returned here, which torch does near the limit: the figure is an
upper bound.
"""

import weakref
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.trainer.spec.units import MIB

ROUNDING_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
MEDIUM_SEGMENT_BYTES = 20 * MIB
MEDIUM_BYTES = 10 * MIB
LARGE_ROUNDING_BYTES = 2 * MIB
CAPACITY_SHARE = 256  # the smallest capacity is found to within this share of the peak
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
        self._rounding = ROUNDING_BYTES if device == "cuda" else 1
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
        self.is_unseen = False
        self.trace: list[TraceEvent] = []
        self.forward_operations: Counter[str] = Counter()
        self.backward_operations: Counter[str] = Counter()
        self.product_types: Counter[torch.dtype] = Counter()  # of matrix products in the forward
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

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Within the block nothing that is allocated counts."""
        self.is_unseen = True
        try:
            yield
        finally:
            self.is_unseen = False

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
        if self.is_unseen:
            return result
        self._operation = name = func.__name__
        if func.namespace == "c10d":
            self._mark_buffers(name, (*args, result))
        for tensor in _tensors((result,)):
            self._see(tensor)
        (self.forward_operations if self._new_kind is Kind.ACTIVATIONS else self.backward_operations)[name] += 1
        if name in _PRODUCTS and self._new_kind is Kind.ACTIVATIONS:
            self.product_types[result.dtype] += 1
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


class Replay(NamedTuple):
    """Result of the replay; `ran_out` is true if the limit was reached."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    ran_out: bool


def replay(trace: Sequence[TraceEvent], *, limit_bytes: int | None = None, is_expandable: bool = False) -> Replay:
    """Replays a trace; ends early where it runs out of memory."""
    allocator = _Allocator(limit_bytes, is_expandable=is_expandable)
    for event in trace:
        if event.is_free:
            allocator.free(event.number)
        elif not allocator.allocate(event.number, event.num_bytes):
            return allocator.result(ran_out=True)
    return allocator.result(ran_out=False)


def min_capacity_bytes(trace: Sequence[TraceEvent], unlimited: Replay) -> int:
    """The smallest limit under which the trace still runs, to within 1/256 of its peak."""
    fails, runs = unlimited.peak_allocated_bytes - 1, unlimited.peak_reserved_bytes
    while runs - fails > max(1, unlimited.peak_allocated_bytes // CAPACITY_SHARE):
        middle = (fails + runs) // 2
        if replay(trace, limit_bytes=middle).ran_out:
            fails = middle
        else:
            runs = middle
    return runs


class _Block:
    """A piece of a segment, linked to its neighbours there."""

    __slots__ = ("address", "after", "before", "is_free", "num_bytes")

    def __init__(self, address: int, num_bytes: int, before: "_Block | None", after: "_Block | None") -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.before = before
        self.after = after
        self.is_free = True


class _Pool:
    """Free blocks, smallest first."""

    def __init__(self, *, smallest_rest: int, growth_bytes: int) -> None:
        self.smallest_rest = smallest_rest
        self.growth_bytes = growth_bytes
        self.last: _Block | None = None  # of the expandable segment
        self._order: list[tuple[int, int]] = []
        self._blocks: dict[int, _Block] = {}

    def put(self, block: _Block) -> None:
        insort(self._order, (block.num_bytes, block.address))
        self._blocks[block.address] = block

    def remove(self, block: _Block) -> None:
        del self._order[bisect_left(self._order, (block.num_bytes, block.address))]
        del self._blocks[block.address]

    def take(self, num_bytes: int) -> _Block | None:
        """The smallest free block that holds `num_bytes`, taken out."""
        place = bisect_left(self._order, (num_bytes, -1))
        if place == len(self._order):
            return None
        return self._blocks.pop(self._order.pop(place)[1])

    def take_whole_segments(self) -> list[_Block]:
        """Every free block that is a segment by itself, taken out."""
        whole = [block for block in self._blocks.values() if block.before is None and block.after is None]
        for block in whole:
            self.remove(block)
        return whole


class _Allocator:
    def __init__(self, limit_bytes: int | None, *, is_expandable: bool) -> None:
        self._limit_bytes = limit_bytes
        self._is_expandable = is_expandable
        rest = ROUNDING_BYTES if is_expandable else SMALL_BYTES + 1
        self._small = _Pool(smallest_rest=ROUNDING_BYTES, growth_bytes=SMALL_SEGMENT_BYTES)
        self._large = _Pool(smallest_rest=rest, growth_bytes=MEDIUM_SEGMENT_BYTES)
        self._used: dict[int, tuple[_Pool, _Block]] = {}
        self._next_address = 0
        self._allocated = self._reserved = self._peak_allocated = self._peak_reserved = 0

    def allocate(self, number: int, num_bytes: int) -> bool:
        """False where the device has no more memory."""
        wanted = max(1, -(-num_bytes // ROUNDING_BYTES)) * ROUNDING_BYTES
        pool = self._small if wanted <= SMALL_BYTES else self._large
        block = pool.take(wanted)
        if block is None:
            block = self._grow(pool, wanted) if self._is_expandable else self._new_segment(pool, wanted)
        if block is None:
            return False
        self._split(pool, block, wanted)
        block.is_free = False
        self._used[number] = (pool, block)
        self._allocated += block.num_bytes
        self._peak_allocated = max(self._peak_allocated, self._allocated)
        return True

    def free(self, number: int) -> None:
        pool, block = self._used.pop(number)
        self._allocated -= block.num_bytes
        block.is_free = True
        if block.after is not None and block.after.is_free:
            pool.remove(block.after)
            self._join(pool, block, block.after)
        if block.before is not None and block.before.is_free:
            pool.remove(block.before)
            self._join(pool, block.before, block)
            block = block.before
        pool.put(block)

    def result(self, *, ran_out: bool) -> Replay:
        return Replay(self._peak_allocated, self._peak_reserved, ran_out)

    def _split(self, pool: _Pool, block: _Block, wanted: int) -> None:
        rest = block.num_bytes - wanted
        if rest < pool.smallest_rest:
            return
        behind = _Block(block.address + wanted, rest, block, block.after)
        if block.after is not None:
            block.after.before = behind
        block.after, block.num_bytes = behind, wanted
        if pool.last is block:
            pool.last = behind
        pool.put(behind)

    @staticmethod
    def _join(pool: _Pool, first: _Block, second: _Block) -> None:
        first.num_bytes += second.num_bytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if pool.last is second:
            pool.last = first

    def _new_segment(self, pool: _Pool, wanted: int) -> _Block | None:
        if pool is self._small:
            num_bytes = SMALL_SEGMENT_BYTES
        elif wanted < MEDIUM_BYTES:
            num_bytes = MEDIUM_SEGMENT_BYTES
        else:
            num_bytes = -(-wanted // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES
        if not self._reserve(num_bytes):
            return None
        block = _Block(self._next_address, num_bytes, None, None)
        self._next_address += num_bytes
        return block

    def _grow(self, pool: _Pool, wanted: int) -> _Block | None:
        """The end of the pool's segment, mapped as far as `wanted` needs."""
        last = pool.last if pool.last is not None and pool.last.is_free else None
        missing = wanted - (last.num_bytes if last is not None else 0)
        num_bytes = -(-missing // pool.growth_bytes) * pool.growth_bytes
        if not self._reserve(num_bytes):
            return None
        if last is not None:
            pool.remove(last)
            last.num_bytes += num_bytes
            return last
        before = pool.last
        address = before.address + before.num_bytes if before is not None else (0 if pool is self._small else 2**60)
        pool.last = _Block(address, num_bytes, before, None)
        if before is not None:
            before.after = pool.last
        return pool.last

    def _reserve(self, num_bytes: int) -> bool:
        if self._exceeds(num_bytes):
            for pool in (self._small, self._large):
                self._reserved -= sum(block.num_bytes for block in pool.take_whole_segments())
            if self._exceeds(num_bytes):
                return False
        self._reserved += num_bytes
        self._peak_reserved = max(self._peak_reserved, self._reserved)
        return True

    def _exceeds(self, num_bytes: int) -> bool:
        return self._limit_bytes is not None and self._reserved + num_bytes > self._limit_bytes
