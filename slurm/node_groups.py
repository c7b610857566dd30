"""Groups of equal nodes in a partition, their cards, and the group that a job is planned for. Pure.

Equal nodes have the same number of GPUs of the same card, the same cores and about the same RAM: nodes that were bought
together differ by some MiB, and a group has the RAM of its smallest node. A job runs on nodes of one group, since every
rank waits for the slowest.

Sites choose the names of cards: `a100`, `nvidia_h100_80gb_hbm3` (what NVML reports), `v100-sxm2-32gb`, `A100.80gb`,
`rtx_3090`; others omit the type and give nodes a feature (`A100-80GB`, `GPU_SKU:V100`, `hbm80g`, `gpu80`).
`trainer.planning.tables.gpu_names` finds the rows of a name and chooses among several. A card that is not in the
catalogue is not guessed.
"""

import re
from collections.abc import Iterable, Sequence

from shardwise.slurm.cluster import Gres, Node, Partition
from shardwise.trainer.planning.tables.gpu_names import (
    card_name,
    hardware_from_spec,
    mig_profile,
    of_memory,
    preferred_row,
    rows_of_model,
    rows_of_name,
)
from shardwise.trainer.planning.tables.gpu_specs import MIG_MARK, GpuSpec, gpu_spec
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import Gpu, Host
from shardwise.trainer.spec.units import GIB, format_bytes
from shardwise.trainer.spec.value import Value

# The usable part of a MIG slice's name: 4.75 GiB of 1g.5gb, 19.6 of 3g.20gb (MIG user guide, tables of profiles).
_MIG_USABLE_SHARE = 0.95
# Features on other memories, and on networks: mem512gb, scr50gb, ib40g.
_OTHER_SIZES = re.compile(
    r"^(cpu|mem|memory|ram|scr|scratch|tmp|local|disk|ssd|nvme|hdd|node|ib|eth|roce|net)([^a-z]|$)"
)
_GPU_MEMORY_GRES = re.compile(r"^(vram|gpu_?mem|gmem|gram)", re.IGNORECASE)
_NO_HOST = Host(cpu_name=None, num_cores=None, ram_bytes=None, ram_available_bytes=None)


class CardChoice(Value, frozen=True, kw_only=True):
    """The chosen card and its alternatives."""

    gpu: Gpu  # as the first of its node
    fits: tuple[str, ...]  # every row of the catalogue that matches
    source: str  # `gpu:a100`, `the feature A100-80GB`


def card_of(gres: Gres, features: Sequence[str] = (), others: Iterable[Gres] = ()) -> CardChoice | None:
    """The card of a node's GRES; None if the catalogue has none of that name, or there is no name.

    `others` are the node's other resources: some sites state the GPUs' memory there (`VramPerGpu:no_consume:94G`).
    """
    profile, rest = mig_profile(gres.kind or "")
    rows, source = rows_of_name(rest, _memory_hints(features, others)), f"gpu:{gres.kind}"
    if not card_name(rest).model:
        rows, source = _rows_of_features(features)
        rows = of_memory(rows, _memory_hints(features, others))
    if not rows:
        return None
    chosen = preferred_row(rows, gres.count)
    if profile is not None:
        return CardChoice(gpu=_mig_gpu(chosen, profile), fits=(chosen.name,), source=source)
    return CardChoice(gpu=gpus_of_row(chosen.name, 1)[0], fits=tuple(row.name for row in rows), source=source)


def gpus_of_row(name: str, count: int) -> tuple[Gpu, ...]:
    """`count` cards of a row of the catalogue."""
    return hardware_from_spec(f"{count}x{name}", local_host=lambda: _NO_HOST).gpus


