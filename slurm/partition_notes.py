"""What a plan for a partition takes for granted, in sentences. Pure."""

import shlex
from collections.abc import Iterator

from slurm.cluster import Partition, Preemption
from slurm.node_groups import Choice, NodeGroup
from slurm.text.quantities import format_duration
from trainer.planning.tables.gpu_specs import gpu_spec
from trainer.spec.hardware import Gpu, Hardware
from trainer.spec.units import format_bytes


def partition_notes(
    partition: Partition,
    choice: Choice,
    gpus: tuple[Gpu, ...],
    *,
    asked: tuple[int, int | None] | None,
    limited_by: str | None = None,
    stated: Hardware | None,
    probed: Hardware | None,
) -> tuple[str, ...]:
    """Which nodes they are, what was assumed of them and what else the partition has.

    `asked` are the cores and the RAM of a job that does not take whole nodes, `limited_by` what keeps it from that
    where it did not ask for less itself; `stated` is what --hardware names, and
    `probed` the same where it is a file.
    """
    words = None if asked is None else _asked_words(len(gpus), *asked)
    if limited_by is not None:
        words = f"{words}, the most that it may have ({limited_by}),"
    return (
        *_node_notes(partition, choice, words),
        *_card_notes(choice.group, gpus, stated=stated),
        *_assumed_notes(partition, choice.group, gpus, probed=probed),
        *_other_notes(partition, choice),
    )


def _node_notes(partition: Partition, choice: Choice, asked: str | None) -> Iterator[str]:
    """Which nodes they are, and what a job has of each."""
    group = choice.group
    forced = " (not kept to it: OverSubscribe=FORCE)" if partition.is_oversubscribed else ""
    has = f"a job is taken to have whole nodes{forced}" if asked is None else f"a job asks for {asked} of each"
    yield f"partition {partition.name}: {group.words}; {has}"
    if choice.num_hidden:
        yield f"{choice.num_hidden} of its nodes are not shown by Slurm (powered down) and are taken to be alike"
    if group.num_in_service < group.num_nodes:
        yield f"{group.num_in_service} of these {group.num_nodes} nodes are in service now"


def _asked_words(gpus: int, cores: int, ram: int | None) -> str:
    words = [f"{gpus} GPU{'s' if gpus > 1 else ''}"] if gpus else []
    words += [f"{cores} cores"] + ([f"{format_bytes(ram)} RAM"] if ram is not None else [])
    return ", ".join(words)


def _other_notes(partition: Partition, choice: Choice) -> Iterator[str]:
    """What else is in the partition, and how to keep to the nodes that are planned for."""
    if choice.others:
        others = "; ".join(other.words for other in choice.others)
        yield f"the partition also has {others}; {_selecting_words(choice)}"
    for other in choice.group.other_gpus:
        yield f"not used: {other.count} x gpu:{other.kind} on the same nodes"
    if partition.preemption is not Preemption.OFF and partition.grace_time_s:
        yield f"jobs may make way for others here, {format_duration(partition.grace_time_s)} after a warning"


def _selecting_words(choice: Choice) -> str:
    if choice.is_told_by_gres:
        return f"--gres={choice.group.gres} keeps to the first"
    if choice.constraint is None:
        return "no feature tells them apart, so a job may get these"
    return f"--constraint={choice.constraint} keeps to the first"


def _card_notes(group: NodeGroup, gpus: tuple[Gpu, ...], *, stated: Hardware | None) -> list[str]:
    if stated is not None:
        said = f"the card is that of --hardware {stated.source.removeprefix('catalogue ')}"
        return [said if group.num_gpus else f"{said}; Slurm lists no GPU here"] if gpus else []
    if not gpus:
        return ["Slurm lists no GPU here; where the nodes have some, --hardware 4xNAME states them"]
    assert group.card is not None
    if group.is_mig:
        return [
            f"{group.num_gpus} slices a node ({group.card.told_by}), of which a job uses one; its memory follows from "
            "its profile"
        ]
    others = [row for row in group.card.fits if row != gpus[0].name]
    if others:
        return [
            f"{group.card.told_by} fits {', '.join((gpus[0].name, *others))}: the first is assumed; "
            f"--hardware {group.num_gpus}x{others[0]} states another"
        ]
    return [f"{group.card.told_by} is taken for {gpus[0].name}"]


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
        f"assumed from the catalogue, since Slurm does not say: {link} between GPUs, a network of "
        f"{format_bytes(row.network_bytes_per_s)}/s a node, no NVMe; `{probe_line(partition, group, '--measure')}` "
        "measures them for --hardware hw.json"
    ]


def probe_line(partition: Partition, group: NodeGroup, *options: str) -> str:
    """The command that probes a whole node of the partition."""
    gres = [f"--gres={group.gres}"] if group.gres else []
    asked = ["srun", f"--partition={partition.name}", "--nodes=1", "--exclusive", *gres]
    return shlex.join([*asked, "shardwise", "probe", *options, "-o", "hw.json"])
