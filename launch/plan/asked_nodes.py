"""Which nodes of a Slurm partition a plan is asked for: by the command line, or on a login node by the job file."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from shardwise.trainer.spec.job.sections import Job, SlurmJob

if TYPE_CHECKING:  # read where a partition is asked for
    from shardwise.slurm.partition_hardware import PartitionHardware


class AskedNodes(NamedTuple):
    """Options of the command line about nodes."""

    partition: str | None = None
    num_nodes: int | None = None
    constraint: str | None = None


def read_asked_nodes(
    asked: AskedNodes, job: Job, *, spec: str | None, environment: Mapping[str, str]
) -> "PartitionHardware | None":
    """The nodes to plan for; None where it is a machine that was asked for, or this one.

    Asked for without a partition, they are the job's, or else the cluster's default one.
    """
    name = asked.partition or job.slurm.partition
    if not any(asked) and (name is None or spec is not None or not _is_login_node(environment)):
        return None
    from shardwise.launch.plan.partition_hardware import read_partition_hardware
    from shardwise.slurm.job_limits import share_of_job

    found = read_partition_hardware(
        name,
        nodes=asked.num_nodes or job.slurm.nodes or 1,
        spec=spec,
        constraint=asked.constraint or job.slurm.constraint or sbatch_option(job.slurm.extra, "--constraint", "-C"),
        **charge_of(job.slurm, environment),
        share=share_of_job(job.slurm),
        environment=environment,
    )
    if asked.partition is not None:
        return found
    which = "the cluster's default" if name is None else "which the job file names (slurm.partition)"
    said = f"planned for partition {found.partition.name}, {which}"
    return replace(found, hardware=replace(found.hardware, notes=(said, *found.hardware.notes)))


def charge_of(slurm: SlurmJob, environment: Mapping[str, str]) -> dict[str, str | None]:
    """`account` and `qos` as sbatch will read them: of the job file, of slurm.extra, of the environment."""
    return {
        "account": slurm.account or sbatch_option(slurm.extra, "--account", "-A") or environment.get("SBATCH_ACCOUNT"),
        "qos": slurm.qos or sbatch_option(slurm.extra, "--qos", "-q") or environment.get("SBATCH_QOS"),
    }


def sbatch_option(extra: Sequence[str], long: str, short: str) -> str | None:
    """The value of an option in slurm.extra: `--constraint=a100`, `--constraint a100`, `-Ca100` or `-C a100`."""
    words = [part for option in extra for part in option.split(maxsplit=1)]
    for number, word in enumerate(words):
        if word in (long, short):
            return words[number + 1] if number + 1 < len(words) else None
        if word.startswith(f"{long}="):
            return word.removeprefix(f"{long}=")
        if word.startswith(short) and not word.startswith("--"):
            return word.removeprefix(short).removeprefix("=")
    return None


def _is_login_node(environment: Mapping[str, str]) -> bool:
    from shardwise.launch.probe.host import read_host

    slurm = read_host(environment=environment).slurm
    if slurm is None or not slurm.has_sbatch or slurm.job_id is not None:
        return False  # and no GPU is asked
    from shardwise.launch.probe.machine import read_hardware
    from shardwise.slurm.allocation import is_login_node

    return is_login_node(read_hardware(environment=environment))