def _memory_hints(features: Sequence[str], others: Iterable[Gres]) -> list[int]:
    names = [card_name(_value(feature)) for feature in features if not _OTHER_SIZES.match(feature.lower())]
    sizes = [one.count // GIB for one in others if _GPU_MEMORY_GRES.match(one.name) and one.count >= GIB]
    return [*(name.memory_gib for name in names if name.memory_gib), *sizes]


def _rows_of_features(features: Sequence[str]) -> tuple[tuple[GpuSpec, ...], str]:
    """The rows of the model that features name; none if they name several models or none."""
    found = {feature: rows for feature in features if (rows := _rows_of_feature(feature))}
    sets = set(found.values())
    return (sets.pop(), f"the feature {next(iter(found))}") if len(sets) == 1 else ((), "")


def _rows_of_feature(feature: str) -> tuple[GpuSpec, ...]:
    name = card_name(_value(feature))
    return rows_of_model(name.model) if name.model else ()


def _value(feature: str) -> str:
    """The second half of `GPU_SKU:V100`."""
    return re.split(r"[:=]", feature)[-1]


def _mig_gpu(row: GpuSpec, profile: str) -> Gpu:
    """A slice of a card; a profile that the catalogue does not have gets the memory in its name."""
    part = gpu_spec(f"{row.name}{MIG_MARK}{profile}")
    named_gib = int(re.findall(r"\d+", profile)[1])
    memory = part.usable_bytes if part is not None else int(named_gib * _MIG_USABLE_SHARE * GIB)
    return Gpu(
        index=0,
        name=f"{row.name.partition('-')[0]} MIG {profile}",
        spec_name=part.name if part is not None else None,
        memory_bytes=memory,
        usable_bytes=memory,
        compute_capability=row.compute_capability,
        is_mig_on=True,
    )


_SAME_RAM = 0.9  # of the largest of a group


class NodeGroup(Value, frozen=True, kw_only=True):
    """Equal nodes of a partition."""

    names: tuple[str, ...]  # () if Slurm shows none of them
    num_nodes: int
    num_in_service: int
    num_cores: int
    ram_bytes: int | None
    num_gpus: int = 0
    gpu_type: str | None = None  # of the GRES
    card: CardChoice | None = None
    other_gpus: tuple[Gres, ...] = ()  # of other types on the same nodes
    features: tuple[str, ...] = ()  # that each of them has

    @property
    def is_mig(self) -> bool:
        return self.card is not None and bool(self.card.gpu.is_mig_on)

    @property
    def gpus_used(self) -> int:
        """GPUs of a node that one job uses: of MIG slices one, which is the limit of NCCL and of a process."""
        return 1 if self.is_mig else self.num_gpus

    @property
    def gres(self) -> str | None:
        """The request for a node's GPUs: `gpu:a100:8`."""
        kind = f":{self.gpu_type}" if self.gpu_type else ""
        return f"gpu{kind}:{self.gpus_used}" if self.num_gpus else None

    @property
    def summary(self) -> str:
        """`4 nodes of 8 x A100-SXM4-80GB (128 cores, 1007 GiB RAM)`."""
        ram = f", {format_bytes(self.ram_bytes)} RAM" if self.ram_bytes is not None else ""
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"
        if not self.num_gpus:
            return f"{nodes} of {self.num_cores} cores{ram}"
        card = self.card.gpu.name if self.card else f"gpu:{self.gpu_type}" if self.gpu_type else "GPU"
        return f"{nodes} of {self.num_gpus} x {card} ({self.num_cores} cores{ram})"


class Choice(Value, frozen=True, kw_only=True):
    """The group to plan for, and the others of its partition."""

    group: NodeGroup
    others: tuple[NodeGroup, ...] = ()
    num_hidden: int = 0  # nodes of the partition that Slurm does not show: a cloud's that are powered down

    @property
    def num_nodes(self) -> int:
        """Nodes that a job could get; hidden nodes count as members of the only group there is."""
        return self.group.num_nodes + (self.num_hidden if self.group.names and not self.others else 0)

    @property
    def is_selected_by_gres(self) -> bool:
        """True if no node of another group satisfies the request for this one."""
        return not any(_would_serve(other, self.group) for other in self.others)

    @property
    def constraint(self) -> str | None:
        """A feature that selects the group; None if its GRES does, or no feature distinguishes it from the others."""
        if self.is_selected_by_gres:
            return None
        elsewhere = {feature for other in self.others for feature in other.features}
        own = [feature for feature in self.group.features if feature not in elsewhere]
        return min(own, key=lambda feature: card_name(feature) == card_name(""), default=None)


def choose_group(
    partition: Partition, nodes: Sequence[Node], *, constraint: str | None = None, num_gpus: int | None = None
) -> Choice:
    """The largest group of GPU nodes that `constraint` selects, else of CPU nodes.

    Groups of `num_gpus`, which the user stated, come before larger ones. InputError if no node has the features of
    `constraint`.
    """
    members = [node for node in nodes if partition.name in node.partitions]
    hidden = max(0, partition.num_nodes - len(members))
    matching = [node for node in members if constraint is None or satisfies(node.features, constraint)]
    if not matching and constraint is not None:
        known = sorted({feature for node in members for feature in node.features})
        features = f"its features are {', '.join(known[:20])}" if known else "its nodes have no features"
        raise InputError(f"--constraint {constraint}: no node of partition {partition.name} has it; {features}")
    if not members:
        return Choice(group=_group_of_tres(partition), num_hidden=hidden)

    def preference(group: NodeGroup) -> tuple[bool, bool, int, int]:
        memory = group.card.gpu.memory_bytes if group.card else 1
        return group.gpus_used == num_gpus, bool(group.num_gpus), group.num_nodes, group.num_gpus * memory

    group, *rest = sorted(group_nodes(matching), key=preference, reverse=True)
    passed_over = group_nodes([node for node in members if node not in matching])
    return Choice(group=group, others=(*rest, *passed_over), num_hidden=hidden)


def group_nodes(nodes: Iterable[Node]) -> tuple[NodeGroup, ...]:
    """Groups of equal nodes, in the order of their first ones."""
    alike: dict[tuple[object, ...], list[Node]] = {}
    for node in nodes:
        used, card = _gpus_of(node)
        key = (used, None if card is None else card.gpu, node.num_cores, _other_gpus(node, used))
        alike.setdefault(key, []).append(node)
    return tuple(_group(part) for members in alike.values() for part in _by_ram(members))


def satisfies(features: Sequence[str], constraint: str) -> bool:
    """True if a node with these features satisfies sbatch's `--constraint`: `a100&ib`, `[hbm80g|hbm40g]`, `(a|b)&c`.

    Counts of nodes (`ib*4`) are ignored.
    """
    parts = re.findall(r"[^\s&|,()\[\]*]+|[&|,()\[\]]", re.sub(r"\*\d+", "", constraint))
    has = set(features)
    operators = {"&": "and", ",": "and", "|": "or", "[": "(", "]": ")", "(": "(", ")": ")"}
    rule = [operators.get(part, str(part in has)) for part in parts]
    return _holds(rule)


def _holds(rule: list[str]) -> bool:
    """The value of `True and ( False or True )` up to its end or a closing bracket; `and` binds closer."""
    terms: list[list[bool]] = [[]]
    while rule and rule[0] != ")":
        part = rule.pop(0)
        if part == "(":
            terms[-1].append(_holds(rule))
            if rule:
                rule.pop(0)
        elif part == "or":
            terms.append([])
        elif part != "and":
            terms[-1].append(part == "True")
    return any(term and all(term) for term in terms)


def _would_serve(other: NodeGroup, group: NodeGroup) -> bool:
    """True if Slurm could allocate nodes of `other` for a request for `group`."""
    if not group.num_gpus:
        return True
    same = group.gpu_type is None or other.gpu_type == group.gpu_type
    return same and other.num_gpus >= group.gpus_used


def _gpus_of(node: Node) -> tuple[Gres | None, CardChoice | None]:
    """The GPUs of a node that a job would use: whole cards before slices, then those with the most memory."""
    options = [(one, card_of(one, node.features, node.gres)) for one in node.gpus]

    def worth(option: tuple[Gres, CardChoice | None]) -> tuple[bool, int, int]:
        one, card = option
        memory = card.gpu.memory_bytes if card else 0
        is_whole = card is None or not card.gpu.is_mig_on
        return is_whole, memory * (one.count if is_whole else 1), one.count

    return max(options, key=worth, default=(None, None))


def _other_gpus(node: Node, used: Gres | None) -> tuple[Gres, ...]:
    return tuple(one for one in node.gpus if one is not used)


def _by_ram(nodes: Sequence[Node]) -> list[list[Node]]:
    """The nodes split before each that has clearly less RAM than the first of its part."""
    parts: list[list[Node]] = []
    for node in sorted(nodes, key=lambda each: -(each.ram_bytes or 0)):
        largest = parts[-1][0].ram_bytes if parts else None
        if parts and (node.ram_bytes or 0) >= _SAME_RAM * (largest or 0):
            parts[-1].append(node)
        else:
            parts.append([node])
    return parts


def _group(nodes: Sequence[Node]) -> NodeGroup:
    first = nodes[0]
    used, card = _gpus_of(first)
    shared = set(first.features).intersection(*(node.features for node in nodes))
    sizes = [node.ram_bytes for node in nodes if node.ram_bytes is not None]
    return NodeGroup(
        names=tuple(node.name for node in nodes),
        num_nodes=len(nodes),
        num_in_service=sum(node.is_in_service for node in nodes),
        num_cores=first.num_cores,
        ram_bytes=min(sizes) if len(sizes) == len(nodes) else None,
        num_gpus=used.count if used else 0,
        gpu_type=used.kind if used else None,
        card=card,
        other_gpus=_other_gpus(first, used),
        features=tuple(feature for feature in first.features if feature in shared),
    )


def _group_of_tres(partition: Partition) -> NodeGroup:
    """Nodes that Slurm does not show, from the totals of the partition."""
    count = max(1, partition.num_nodes)
    gpus = [Gres(name="gpu", kind=None, count=partition.tres.get("gres/gpu", 0) // count)]
    gpus += [
        Gres(name="gpu", kind=name.removeprefix("gres/gpu:"), count=number // count)
        for name, number in partition.tres.items()
        if name.startswith("gres/gpu:") and number % count == 0
    ]
    used = gpus[-1]
    memory = partition.tres.get("mem", 0) // count
    return NodeGroup(
        names=(),
        num_nodes=partition.num_nodes,
        num_in_service=partition.num_nodes,
        num_cores=max(1, partition.tres.get("cpu", 0) // count),
        ram_bytes=memory or None,
        num_gpus=used.count,
        gpu_type=used.kind,
        card=card_of(used) if used.count else None,
    )
