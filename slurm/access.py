"""What a user may use of a partition: accounts, qualities of service, and the limits these set. Pure.

From `sacctmgr -nP show assoc` and `show qos`, whose columns stand in ASSOCIATION_FIELDS and QOS_FIELDS. A cluster
without accounting answers neither; then nothing is known, which is not the same as nothing being allowed.
"""

from collections.abc import Sequence

from slurm.cluster import Association, Partition, QosLimit
from slurm.quantities import parse_duration
from slurm.scontrol_text import parse_tres
from trainer.spec.value import Value

ASSOCIATION_FIELDS = ("account", "partition", "qos", "defaultqos")
QOS_FIELDS = ("name", "maxwall", "maxtres")


class Access(Value, frozen=True, kw_only=True):
    """How a user may use a partition."""

    accounts: tuple[str, ...]
    qos: tuple[str, ...]
    default_qos: str | None = None
    refusal: str | None = None  # why the partition is not open to this user

    @property
    def words(self) -> str:
        """`you may use it as account theory or vision, with QOS normal or long`."""
        if self.refusal is not None:
            return self.refusal
        accounts = f"account{'s' if len(self.accounts) > 1 else ''} {', '.join(self.accounts)}"
        return f"you may use it with {accounts}" + (f"; QOS {', '.join(self.qos)}" if self.qos else "")


def parse_associations(text: str) -> tuple[Association, ...]:
    """The rows of `sacctmgr -nP show assoc format=...`."""
    rows = (line.split("|") for line in text.splitlines() if line.strip())
    return tuple(
        Association(
            account=row[0],
            partition=row[1] or None,
            qos=tuple(name for name in row[2].split(",") if name),
            default_qos=row[3] or None,
        )
        for row in rows
        if len(row) >= len(ASSOCIATION_FIELDS)
    )


def parse_qos_limits(text: str) -> tuple[QosLimit, ...]:
    """The rows of `sacctmgr -nP show qos format=...`."""
    rows = (line.split("|") for line in text.splitlines() if line.strip())
    return tuple(
        QosLimit(name=row[0], max_time_s=parse_duration(row[1]), max_tres=parse_tres(row[2]))
        for row in rows
        if len(row) >= len(QOS_FIELDS)
    )


def access_to(partition: Partition, associations: Sequence[Association]) -> Access:
    """What of these associations the partition takes."""
    here = [one for one in associations if one.partition in (None, partition.name)]
    own = sorted({one.account for one in here})
    accounts = [
        name
        for name in own
        if name not in partition.denied_accounts
        and (partition.allowed_accounts is None or name in partition.allowed_accounts)
    ]
    granted = [one for one in here if one.account in accounts]
    all_qos = sorted({name for one in granted for name in one.qos})
    qos = [
        name
        for name in all_qos
        if name not in partition.denied_qos and (partition.allowed_qos is None or name in partition.allowed_qos)
    ]
    defaults = [one.default_qos for one in granted if one.default_qos in qos]
    return Access(
        accounts=tuple(accounts),
        qos=tuple(qos),
        default_qos=defaults[0] if defaults else None,
        refusal=_refusal(partition, own, accounts, all_qos, qos),
    )


def _refusal(
    partition: Partition, own: Sequence[str], accounts: Sequence[str], all_qos: Sequence[str], qos: Sequence[str]
) -> str | None:
    if not own:
        return f"you have no account for partition {partition.name}"
    if not accounts:
        denied = [name for name in own if name in partition.denied_accounts]
        taken = f"denies {', '.join(denied)}" if denied else f"takes {', '.join(partition.allowed_accounts or ())}"
        return f"partition {partition.name} {taken}; your accounts are {', '.join(own)}"
    if all_qos and not qos:
        denied = [name for name in all_qos if name in partition.denied_qos]
        taken = f"denies QOS {', '.join(denied)}" if denied else f"takes QOS {', '.join(partition.allowed_qos or ())}"
        return f"partition {partition.name} {taken}; yours are {', '.join(all_qos)}"
    return None
