"""A user's access to a partition, and the limits on a job there. Pure.

The input is the output of `sacctmgr -nP show user NAME withassoc` and `show qos`, with the columns ASSOCIATION_FIELDS
and QOS_FIELDS. A cluster without accounting has neither: then the access is unknown, not denied.

A controller with EnforcePartLimits=NO, Slurm's default, accepts a job of an account that the partition does not allow,
in `sbatch --test-only` too, and the job stays pending for ever. So the access is checked before a job is submitted.

For each kind of limit Slurm uses the first that is set, in this order: the partition's QOS, the job's QOS, the
association (https://slurm.schedmd.com/resource_limits.html); a QOS with OverPartQOS comes before the partition's. A job
larger than the limit of all jobs of its user never starts, so these limits bound a job as well.
"""

from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from shardwise.slurm.cluster import Association, JobLimits, Partition, parse_duration, parse_tres
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import SlurmJob
from shardwise.trainer.spec.units import format_bytes
from shardwise.trainer.spec.value import Value

ASSOCIATION_FIELDS = (
    "defaultaccount",
    "account",
    "partition",
    "qos",
    "defaultqos",
    "maxwall",
    "maxtres",
    "grptres",
)
QOS_FIELDS = ("name", "maxwall", "maxtres", "maxtrespu", "maxtrespa", "grptres", "flags")
_FALLBACK_QOS = "normal"  # of an association with several and no default


class Access(Value, frozen=True, kw_only=True):
    """A user's access to a partition."""

    accounts: tuple[str, ...]
    qos: tuple[str, ...]  # with any of the accounts
    account: str | None = None  # charged for a job
    job_qos: str | None = None  # of a job
    states_account: bool = False  # the job has to name it: Slurm's default is another
    states_qos: bool = False
    limits: JobLimits | None = None  # of the association
    refusal: str | None = None  # why the user has no access, or has to name an account or a QOS

    @property
    def summary(self) -> str:
        """`you may use it with accounts theory, vision; QOS normal, long`."""
        if self.refusal is not None:
            return self.refusal
        return f"you may use it with {_accounts(self.accounts)}" + (f"; QOS {', '.join(self.qos)}" if self.qos else "")


def parse_associations(text: str) -> tuple[Association, ...]:
    """The rows of `sacctmgr -nP show user NAME withassoc format=...`; none for a user without an account."""
    rows = (line.split("|") for line in text.splitlines() if line.strip())
    return tuple(
        Association(
            account=account,
            is_default=account == default_account,
            partition=partition or None,
            qos=tuple(name for name in qos.split(",") if name),
            default_qos=default_qos or None,
            limits=JobLimits(
                source=f"account {account}",
                max_time_s=parse_duration(max_wall),
                per_job=parse_tres(max_tres),
                together=parse_tres(group_tres),
            ),
        )
        for default_account, account, partition, qos, default_qos, max_wall, max_tres, group_tres, *_ in (
            row for row in rows if len(row) >= len(ASSOCIATION_FIELDS)
        )
        if account
    )


def parse_qos_limits(text: str) -> dict[str, JobLimits]:
    """The rows of `sacctmgr -nP show qos format=...`, by name."""
    rows = (line.split("|") for line in text.splitlines() if line.strip())
    return {
        name: JobLimits(
            source=f"QOS {name}",
            max_time_s=parse_duration(max_wall),
            per_job=parse_tres(per_job),
            per_user=parse_tres(per_user),
            per_account=parse_tres(per_account),
            together=parse_tres(together),
            is_over_partition="OverPartQOS" in flags.split(","),
        )
        for name, max_wall, per_job, per_user, per_account, together, flags, *_ in (
            row for row in rows if len(row) >= len(QOS_FIELDS)
        )
    }


