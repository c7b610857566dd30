"""The hardware of a Slurm partition, and the nodes that a plan is made for on a login node."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from shardwise.launch.plan.gather import NodeOptions
from shardwise.launch.probe.host import read_host
from shardwise.launch.probe.machine import read_hardware, read_libraries
from shardwise.slurm.cluster import Partition
from shardwise.slurm.jobs import is_login_node
from shardwise.slurm.node_groups import choose_group
from shardwise.slurm.partition_hardware import WHOLE_NODES, NodeShare, PartitionHardware, hardware_of, share_of_job
from shardwise.slurm.queries import read_nodes, read_partitions
from shardwise.trainer.planning.tables.gpu_names import hardware_from_spec
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import InputError, close_matches
from shardwise.trainer.spec.hardware import Hardware, Host
from shardwise.trainer.spec.job.sections import Job

_NAMES_SHOWN = 12
_UNREAD_LIMITS = (
    "limits of your account and QOS are not included: `shardwise submit --dry-run` tests the job against them"
)


def read_nodes_to_plan(
    options: NodeOptions, job: Job, *, spec: str | None, environment: Mapping[str, str]
) -> PartitionHardware | None:
    """The nodes to plan for; None if --hardware or this machine is planned for.

    Options without a partition mean the job's partition, or else the cluster's default one.
    """
    name = options.partition or job.slurm.partition
    if not any(options) and not _is_login_node(environment):
        return None
    found = read_partition_hardware(
        name,
        nodes=options.num_nodes or job.slurm.nodes or 1,
        spec=spec,
        constraint=options.constraint or job.slurm.constraint or sbatch_option(job.slurm.extra, "--constraint", "-C"),
        share=share_of_job(job.slurm),
        environment=environment,
    )
    if options.partition is not None:
        return found
    which = "the cluster's default" if name is None else "which the job file names (slurm.partition)"
    note = f"planned for partition {found.partition.name}, {which}"
    return replace(found, hardware=replace(found.hardware, notes=(note, *found.hardware.notes)))


def read_partition_hardware(
    partition: str | None,
    *,
    nodes: int,
    spec: str | None = None,
    constraint: str | None = None,
    share: NodeShare = WHOLE_NODES,
    environment: Mapping[str, str] = os.environ,
) -> PartitionHardware:
    """Hardware for a job of `nodes` nodes of a partition; None stands for the default partition.

    `spec`, the value of --hardware, states what Slurm does not know: a SPEC, or a file of `shardwise probe -o`.
    InputError if Slurm has no such partition, constraint or number of nodes, or `spec` disagrees with it;
    EnvironmentFaultError if Slurm does not respond or the partition starts no jobs.
    """
    found = _find(partition, read_partitions(environment))
    stated = None if spec is None else _stated(spec)
    num_gpus = len(stated.gpus) if stated is not None and stated.gpus else None
    choice = choose_group(found, read_nodes(environment), constraint=constraint, num_gpus=num_gpus)
    described = hardware_of(found, choice, num_nodes=nodes, stated=stated, share=share)
    hardware = replace(described.hardware, notes=(*described.hardware.notes, _UNREAD_LIMITS))
    if not hardware.libraries:  # the nodes see the same files, so jobs run this Python
        hardware = replace(hardware, libraries=read_libraries())
    return replace(described, hardware=hardware)


def sbatch_option(extra: Sequence[str], long: str, short: str) -> str | None:
    """The value of an option in slurm.extra: `--constraint=a100`, `--constraint a100`, `-Ca100` or `-C a100`."""
    parts = [part for option in extra for part in option.split(maxsplit=1)]
    for number, text in enumerate(parts):
        if text in (long, short):
            return parts[number + 1] if number + 1 < len(parts) else None
        if text.startswith(f"{long}="):
            return text.removeprefix(f"{long}=")
        if text.startswith(short) and not text.startswith("--"):
            return text.removeprefix(short).removeprefix("=")
    return None


def _is_login_node(environment: Mapping[str, str]) -> bool:
    slurm = read_host(environment=environment).slurm
    if slurm is None or not slurm.has_sbatch or slurm.job_id is not None:
        return False  # without a query of the GPUs
    return is_login_node(read_hardware(environment=environment))


def _find(name: str | None, partitions: tuple[Partition, ...]) -> Partition:
    found = next((one for one in partitions if (one.is_default if name is None else one.name == name)), None)
    if found is not None:
        return found
    names = [one.name for one in partitions]
    if name is None:
        raise InputError(f"this cluster has no default partition; --partition names one of {', '.join(names)}")
    near = close_matches(name, names, count=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "it may be hidden from you"
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    raise InputError(f"--partition {name}: Slurm shows no such partition; {hint}\nit shows {shown or 'none'}")


def _stated(spec: str) -> Hardware:
    if spec.endswith(".json"):
        return replace(codec.read(Path(spec), Hardware), source=spec)
    unknown = Host(cpu_name=None, num_cores=None, ram_bytes=None, ram_available_bytes=None)
    return hardware_from_spec(spec, local_host=lambda: unknown)
