"""What is asked before a job waits in a queue for hours: does it find what it reads, and room for what it writes?"""

import os
from collections.abc import Sequence
from pathlib import Path

from launch.cluster.missing_files import missing_for
from launch.inputs.trusted_code import kernel_of
from launch.plan.disk_check import needed_disk_bytes
from launch.plan.gather import PlanInputs
from launch.probe import disks
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.job.sections import NodeNetwork
from trainer.spec.plan import Plan

FILES_A_RUN = 100  # its records and logs, an export
FILES_A_RANK = 20  # logs of attempts, and of each checkpoint a shard


def check_network(inputs: PlanInputs, plan: Plan, *, job_name: str) -> str | None:
    """A line on what the job will download, None where there is nothing; InputError where its nodes reach no hub."""
    network = inputs.resolved.job.slurm.network
    missing = missing_for(inputs, kernel=kernel_of(plan))
    if not missing:
        return None
    what = " and ".join(missing)
    if network is NodeNetwork.NONE:
        raise InputError(
            f"{what}: not on this machine, and compute nodes have no network (slurm.network: none);\n"
            f"get it first: shardwise fetch {job_name}"
        )
    if network is NodeNetwork.DIRECT:
        return f"the job downloads {what}"
    return (
        f"the job downloads {what}; where compute nodes have no network, cancel it and run first: "
        f"shardwise fetch {job_name}"
    )


def check_room(plans: Sequence[Plan], run_dir: Path) -> None:
    """EnvironmentFaultError with both numbers where the run directory's disk, or a quota, lacks bytes or inodes."""
    folder = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not os.access(folder, os.W_OK):
        raise EnvironmentFaultError(f"{folder}: no permission to write; name another place with output or --run-dir")
    disks.check_room(
        run_dir,
        num_bytes=sum(map(needed_disk_bytes, plans)),
        num_files=sum(FILES_A_RUN + plan.chosen.num_ranks * FILES_A_RANK for plan in plans),
        what="checkpoints and the exported model need",
        remedy="make room, or name another file system with output or --run-dir",
    )
