"""Signs of life: a small file for each rank, which the supervisor's watchdog reads.

    attempts/N/heartbeats/rank-R    one line of JSON, overwritten in place and padded to a fixed length

A sign is one write into a file that is open and has its length already: microseconds, no rename, and no room on the
disk that could be missing. Each says where the rank is, and how many signs it gave at this step: of two ranks that run
the same lines, the one with fewer is behind.
"""

from pathlib import Path

import msgspec

from trainer.spec.report import Ending
from trainer.spec.value import Value

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
