"""The hardware of nodes of a partition as Slurm reports it; assumptions about the rest are stated in notes. Pure.

Slurm reports GPUs by type and count, cores and RAM. Links, disks, rates and libraries come from a `hardware.json` that
was probed on such a node, else from the catalogue. The plan is for whole nodes: the job requests them (`--exclusive`),
and gets the RAM of a node less what Slurm reserves for itself, bounded by the partition's limits.
"""

import shlex
from collections.abc import Iterator

from msgspec.structs import replace

from shardwise.slurm.cluster import Partition, PartitionState, format_duration
from shardwise.slurm.node_groups import Choice, NodeGroup, gpus_of_row
from shardwise.trainer.planning.tables.gpu_names import card_name
from shardwise.trainer.planning.tables.gpu_specs import gpu_spec
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.hardware import Gpu, Hardware, Host, Link, MeasuredRates
from shardwise.trainer.spec.job.sections import SlurmJob
from shardwise.trainer.spec.units import format_bytes
from shardwise.trainer.spec.value import Value


class NodeShare(Value, frozen=True, kw_only=True):
    """The resources requested of each node; None: all of them, or in proportion to the GPUs."""

    gpus: int | None = None
    cores: int | None = None
    ram_bytes: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.gpus is None and self.cores is None and self.ram_bytes is None


def share_of_job(slurm: SlurmJob) -> NodeShare:
    """The share that a job file requests: slurm.gpus, slurm.cores, slurm.memory."""
    return NodeShare(gpus=slurm.gpus, cores=slurm.cores, ram_bytes=slurm.memory)


def share_of_node(
    share: NodeShare, *, num_gpus: int, num_cores: int, ram_bytes: int | None
) -> tuple[int, int, int | None]:
    """GPUs, cores and RAM of a job on a node; InputError for more than the node has."""
    gpus = num_gpus if share.gpus is None else share.gpus
    part = gpus / num_gpus if num_gpus else 1.0
    cores = share.cores or max(1, int(num_cores * part))
    ram = share.ram_bytes or (None if ram_bytes is None else int(ram_bytes * part))
    if gpus > num_gpus:
        raise InputError(f"slurm.gpus is {gpus}; the nodes have {num_gpus}")
    if cores > num_cores:
        raise InputError(f"slurm.cores is {cores}; jobs get at most {num_cores} of a node")
    if ram is not None and ram_bytes is not None and ram > ram_bytes:
        raise InputError(f"slurm.memory is {format_bytes(ram)}; jobs get at most {format_bytes(ram_bytes)} of a node")
    return gpus, cores, ram


WHOLE_NODES = NodeShare()


class PartitionHardware(Value, frozen=True, kw_only=True):
    """The hardware of a job that requests nodes of a partition."""

    hardware: Hardware
    partition: Partition
    group: NodeGroup
    constraint: str | None = None  # a feature to request, so that no nodes of another kind are allocated
    num_allowed_nodes: int  # for one job


