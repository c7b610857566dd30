"""Flat ranges of a logical tensor: the arithmetic that lets any engine write and any other read.

Everything an engine holds is a contiguous range of the row-major elements of a logical tensor: all of it (none, ddp),
some rows (FSDP2's Shard(0)), a fragment (ZeRO-1 and 2), a partition (ZeRO-3, without its padding). Pure; no torch.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from trainer.spec.errors import InputError


class Ranged(Protocol):
    """Something that holds elements [start, start + num_elements) of a logical tensor."""

    @property
    def start(self) -> int: ...

    @property
    def num_elements(self) -> int: ...


R = TypeVar("R", bound=Ranged)


class Blocks(NamedTuple):
    """How values stand for elements: one for each block, of which the first and the last may be cut."""

    num_elements: int
    first_elements: int
    block: int

    @property
    def num_values(self) -> int:
        return 1 + -(-(self.num_elements - self.first_elements) // self.block)

    def value_of(self, element: int) -> int:
        """The value that stands for an element."""
        return 0 if element < self.first_elements else 1 + (element - self.first_elements) // self.block

    def begin_of(self, value: int) -> int:
        """The first element that a value stands for; of the one after the last, where the elements end."""
        if value == 0:
            return 0
        return min(self.first_elements + (value - 1) * self.block, self.num_elements)


class Overlap(NamedTuple):
    """A stretch that a chunk and a wanted range share, in offsets into each."""

    in_chunk: int
    in_wanted: int
    num_elements: int


def covered_in_order(chunks: Iterable[R], *, num_elements: int, what: str) -> tuple[R, ...]:
    """The chunks by position; InputError unless they cover [0, num_elements) exactly once."""
    ordered = sorted(chunks, key=lambda chunk: chunk.start)
    position = 0
    for chunk in ordered:
        if chunk.start > position:
            raise InputError(f"{what}: elements {position} to {chunk.start - 1} of {num_elements} are missing")
        if chunk.start < position:
            raise InputError(f"{what}: elements {chunk.start} to {position - 1} of {num_elements} are there twice")
        position = chunk.start + chunk.num_elements
    if position != num_elements:
        what_is_wrong = "are missing" if position < num_elements else "are too many"
        first, last = sorted((position, num_elements))
        raise InputError(f"{what}: elements {first} to {last - 1} of {num_elements} {what_is_wrong}")
    return tuple(ordered)


def overlap(chunk: Ranged, *, start: int, num_elements: int) -> Overlap | None:
    """What the chunk holds of [start, start + num_elements); None where nothing."""
    first = max(chunk.start, start)
    last = min(chunk.start + chunk.num_elements, start + num_elements)
    if first >= last:
        return None
    return Overlap(in_chunk=first - chunk.start, in_wanted=first - start, num_elements=last - first)


class Share(NamedTuple):
    """One rank's stretch of one of several tensors laid end to end."""

    position: int  # of the tensor in the list
    start: int
    num_elements: int


def share_of_rank(sizes: Sequence[tuple[int, int]], *, rank: int, world_size: int) -> list[Share]:
    """The rank's stretch of tensors given as (num_elements, element_bytes), laid end to end and cut evenly by bytes.

    A cut falls between two elements: the one it would divide goes to the rank in which it begins.
    """
    total_bytes = sum(num_elements * element_bytes for num_elements, element_bytes in sizes)
    begin, end = (total_bytes * boundary // world_size for boundary in (rank, rank + 1))
    shares, offset_bytes = [], 0
    for position, (num_elements, element_bytes) in enumerate(sizes):
        first, last = (
            min(max(-(-(boundary - offset_bytes) // element_bytes), 0), num_elements) for boundary in (begin, end)
        )
        if last > first:
            shares.append(Share(position=position, start=first, num_elements=last - first))
        offset_bytes += num_elements * element_bytes
    return shares
