"""Whether the disks can hold what a run will write, asked before anything is trained.

Counted in the run directory: the checkpoint being written beside the newest kept one (what is trained, in its master
type, and the optimizer's state), and the exported model (4 bytes a parameter, or of adapters what they weigh). Metrics
and logs are small beside them. State offloaded to NVMe is asked of its own disk (`nvme_folder`).
"""

import shutil
from pathlib import Path

from launch.nvme_folder import check_nvme
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.plan import Plan
from trainer.spec.units import format_bytes

EXPORT_BYTES_PER_PARAMETER = 4


def needed_disk_bytes(plan: Plan) -> int:
    """Bytes a run of this plan needs on the disk at once."""
    memory, freezes_base = plan.chosen.memory, plan.chosen.method.freezes_base
    export = memory.checkpoint_bytes if freezes_base else plan.model_shape.num_parameters * EXPORT_BYTES_PER_PARAMETER
    return export + memory.checkpoint_bytes * min(2, plan.job.checkpoint.keep + 1)


def check_disk(plan: Plan, run_dir: Path) -> None:
    """EnvironmentFaultError with both numbers where the run would fill a disk."""
    check_nvme(plan)
    folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    needed, free = needed_disk_bytes(plan), shutil.disk_usage(folder).free
    if free < needed:
        raise EnvironmentFaultError(
            f"{run_dir}: checkpoints and the exported model need {format_bytes(needed)}, "
            f"{format_bytes(free)} are free; make room, or name another disk with output or --run-dir"
        )