def hardware_of(
    partition: Partition,
    choice: Choice,
    *,
    num_nodes: int,
    stated: Hardware | None = None,
    share: NodeShare = WHOLE_NODES,
) -> PartitionHardware:
    """The hardware of `num_nodes` nodes of the chosen group, or of a share of each.

    `stated` is the value of `--hardware`, a probed node or a SPEC. InputError if `stated` disagrees with Slurm, if the
    card is unknown, and for more nodes than there are or than the partition gives a job; EnvironmentFaultError if the
    partition starts no jobs.
    """
    _check_state(partition, choice)
    if stated is not None and not choice.group.names and not choice.group.num_gpus:
        # Powered down and without accounting: the job requests the stated GPUs.
        choice = replace(choice, group=replace(choice.group, num_gpus=len(stated.gpus)))
    _check_count(partition, choice, num_nodes)
    gpus = _gpus(partition, choice.group, stated)
    if stated is not None:
        _check_stated(partition, choice.group, stated, num_nodes)
    probed = None if stated is None or stated.source.startswith("catalogue") else stated
    node_cores, node_ram = _granted(partition, choice.group)
    used, cores, ram = share_of_node(share, num_gpus=len(gpus), num_cores=node_cores, ram_bytes=node_ram)
    gpus = gpus[:used]
    hardware = Hardware(
        gpus=gpus,
        host=_host(cores, ram, probed),
        num_nodes=num_nodes,
        num_cpu_devices=stated.num_cpu_devices if stated is not None and not gpus else 1,
        links=_links(probed, used) if probed else (),
        libraries=probed.libraries if probed else {},
        unfit_libraries=probed.unfit_libraries if probed else {},
        notes=partition_notes(
            partition,
            choice,
            gpus,
            share=None if share.is_whole else (cores, ram),
            stated=stated,
            probed=probed,
        ),
        rates=probed.rates if probed else MeasuredRates(),
        source=f"partition {partition.name}",
    )
    return PartitionHardware(
        hardware=hardware,
        partition=partition,
        group=choice.group,
        constraint=choice.constraint,
        num_allowed_nodes=_allowed_nodes(partition, choice)[0],
    )


def _check_state(partition: Partition, choice: Choice) -> None:
    if partition.state is not PartitionState.UP:
        raise EnvironmentFaultError(
            f"partition {partition.name} is {partition.state}: it starts no new jobs\n"
            "choose another, or ask the administrators when it is back in service"
        )
    if partition.num_nodes == 0:
        raise EnvironmentFaultError(f"partition {partition.name} has no nodes")
    if choice.group.names and choice.group.num_in_service == 0:
        raise EnvironmentFaultError(
            f"partition {partition.name}: all of its {choice.group.summary} are down or drained\n"
            "choose another partition, or ask the administrators when they are back in service"
        )


def _allowed_nodes(partition: Partition, choice: Choice) -> tuple[int, str]:
    """The largest number of nodes for a job, and what sets it."""
    most = [(choice.num_nodes, f"it has {choice.group.summary}")]
    if partition.max_nodes is not None:
        most.append((partition.max_nodes, "its MaxNodes"))
    return min(most, key=lambda pair: pair[0])


def _check_count(partition: Partition, choice: Choice, num_nodes: int) -> None:
    allowed, why = _allowed_nodes(partition, choice)
    if num_nodes > allowed:
        others = "; ".join(other.summary for other in choice.others)
        more = f"\nit also has {others}, which --constraint selects" if others else ""
        raise InputError(f"--nodes {num_nodes}: partition {partition.name} gives a job {allowed} ({why}){more}")
    if num_nodes < partition.min_nodes:
        raise InputError(
            f"--nodes {num_nodes}: partition {partition.name} accepts jobs of {partition.min_nodes} or more"
        )


def _gpus(partition: Partition, group: NodeGroup, stated: Hardware | None) -> tuple[Gpu, ...]:
    """The GPUs of a node: the stated ones, else those of the catalogue."""
    if stated is not None:
        return tuple(_elsewhere(gpu, number) for number, gpu in enumerate(stated.gpus))
    if not group.num_gpus and not group.names:
        raise InputError(
            f"partition {partition.name}: Slurm shows none of its nodes (powered down) and counts no GPUs of them\n"
            "--hardware states what they have, such as 8xA100-SXM4-80GB, or 1xCPU for none"
        )
    if not group.num_gpus:
        return ()
    if group.card is None:
        raise InputError(_which_card(partition, group))
    if group.is_mig:
        return (group.card.gpu,)
    return gpus_of_row(group.card.gpu.name, group.num_gpus)


def _links(probed: Hardware, num_gpus: int) -> tuple[Link, ...]:
    """The links between the first GPUs of a probed node, numbered from 0."""
    numbers = {gpu.index: number for number, gpu in enumerate(probed.gpus[:num_gpus])}
    return tuple(
        replace(link, a=numbers[link.a], b=numbers[link.b])
        for link in probed.links
        if {link.a, link.b} <= numbers.keys()
    )


