"""Check before training that the disks can hold what a run will write.

Counted in the run directory: the checkpoint being written beside the newest kept one (what is trained, in its master
type, and the optimizer's state), and the exported model (4 bytes a parameter, or of adapters what they weigh). Metrics
and logs are small beside them. State offloaded to NVMe is checked against its own disk (`offload`).
"""

from pathlib import Path

from shardwise.launch.engine.offload import check_nvme
from shardwise.launch.probe.disks import check_room
from shardwise.trainer.spec.plan import Plan

EXPORT_BYTES_PER_PARAMETER = 4


def needed_disk_bytes(plan: Plan) -> int:
    """Bytes a run of this plan needs on the disk at once."""
    memory, freezes_base = plan.chosen.memory, plan.chosen.method.freezes_base
    export = memory.checkpoint_bytes if freezes_base else plan.model_shape.num_parameters * EXPORT_BYTES_PER_PARAMETER
    return export + memory.checkpoint_bytes * min(2, plan.job.checkpoint.keep + 1)


def check_disk(plan: Plan, run_dir: Path) -> None:
    """EnvironmentFaultError with both numbers where the run would fill a disk, or a quota on it."""
    check_nvme(plan)
    check_room(
        run_dir,
        num_bytes=needed_disk_bytes(plan),
        what="checkpoints and the exported model need",
        remedy="make room, or name another disk with output or --run-dir",
    )
