"""Submission to Slurm, up to sbatch: plans for the partition, its node counts, and checks of what a job will need.

Before a job waits in a queue for hours, it is checked that its files exist and that there is room for its output.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwise.launch.inputs.hub import hub_cache
from shardwise.launch.inputs.trusted_code import kernel_of
from shardwise.launch.job import config_home, site_config, state_home
from shardwise.launch.job.layers import ResolvedJob, read_job_layers
from shardwise.launch.plan.gather import (
    PlanInputs,
    plan_inputs,
    profile_data,
    read_inputs,
    read_machine,
    recorded_versions,
)
from shardwise.launch.plan.partition import read_partition_hardware, sbatch_option
from shardwise.launch.probe import disks
from shardwise.launch.run.disk_needs import missing_for, needed_disk_bytes
from shardwise.launch.rundir.paths import output_base
from shardwise.launch.track.start import check_trackers
from shardwise.slurm.cluster import describe_num_jobs, format_duration, num_jobs, parse_duration
from shardwise.slurm.partition_hardware import PartitionHardware, share_of_job
from shardwise.slurm.sbatch import BatchJob, Container, container_of, warning_s
from shardwise.slurm.submit import knows_pyxis
from shardwise.trainer.planning.candidates import run_hours
from shardwise.trainer.planning.device import machine_text
from shardwise.trainer.planning.explain import comparison
from shardwise.trainer.planning.explain.comparison import counts_to_try
from shardwise.trainer.planning.page.content import Section
from shardwise.trainer.planning.planner import Extent, context_of
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError, NothingFitsError, ShardwiseError
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.job.sections import NodeNetwork, SlurmJob
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.units import format_seconds

SAVE_BYTES_PER_S = 500 * 10**6  # of a shared file system on a busy day
TIME_MARGIN = 1.3  # predictions are wrong, and a queue is long
SETUP_S = 900  # preparing data, compiling, exporting
ROUNDED_TO_S = 300
FILES_A_RUN = 100  # its records and logs, an export
FILES_A_RANK = 20  # logs of attempts, and of each checkpoint a shard


class Point(NamedTuple):
    """A run that is submitted: one, or one of a sweep."""

    inputs: PlanInputs
    plan: Plan
    overrides: tuple[str, ...]  # of the point

    @property
    def hours(self) -> float:
        """Predicted duration of the run."""
        return run_hours(context_of(self.plan), self.plan.chosen)


class Target(NamedTuple):
    """The partition of the jobs, and their plans."""

    points: tuple[Point, ...]
    hardware: Hardware
    found: PartitionHardware | None  # None: no Slurm is here, and the hardware is that of --hardware

    @property
    def resolved(self) -> ResolvedJob:
        return self.points[0].inputs.resolved

    @property
    def slurm(self) -> SlurmJob:
        return self.resolved.job.slurm

    @property
    def hours(self) -> float:
        """Of the longest point."""
        return max(point.hours for point in self.points)


def read_target(
    job: Path,
    overrides: Sequence[str],
    points: Sequence[tuple[str, ...]],
    *,
    spec: str | None,
    environment: Mapping[str, str],
    needs_slurm: bool,
) -> Target:
    """The plans of every point; every fault of the job, and a plan that does not fit the nodes, is reported here."""
    first = read_job_layers(
        job,
        [*overrides, *points[0]],
        config_home=config_home(environment),
        site_config=site_config(environment),
    )
    slurm = first.job.slurm
    if slurm.chain > 1 and len(points) > 1:
        raise InputError(
            "slurm.chain and --sweep exclude each other; a point that is not done is queued again by itself"
        )
    if needs_slurm and slurm.container is None:  # an image has its own packages
        check_trackers(first.job, environment, on_node=True)
    found, hardware = _read_nodes(slurm, spec, environment, needs_slurm=needs_slurm)
    return Target(tuple(_read_point(job, overrides, point, hardware, environment) for point in points), hardware, found)


def batch_job(target: Target, run_dir: Path, *, num_points: int | None, environment: Mapping[str, str]) -> BatchJob:
    """The request to sbatch."""
    slurm, found, first = target.slurm, target.found, target.points[0].plan
    time_s = time_limit_s(target)
    gpus = len(target.hardware.gpus)
    kind = f"{found.group.gpu_type}:" if found is not None and found.group.gpu_type else ""
    has_gres = gpus > 0 and (found is None or found.group.num_gpus > 0)
    host = target.hardware.host
    save_s = first.chosen.memory.checkpoint_bytes / SAVE_BYTES_PER_S
    return BatchJob(
        name=output_base(target.resolved.job.output, target.resolved.name).name,
        summary=f"{first.chosen.strategy.name} on {machine_text(target.hardware)}, {time_text(target)}",
        written_by=f"shardwise {recorded_versions()['shardwise']}",
        run_dir=str(run_dir),
        workdir=str(Path.cwd()),
        program_dir=str(Path(sys.executable).parent),
        num_nodes=target.hardware.num_nodes,
        gres=f"gpu:{kind}{gpus}" if has_gres else None,
        uses_gres_option=found is not None and (found.group.is_mig or bool(found.group.other_gpus)),
        num_cores=slurm.cores if found is None else host.num_cores,
        memory_bytes=slurm.memory if found is None else host.ram_bytes,
        uses_whole_nodes=share_of_job(slurm).is_whole,
        time_limit_s=time_s,
        warning_s=warning_s(step_s=first.chosen.speed.step_s, save_s=save_s, time_limit_s=time_s),
        partition=slurm.partition,
        account=slurm.account,
        qos=slurm.qos,
        constraint=_constraint(slurm, found),
        reservation=slurm.reservation,
        mail=slurm.mail,
        comment=slurm.comment,
        requeue=slurm.requeue,
        num_points=num_points,
        extra=slurm.extra,
        modules=slurm.modules,
        container=_container(target, run_dir, environment),
        is_offline=slurm.network is NodeNetwork.NONE,
        scratch=target.resolved.folders.get("scratch"),
    )


def time_limit_s(target: Target) -> int:
    """Time limit of one job: as requested, else the prediction with a margin, at most the partition's limit."""
    most = None if target.found is None else target.found.partition.max_time_s
    requested = parse_duration(target.slurm.time)
    if requested is not None:
        if most is not None and requested > most:
            raise InputError(
                f"slurm.time is {target.slurm.time}; a job may take {format_duration(most)} at most there.\n"
                "Remove it: an unfinished run continues in a further job"
            )
        return requested
    wanted = target.hours * 3600 * TIME_MARGIN + SETUP_S
    rounded = round(-(-wanted // ROUNDED_TO_S) * ROUNDED_TO_S)
    return rounded if most is None else min(rounded, most)


def time_text(target: Target) -> str:
    """`predicted 38 h 10 min: 2 jobs of 1-00:00:00`."""
    limit = time_limit_s(target)
    jobs = num_jobs(target.hours, limit)
    each = f"1 job of {format_duration(limit)}" if jobs == 1 else f"{jobs} jobs of {format_duration(limit)}"
    longest = "the longest point is " if len(target.points) > 1 else ""
    return f"{longest}predicted {format_seconds(target.hours * 3600)}: {each}"


def _read_nodes(
    slurm: SlurmJob, spec: str | None, environment: Mapping[str, str], *, needs_slurm: bool
) -> tuple[PartitionHardware | None, Hardware]:
    if shutil.which("sbatch", path=environment.get("PATH")) is None:
        if needs_slurm or spec is None:
            raise EnvironmentFaultError(
                "sbatch is not here: submit on a login node of the cluster;\n"
                "elsewhere --dry-run --hardware 4x8xH100-SXM5-80GB prints the script for such nodes"
            )
        hardware = read_machine(spec)
        return None, replace(hardware, num_nodes=slurm.nodes or hardware.num_nodes)
    stated = None if spec is None else read_machine(spec)
    num_nodes = slurm.nodes or (1 if stated is None else stated.num_nodes)
    try:
        found = read_partition_hardware(
            slurm.partition,
            nodes=num_nodes,
            spec=spec,
            constraint=slurm.constraint or sbatch_option(slurm.extra, "--constraint", "-C"),
            share=share_of_job(slurm),
            environment=environment,
        )
    except EnvironmentFaultError:  # Slurm's programs without a cluster
        if needs_slurm or stated is None:
            raise
        return None, replace(stated, num_nodes=num_nodes)
    return found, found.hardware


def _read_point(
    job: Path, overrides: Sequence[str], point: tuple[str, ...], hardware: Hardware, environment: Mapping[str, str]
) -> Point:
    inputs = read_inputs(job, [*overrides, *point], machines=hardware, environment=environment)
    return Point(inputs, plan_inputs(inputs, profile_data(inputs), environment=environment), point)


def _constraint(slurm: SlurmJob, found: PartitionHardware | None) -> str | None:
    """The requested constraint, else the feature that selects the nodes of the plan."""
    if slurm.constraint is not None or sbatch_option(slurm.extra, "--constraint", "-C") is not None:
        return slurm.constraint
    return None if found is None else found.constraint


def _container(target: Target, run_dir: Path, environment: Mapping[str, str]) -> Container | None:
    image = target.slurm.container
    if image is None:
        return None
    if image.endswith((".sif", ".sqsh")):
        path = Path(image).expanduser().absolute()
        if not path.is_file():
            raise InputError(f"slurm.container: {image} is no file here")
        image = str(path)
    return container_of(image, folders=_folders(target, run_dir, environment), has_pyxis=knows_pyxis(environment))


def _folders(target: Target, run_dir: Path, environment: Mapping[str, str]) -> list[str]:
    """Paths that a run reads and writes, to mount in a container."""
    inputs = [point.inputs for point in target.points]
    named = [Path.cwd(), run_dir, inputs[0].cache, hub_cache(inputs[0].hub_home), state_home(environment)]
    named += [Path(scratch) for scratch in [target.resolved.folders.get("scratch")] if scratch]
    for each in inputs:
        read = [each.model.model_path, each.model.config_origin, each.request.tokenizer]
        read += [file.path for file in (*each.request.files, *each.request.eval_files) if not file.is_remote]
        named += [path if path.is_dir() else path.parent for path in map(Path, filter(None, read)) if path.exists()]
    return [os.path.abspath(path) for path in named]  # noqa: PTH100 - without following links: a container has the names


def node_counts_section(inputs: PlanInputs, plan: Plan) -> Section | None:
    """The numbers of nodes side by side, and jobs at the time limit; None if the machine is no partition's nodes."""
    found = inputs.partition
    if found is None:
        return None
    requested, place = plan.hardware.num_nodes, found.partition.name
    results = {
        count: plan if count == requested else _plan_for(count, inputs, plan)
        for count in counts_to_try(found.num_allowed_nodes, requested)
    }
    hours = run_hours(context_of(plan), plan.chosen)
    wanted = parse_duration(plan.job.slurm.time)
    limit, sentences = found.partition.max_time_s, []
    if wanted is not None and limit is not None and wanted > limit:
        sentences = [f"slurm.time {plan.job.slurm.time} is more than {place} allows, {format_duration(limit)}"]
    elif wanted is not None:
        limit = wanted
    nodes = f"{requested} node{'s' if requested > 1 else ''}"
    sentences.append(f"on {nodes}: {describe_num_jobs(hours, limit, place=place)}")
    return comparison.node_counts_section(results, place=place, allowed=found.num_allowed_nodes, sentences=sentences)


def _plan_for(num_nodes: int, inputs: PlanInputs, plan: Plan) -> Plan | ShardwiseError:
    hardware = replace(inputs.hardware, num_nodes=num_nodes)
    try:
        return plan_inputs(inputs._replace(hardware=hardware), plan.data, extent=Extent.SCREEN)
    except (NothingFitsError, InputError) as error:
        return error


def check_network(inputs: PlanInputs, plan: Plan, *, job_name: str) -> str | None:
    """A line on what the job will download, None if there is nothing; InputError where its nodes reach no hub."""
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


def check_output_room(plans: Sequence[Plan], run_dir: Path) -> None:
    """EnvironmentFaultError with both numbers if the run directory's disk, or a quota, lacks bytes or inodes."""
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