def _elsewhere(gpu: Gpu, number: int) -> Gpu:
    """The same card in another node: without processes and identity."""
    return replace(gpu, index=number, uuid=None, free_bytes=None, processes=())


def _which_card(partition: Partition, group: NodeGroup) -> str:
    unknown = f"calls its GPUs gpu:{group.gpu_type}, which is no card of the catalogue"
    problem = unknown if group.gpu_type else f"does not name the card of its {group.gres}"
    return (
        f"partition {partition.name}: Slurm {problem}; name it with\n"
        f"--hardware {group.num_gpus}xA100-SXM4-80GB, or the card that they are, or with --hardware hw.json, made by\n"
        f"{probe_line(partition, group)}"
    )


def _check_stated(partition: Partition, group: NodeGroup, stated: Hardware, num_nodes: int) -> None:
    """Raises InputError if --hardware and Slurm differ on the same node."""
    count = len(stated.gpus)
    if group.num_gpus and count != group.gpus_used:
        raise InputError(
            f"--hardware names {count} GPUs a node, partition {partition.name} has {group.gpus_used} ({group.gres})"
        )
    if group.num_gpus and not all(_agrees(group, gpu) for gpu in stated.gpus):
        raise InputError(
            f"--hardware names {stated.gpus[0].spec_name or stated.gpus[0].name}, partition {partition.name} has "
            f"{_candidates(group)} ({group.gres})"
        )
    if stated.num_nodes not in (1, num_nodes):
        raise InputError(f"--hardware names {stated.num_nodes} nodes, --nodes {num_nodes}; omit the former")


def _agrees(group: NodeGroup, gpu: Gpu) -> bool:
    """True if a card matches Slurm's type, or a feature."""
    if group.is_mig:
        return bool(gpu.is_mig_on)
    if group.card is not None:
        return gpu.spec_name in group.card.fits
    wanted = card_name(group.gpu_type or "").model
    return not wanted or wanted in {card_name(gpu.name).model, card_name(gpu.name).model.removeprefix("rtx")}


def _candidates(group: NodeGroup) -> str:
    if group.card is None:
        return f"gpu:{group.gpu_type}"
    return group.card.gpu.name if group.is_mig else " or ".join(group.card.fits)


def _granted(partition: Partition, group: NodeGroup) -> tuple[int, int | None]:
    """The largest cores and RAM of a node for a job."""
    cores = _least(group.num_cores, partition.max_cpus_per_node) or 1
    per_cpu = partition.max_ram_per_cpu_bytes
    return cores, _least(
        group.ram_bytes, partition.max_ram_per_node_bytes, None if per_cpu is None else per_cpu * cores
    )


def _host(cores: int, ram: int | None, probed: Hardware | None) -> Host:
    if probed is None:
        return Host(
            cpu_name=None,
            num_cores=cores,
            ram_bytes=ram,
            ram_available_bytes=None,
            usable_ram_bytes=ram,
            pinned_limit_bytes=ram,
        )
    return replace(
        probed.host,
        num_cores=cores,
        ram_bytes=ram,
        ram_available_bytes=None,
        usable_ram_bytes=ram,
        pinned_limit_bytes=_least(ram, probed.host.pinned_limit_bytes),
        slurm=None,
    )


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def partition_notes(
    partition: Partition,
    choice: Choice,
    gpus: tuple[Gpu, ...],
    *,
    share: tuple[int, int | None] | None,
    stated: Hardware | None,
    probed: Hardware | None,
) -> tuple[str, ...]:
    """Notes on the nodes, the assumptions about them and the other nodes of the partition.

    `share` are the cores and the RAM of a job that does not use whole nodes; `stated` is the value of --hardware, and
    `probed` the same if it is a file.
    """
    part = None if share is None else _describe_share(len(gpus), *share)
    return (
        *_node_notes(partition, choice, part),
        *_card_notes(choice.group, gpus, stated=stated),
        *_assumed_notes(partition, choice.group, gpus, probed=probed),
        *_other_notes(partition, choice),
    )


