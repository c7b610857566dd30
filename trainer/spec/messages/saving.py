"""How checkpoints are written: while training waits, or beside it out of a copy in host RAM.

A checkpoint that is written in the background costs training the time of the copy alone, and host RAM for the copy
until it is on the disk. Left open (`checkpoint.async: auto`) that is done on GPUs whose nodes have the RAM for it; on
CPUs, whose cores are those that train, it is not. State that lies on NVMe is read from there while training waits.
"""

from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.units import format_bytes
from shardwise.trainer.spec.value import Value


class SavingChoice(Value, frozen=True, kw_only=True):
    """Decision whether checkpoints are written in the background, with its reason."""

    is_background: bool
    snapshot_bytes: int  # host RAM of a node for the copy; 0 where there is none
    reason: str


def saving_choice(plan: Plan, chosen: Candidate) -> SavingChoice:
    """How this candidate of the plan saves; the same on every rank, from the plan alone."""
    asked = plan.job.checkpoint.is_async
    snapshot = -(-chosen.memory.checkpoint_bytes // plan.hardware.num_nodes)
    if asked is False:
        return _waits("checkpoint.async is false")
    if chosen.strategy.offload.uses_nvme:
        return _waits("the state is on NVMe already")
    if asked is None and plan.device_kind is DeviceKind.CPU:
        return _waits("the cores that would write are those that train")
    if not snapshot and asked is None:
        return _waits("the size of a checkpoint is not known")
    free = _free_host_bytes(plan, chosen)
    if free is None and asked is None:
        return _waits("the RAM of the host is not known")
    if free is not None and snapshot > free:
        left = format_bytes(max(free, 0))
        return _waits(f"the copy would take {format_bytes(snapshot)} of host RAM, {left} are left")
    return SavingChoice(
        is_background=True,
        snapshot_bytes=snapshot,
        reason=f"out of a copy{f' of {format_bytes(snapshot)}' if snapshot else ''} in the host RAM of a node",
    )


def _waits(reason: str) -> SavingChoice:
    return SavingChoice(is_background=False, snapshot_bytes=0, reason=reason)


def _free_host_bytes(plan: Plan, chosen: Candidate) -> int | None:
    """Bytes of a node's RAM that the run leaves free; None if the RAM is unknown."""
    host, memory = plan.hardware.host, chosen.memory
    known = [size for size in (plan.job.limits.host_ram, host.ram_available_bytes or host.ram_bytes) if size]
    if not known:
        return None
    on_device = memory.need_bytes * plan.hardware.num_devices_per_node if plan.device_kind is DeviceKind.CPU else 0
    return min(known) - memory.pinned_bytes - memory.host_bytes - on_device
