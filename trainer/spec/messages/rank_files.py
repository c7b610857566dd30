"""Files of a rank for the supervisor (heartbeats, allocations after an out of memory), and how checkpoints are written.

Heartbeats: a small file for each rank, which the supervisor's watchdog reads.

    attempts/N/heartbeats/rank-R    one line of JSON, overwritten in place and padded to a fixed length

A sign is one write into a file that is open and has its length already: microseconds, no rename, and no room on the
disk that could be missing. Each holds the rank's position, and the number of its signs at this step: of two ranks that
run the same lines, the one with fewer is behind. Rank 0's also state why the last checkpoint was not saved: on a full
disk no other file can.

Allocations of a rank when its memory ran out.

    attempts/N/out-of-memory-rank-R.json    by a rank whose allocation failed, before it ends
    attempts/N/out-of-memory.txt            by the supervisor, for a person

A rank that a signal ended writes none.

A checkpoint that is written in the background costs training the time of the copy alone, and host RAM for the copy
until it is on the disk. Left open (`checkpoint.async: auto`) that is done on GPUs whose nodes have the RAM for it; on
CPUs, whose cores are those that train, it is not. State that lies on NVMe is read from there while training waits.
"""

from pathlib import Path

import msgspec

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.hardware import DeviceKind, Hardware
from shardwise.trainer.spec.host_ram import usable_ram
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.report import Ending, TimePart
from shardwise.trainer.spec.units import format_bytes
from shardwise.trainer.spec.value import Value

HEARTBEAT_BYTES = 1024
_SHORT_PHASE = 24  # characters, of at most 6 bytes each in JSON
# Within an optimizer step. The length of other phases (loading, saving, evaluating) cannot be predicted.
TRAINING_PHASE = "training"
STEP_PHASES = frozenset({TRAINING_PHASE, "data", "forward", "backward", "optimizer"})
SAVING_PHASE = "saving a checkpoint"
HOOK_PHASE = "on_step"  # of the user's extensions file, after a step: it may do anything
EVALUATING_PHASE, EXPORTING_PHASE = "evaluating", "exporting the model"
SAMPLING_PHASE = "writing a sample"
REFERENCE_PHASE = "running the reference"  # of pairs; its progress follows
_PARTS_OF_TIME = {
    **dict.fromkeys((*STEP_PHASES, HOOK_PHASE), TimePart.STEPS),
    EVALUATING_PHASE: TimePart.EVALUATION,
    SAVING_PHASE: TimePart.SAVING,
    SAMPLING_PHASE: TimePart.SAMPLE,
    EXPORTING_PHASE: TimePart.EXPORT,
}


def part_of_time(phase: str) -> TimePart | None:
    """The part of a run that the time of a phase counts as; None for what is part of the start-up."""
    if phase.startswith(REFERENCE_PHASE):
        return TimePart.EVALUATION
    return _PARTS_OF_TIME.get(phase)


# After these a rank ends.
END_PHASES = frozenset(ending.value for ending in Ending)


class Heartbeat(Value, frozen=True, kw_only=True):
    """The last heartbeat of a rank."""

    step: int  # optimizer steps done
    count: int  # signs since it is so
    phase: str
    problem: str = ""  # why the last save failed; empty once one succeeds


def heartbeat_path(attempt_dir: Path, rank: int) -> Path:
    """Path of the heartbeats of a rank."""
    return attempt_dir / "heartbeats" / f"rank-{rank}"


def encode_heartbeat(beat: Heartbeat) -> bytes:
    """Always `HEARTBEAT_BYTES` long; a phase or a problem that is too long for it is cut."""
    content = msgspec.json.encode(beat)
    if len(content) >= HEARTBEAT_BYTES:
        beat = msgspec.structs.replace(beat, phase=beat.phase[:_SHORT_PHASE])
    while len(content := msgspec.json.encode(beat)) >= HEARTBEAT_BYTES:
        beat = msgspec.structs.replace(beat, problem=beat.problem[: len(beat.problem) * 3 // 4])
    return content.ljust(HEARTBEAT_BYTES - 1) + b"\n"


def read_heartbeat(attempt_dir: Path, rank: int) -> Heartbeat | None:
    """The last sign of a rank; None where it gave none yet, or is writing one."""
    try:
        return msgspec.json.decode(codec.read_file(heartbeat_path(attempt_dir, rank)), type=Heartbeat)
    except (OSError, msgspec.DecodeError):
        return None


SUPERVISED = "SHARDWISE_SUPERVISED"  # a variable of the environment: ranks of a supervisor have it, by hand none
READY = "ready"  # of the process that watches a run by hand, once it holds the run directory
REPORT_ROOM_BYTES = 128 * 1024


def report_room_path(attempt_dir: Path) -> Path:
    """Path of the file that is removed before a report is written, so that a full disk has room for it."""
    return attempt_dir / ".report-room"


class MemoryState(Value, frozen=True, kw_only=True):
    """Memory of one process; a counter that its device lacks is None."""

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
    """Path of the allocations of a rank after an out of memory."""
    return attempt_dir / f"out-of-memory-rank-{rank}.json"


class SavingChoice(Value, frozen=True, kw_only=True):
    """Decision whether checkpoints are written in the background, with its reason."""

    is_background: bool
    snapshot_bytes: int  # host RAM of a node for the copy; 0 where there is none
    reason: str


def saving_choice(job: Job, hardware: Hardware, chosen: Candidate) -> SavingChoice:
    """Way in which a candidate of the plan of this job saves; the same on every rank."""
    requested = job.checkpoint.is_async
    snapshot = -(-chosen.memory.checkpoint_bytes // hardware.num_nodes)
    if requested is False:
        return _waits("checkpoint.async is false")
    if chosen.strategy.offload.uses_nvme:
        return _waits("the state is on NVMe already")
    if requested is None and hardware.device_kind is DeviceKind.CPU:
        return _waits("the cores that would write are those that train")
    if not snapshot and requested is None:
        return _waits("the size of a checkpoint is not known")
    free = _free_host_bytes(job, hardware, chosen)
    if free is None and requested is None:
        return _waits("the RAM of the host is not known")
    if free is not None and snapshot > free:
        left = format_bytes(max(free, 0))
        return _waits(f"the copy needs {format_bytes(snapshot)} of host RAM, {left} are free")
    return SavingChoice(
        is_background=True,
        snapshot_bytes=snapshot,
        reason=f"out of a copy{f' of {format_bytes(snapshot)}' if snapshot else ''} in the host RAM of a node",
    )


def _waits(reason: str) -> SavingChoice:
    return SavingChoice(is_background=False, snapshot_bytes=0, reason=reason)


def _free_host_bytes(job: Job, hardware: Hardware, chosen: Candidate) -> int | None:
    """Bytes of a node's RAM that stay free during the run; None if the RAM is unknown."""
    memory, usable = chosen.memory, usable_ram(hardware.host, job.limits.host_ram)
    if usable is None:
        return None
    on_device = memory.need_bytes * hardware.num_devices_per_node if hardware.device_kind is DeviceKind.CPU else 0
    return usable - memory.pinned_bytes - memory.host_bytes - on_device
