"""Limits on a job, and the nodes or the share of a node that they allow. Pure.

For each kind of limit Slurm uses the first that is set, in this order: the partition's QOS, the job's QOS, the
association (https://slurm.schedmd.com/resource_limits.html); a QOS with OverPartQOS comes before the partition's. A job
larger than the limit of all jobs of its user never starts, so these limits bound a job as well.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from shardwise.slurm.cluster import JobLimits
from shardwise.trainer.spec.errors import InputError
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


_GPU = "gres/gpu"


class Bound(Value, frozen=True, kw_only=True):
    """The largest amount of a TRES for one job."""

    tres: str
    amount: int
    text: str  # `QOS long: 8 GPUs a user`


def in_order(
    partition_qos: JobLimits | None, job_qos: JobLimits | None, association: JobLimits | None
) -> tuple[JobLimits, ...]:
    """The limits on a job in the order in which Slurm applies them."""
    first, second = partition_qos, job_qos
    if job_qos is not None and job_qos.is_over_partition:
        first, second = job_qos, partition_qos
    return tuple(one for one in (first, second, association) if one is not None)


def time_limit_of(limits: Sequence[JobLimits]) -> int | None:
    """The time limit of a job in seconds; None without one."""
    return next((one.max_time_s for one in limits if one.max_time_s is not None), None)


def bounds_of(limits: Sequence[JobLimits]) -> tuple[Bound, ...]:
    """The bounds of one job, for each TRES and kind from the first limit that sets it."""
    kinds = (
        ("a job", [one.per_job for one in limits]),
        ("a user", [one.per_user for one in limits]),
        ("an account", [one.per_account for one in limits]),
        ("for all together", [one.together for one in limits]),
    )
    return tuple(bound for whose, amounts in kinds for bound in _first_set(limits, amounts, whose))


def allowed_nodes(
    bounds: Sequence[Bound], *, gpus: int, gpu_type: str | None, cores: int, ram_bytes: int | None
) -> tuple[int, str] | None:
    """The largest number of nodes with these resources for a job, and the limit; None without a limit."""
    typed = {f"{_GPU}:{gpu_type}": gpus} if gpu_type else {}
    needed = {"node": 1, _GPU: gpus, **typed, "cpu": cores, "mem": ram_bytes or 0}
    counts = [(bound.amount // needed[bound.tres], bound.text) for bound in bounds if needed.get(bound.tres)]
    return min(counts, key=lambda pair: pair[0], default=None)


def share_within(
    bounds: Sequence[Bound], share: NodeShare, *, gpus: int, gpu_type: str | None, cores: int, ram_bytes: int | None
) -> tuple[NodeShare, str] | None:
    """The share of a node with these resources that the bounds allow, and the limits that reduce it.

    None if they reduce nothing, or leave nothing. Amounts that the job requests itself stay.
    """
    reasons = []
    most = _least(bounds, _GPU, f"{_GPU}:{gpu_type}")
    if most is not None and share.gpus is None and most.amount < gpus:
        share = replace(share, gpus=most.amount)
        reasons.append(most.text)
    part = 1.0 if share.gpus is None or not gpus else share.gpus / gpus
    most = _least(bounds, "cpu")
    if most is not None and share.cores is None and most.amount < int(cores * part):
        share = replace(share, cores=most.amount)
        reasons.append(most.text)
    most = _least(bounds, "mem")
    if most is not None and share.ram_bytes is None and most.amount < int((ram_bytes or 0) * part):
        share = replace(share, ram_bytes=most.amount)
        reasons.append(most.text)
    return (share, "; ".join(reasons)) if reasons and 0 not in (share.gpus, share.cores, share.ram_bytes) else None


def _least(bounds: Sequence[Bound], *tres: str) -> Bound | None:
    return min((bound for bound in bounds if bound.tres in tres), key=lambda bound: bound.amount, default=None)


def _first_set(limits: Sequence[JobLimits], amounts: Sequence[Mapping[str, int]], whose: str) -> Iterator[Bound]:
    seen: set[str] = set()
    for one, granted in zip(limits, amounts, strict=True):
        for tres, amount in granted.items():
            if tres not in seen:
                seen.add(tres)
                yield Bound(tres=tres, amount=amount, text=f"{one.source}: {_describe_amount(tres, amount)} {whose}")


def _describe_amount(tres: str, amount: int) -> str:
    if tres == "mem":
        return f"{format_bytes(amount)} RAM"
    kind = tres.removeprefix(_GPU).removeprefix(":")
    nouns = {"cpu": "core", "node": "node"}
    noun = f"{kind} GPU".strip() if tres.startswith(_GPU) else nouns.get(tres)
    if noun is None:
        return f"{amount} {tres}"
    return f"{amount} {noun}" + ("" if amount == 1 else "s")
