"""A model of torch's caching allocator: from a trace of allocations to the memory that it reserves for them.

After c10/cuda/CUDACachingAllocator.cpp, for one stream and default settings:

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

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.trainer.simulation.tracker import TraceEvent
from shardwise.trainer.spec.units import MIB

ROUNDING_BYTES = 512
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
MEDIUM_SEGMENT_BYTES = 20 * MIB
MEDIUM_BYTES = 10 * MIB
LARGE_ROUNDING_BYTES = 2 * MIB
CAPACITY_SHARE = 256  # the smallest capacity is found to within this share of the peak


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
