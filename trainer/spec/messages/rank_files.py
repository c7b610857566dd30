"""Files of a rank for the supervisor: heartbeats, allocations after an out of memory.

Heartbeats: a small file for each rank, which the supervisor's watchdog reads.

    attempts/N/heartbeats/rank-R    one line of JSON, overwritten in place and padded to a fixed length

A sign is one write into a file that is open and has its length already: microseconds, no rename, and no room on the
disk that could be missing. Each says where the rank is, and how many signs it gave at this step: of two ranks that run
the same lines, the one with fewer is behind.

Allocations of a rank when its memory ran out.

    attempts/N/out-of-memory-rank-R.json    by a rank whose allocation failed, before it ends
    attempts/N/out-of-memory.txt            by the supervisor, for a person

A rank that a signal ended leaves none.
"""

from pathlib import Path

import msgspec

from shardwise.trainer.spec.report import Ending
from shardwise.trainer.spec.value import Value

HEARTBEAT_BYTES = 256
_SHORT_PHASE = 24  # characters, of at most 6 bytes each in JSON
# Within an optimizer step. Everything else (loading, saving, evaluating) has no length that earlier ones would tell.
STEP_PHASES = frozenset({"training", "data", "forward", "backward", "optimizer"})
SAVING_PHASE = "saving a checkpoint"
HOOK_PHASE = "on_step"  # of the user's extensions file, after a step: it may do anything
# After these a rank has nothing left to do but end.
END_PHASES = frozenset(ending.value for ending in Ending)


class Heartbeat(Value, frozen=True, kw_only=True):
    """The last heartbeat of a rank."""

    step: int  # optimizer steps done
    count: int  # signs since it is so
    phase: str


def heartbeat_path(attempt_dir: Path, rank: int) -> Path:
    """Where a rank gives its signs."""
    return attempt_dir / "heartbeats" / f"rank-{rank}"


def encode_heartbeat(beat: Heartbeat) -> bytes:
    """Always `HEARTBEAT_BYTES` long; a phase that is too long for it is cut."""
    content = msgspec.json.encode(beat)
    if len(content) >= HEARTBEAT_BYTES:
        content = msgspec.json.encode(msgspec.structs.replace(beat, phase=beat.phase[:_SHORT_PHASE]))
    return content.ljust(HEARTBEAT_BYTES - 1) + b"\n"


def read_heartbeat(attempt_dir: Path, rank: int) -> Heartbeat | None:
    """The last sign of a rank; None where it gave none yet, or is writing one."""
    try:
        return msgspec.json.decode(heartbeat_path(attempt_dir, rank).read_bytes(), type=Heartbeat)
    except (OSError, msgspec.DecodeError):
        return None


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