def _node_notes(partition: Partition, choice: Choice, share: str | None) -> Iterator[str]:
    """Notes on the nodes and the share of a job."""
    group = choice.group
    forced = " (not guaranteed: OverSubscribe=FORCE)" if partition.is_oversubscribed else ""
    has = f"a job is assumed to have whole nodes{forced}" if share is None else f"a job requests {share} of each"
    yield f"partition {partition.name}: {group.summary}; {has}"
    if choice.num_hidden:
        yield f"{choice.num_hidden} of its nodes are not shown by Slurm (powered down) and are assumed to be alike"
    if group.num_in_service < group.num_nodes:
        yield f"{group.num_in_service} of these {group.num_nodes} nodes are in service now"


def _describe_share(gpus: int, cores: int, ram: int | None) -> str:
    parts = [f"{gpus} GPU{'s' if gpus > 1 else ''}"] if gpus else []
    parts += [f"{cores} cores"] + ([f"{format_bytes(ram)} RAM"] if ram is not None else [])
    return ", ".join(parts)


def _other_notes(partition: Partition, choice: Choice) -> Iterator[str]:
    """Notes on the other nodes of the partition, and on the option that excludes them."""
    if choice.others:
        others = "; ".join(other.summary for other in choice.others)
        yield f"the partition also has {others}; {_selection(choice)}"
    for other in choice.group.other_gpus:
        yield f"not used: {other.count} x gpu:{other.kind} on the same nodes"
    if partition.grace_time_s:
        yield f"jobs may be preempted by others here, {format_duration(partition.grace_time_s)} after a warning"


def _selection(choice: Choice) -> str:
    if choice.is_selected_by_gres:
        return f"--gres={choice.group.gres} selects the first"
    if choice.constraint is None:
        return "no feature distinguishes them, so a job may get these"
    return f"--constraint={choice.constraint} selects the first"


def _card_notes(group: NodeGroup, gpus: tuple[Gpu, ...], *, stated: Hardware | None) -> list[str]:
    if stated is not None:
        card = f"the card is that of --hardware {stated.source.removeprefix('catalogue ')}"
        return [card if group.num_gpus else f"{card}; Slurm lists no GPU here"] if gpus else []
    if not gpus:
        return ["Slurm lists no GPU here; if the nodes have some, --hardware 4xNAME states them"]
    assert group.card is not None
    if group.is_mig:
        return [
            f"{group.num_gpus} slices a node ({group.card.source}), of which a job uses one; its memory follows from "
            "its profile"
        ]
    others = [row for row in group.card.fits if row != gpus[0].name]
    if others:
        return [
            f"{group.card.source} fits {', '.join((gpus[0].name, *others))}: the first is assumed; "
            f"--hardware {group.num_gpus}x{others[0]} states another"
        ]
    return [f"{group.card.source} is assumed to be {gpus[0].name}"]


def _assumed_notes(
    partition: Partition, group: NodeGroup, gpus: tuple[Gpu, ...], *, probed: Hardware | None
) -> list[str]:
    if probed is not None:
        return [f"links, disks, rates and libraries are those that {probed.source} has of one node"]
    row = gpu_spec(gpus[0].spec_name) if gpus else None
    if row is None:
        return []
    link = f"NVLink {format_bytes(row.nvlink_bytes_per_s)}/s" if row.nvlink_bytes_per_s else "PCIe alone"
    return [
        f"assumed from the catalogue, as Slurm does not report it: {link} between GPUs, a network of "
        f"{format_bytes(row.network_bytes_per_s)}/s a node, no NVMe; `{probe_line(partition, group, '--measure')}` "
        "measures them for --hardware hw.json"
    ]


def probe_line(partition: Partition, group: NodeGroup, *options: str) -> str:
    """The command that probes a whole node of the partition."""
    gres = [f"--gres={group.gres}"] if group.gres else []
    argv = ["srun", f"--partition={partition.name}", "--nodes=1", "--exclusive", *gres]
    return shlex.join([*argv, "shardwise", "probe", *options, "-o", "hw.json"])
