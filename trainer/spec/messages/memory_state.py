"""Allocations of a rank when its memory ran out.

    attempts/N/out-of-memory-rank-R.json    by a rank whose allocation failed, before it ends
    attempts/N/out-of-memory.txt            by the supervisor, for a person

A rank that a signal ended leaves none.
"""

from pathlib import Path

from trainer.spec.value import Value


class MemoryState(Value, frozen=True, kw_only=True):
    """Of one process; a counter that its device lacks is None."""

    rank: int
    phase: str  # as its signs of life call it
    step: int  # the one that it did not finish
    tensors: dict[str, int]  # weights, gradients, and what else Python held
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    free_device_bytes: int | None = None  # as the driver counts, of all processes
    total_device_bytes: int | None = None
    largest_blocks: tuple[int, ...] = ()  # in use, the largest first
    largest_free_bytes: int | None = None  # the largest piece of what is reserved and not in use
    host_bytes: int | None = None  # anonymous resident memory
    data_bytes: int | None = None  # what a data limit counts
    data_limit_bytes: int | None = None  # None: there is none
    summary: str | None = None  # the allocator's own tables


def memory_state_path(attempt_dir: Path, rank: int) -> Path:
    """Where a rank leaves it."""
    return attempt_dir / f"out-of-memory-rank-{rank}.json"