def access_to(
    partition: Partition,
    associations: Sequence[Association],
    *,
    account: str | None = None,
    qos: str | None = None,
    holds_to_qos: bool = True,
) -> Access:
    """The access that these associations give; `account` and `qos` are those that a job names, if any.

    A cluster that does not restrict jobs to the QOS of their account (`holds_to_qos`) allows any.
    """
    here = [one for one in associations if one.partition in (None, partition.name)]
    granted = [one for one in here if _accepts_account(partition, one.account)]
    every_qos = _accepted_qos(partition, granted)
    access = Access(accounts=_names(granted), qos=every_qos)
    refusal = _closed(partition, here, granted, every_qos)
    if refusal is not None:
        return replace(access, refusal=refusal)

    default = next((one.account for one in associations if one.is_default), None)
    charged = account or (default if default in access.accounts or len(access.accounts) > 1 else access.accounts[0])
    if charged is None or charged not in access.accounts:
        return replace(access, refusal=_no_account(partition, associations, access.accounts, account, default))
    access = replace(access, account=charged, states_account=account is None and charged != default)

    # an association with this partition has priority over one with all
    own = min((one for one in granted if one.account == charged), key=lambda one: one.partition is None)
    choices = _accepted_qos(partition, [own])
    job_qos = qos or _default_qos(own)
    has_to_be_own = holds_to_qos and bool(own.qos)
    if has_to_be_own and job_qos not in choices and (qos is not None or len(choices) != 1):
        return replace(access, refusal=_no_qos(partition, own, choices, qos))
    used = job_qos if job_qos in choices or not has_to_be_own else choices[0]
    return replace(access, job_qos=used, states_qos=qos is None and used != _default_qos(own), limits=own.limits)


def _accepts_account(partition: Partition, account: str) -> bool:
    if partition.allowed_accounts is not None:
        return account in partition.allowed_accounts
    return account not in partition.denied_accounts


def _accepted_qos(partition: Partition, associations: Sequence[Association]) -> tuple[str, ...]:
    names = sorted({name for one in associations for name in one.qos})
    if partition.allowed_qos is not None:
        return tuple(name for name in names if name in partition.allowed_qos)
    return tuple(name for name in names if name not in partition.denied_qos)


def _names(associations: Sequence[Association]) -> tuple[str, ...]:
    return tuple(sorted({one.account for one in associations}))


def _accounts(names: Sequence[str]) -> str:
    return f"account{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _default_qos(own: Association) -> str | None:
    """The QOS of a job that names none; None if Slurm refuses such a job."""
    if own.default_qos is not None or len(own.qos) == 1:
        return own.default_qos or own.qos[0]
    return _FALLBACK_QOS if _FALLBACK_QOS in own.qos else None


def _closed(
    partition: Partition, here: Sequence[Association], granted: Sequence[Association], every_qos: Sequence[str]
) -> str | None:
    """Why none of the user's accounts has access to the partition."""
    if not here:
        return f"you have no account for partition {partition.name}"
    if not granted:
        own = _names(here)
        denied = [] if partition.allowed_accounts is not None else own
        rule = f"denies {_accounts(denied)}" if denied else f"accepts {_accounts(partition.allowed_accounts or ())}"
        return f"partition {partition.name} {rule}; you have {_accounts(own)}"
    if not every_qos and any(one.qos for one in granted):
        return _closed_qos(partition, sorted({name for one in granted for name in one.qos}))
    return None


def _closed_qos(partition: Partition, own: Sequence[str]) -> str:
    denied = [] if partition.allowed_qos is not None else own
    rule = f"denies QOS {', '.join(denied)}" if denied else f"accepts QOS {', '.join(partition.allowed_qos or ())}"
    return f"partition {partition.name} {rule}; yours are {', '.join(own)}"


def _no_account(
    partition: Partition,
    associations: Sequence[Association],
    accounts: Sequence[str],
    requested: str | None,
    default: str | None,
) -> str:
    choices = f"--account names one of {', '.join(accounts)}"
    if requested is not None and requested not in _names(associations):
        return f"you have no account {requested}; {choices}"
    name = requested or default
    if name is None:
        return f"you have no default account; {choices}"
    own = "your default account" if requested is None else "account"
    return f"partition {partition.name} does not accept {own} {name}; {choices}"


def _no_qos(partition: Partition, own: Association, choices: Sequence[str], requested: str | None) -> str:
    if not choices:
        return _closed_qos(partition, own.qos)
    named = f"--qos names one of {', '.join(choices)}"
    if requested is not None and requested not in own.qos:
        return f"account {own.account} has no QOS {requested}; {named}"
    name = requested or _default_qos(own)
    if name is None:
        return f"account {own.account} has no default QOS; {named}"
    return (
        f"partition {partition.name} does not accept {'the default ' if requested is None else ''}QOS {name}; {named}"
    )


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

    None if they reduce nothing, or if nothing would be left. Amounts that the job requests itself stay.
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
