"""What is planned but not trained by this version: one small table; a line goes when its runtime comes.

Such a row is refused with the version that trains it, while the table of methods still shows what it would need.
"""

from enum import StrEnum

from trainer.spec.plan import Candidate
from trainer.spec.strategy import Sharding
from trainer.spec.value import Value


class NotYet(Value, frozen=True, kw_only=True):
    """Members of an axis, and the first version that trains them; of `sharding+precision`, pairs of members."""

    axis: str
    members: tuple[StrEnum | bool | tuple[StrEnum, StrEnum], ...]
    version: str


NOT_YET: tuple[NotYet, ...] = (
    NotYet(axis="sharding", members=(Sharding.HSDP,), version="0.6"),
    # Checkpoints of a run under one of these engines.
    NotYet(axis="saved_sharding", members=tuple(s for s in Sharding if s.shards_optimizer), version="0.5"),
)


def version_that_trains(axis: str, member: object) -> str | None:
    """The first version that trains a member of an axis; None where this one does."""
    for row in NOT_YET:
        if row.axis == axis and member in row.members:
            return row.version
    return None


def late_members(candidate: Candidate) -> dict[str, str]:
    """What this version cannot train of a candidate, in words, each with the first version that can."""
    row = candidate.strategy
    axes: tuple[tuple[str, object, str], ...] = (
        ("method", candidate.method, candidate.method),
        ("sharding", row.sharding, row.sharding),
        ("offload", row.offload, f"offload {row.offload}"),
        ("precision", row.precision, row.precision),
        ("optimizer", row.optimizer, row.optimizer),
        ("sharding+precision", (row.sharding, row.precision), f"{row.sharding} with {row.precision}"),
        ("checkpointing", candidate.checkpointing, f"checkpointing {candidate.checkpointing}"),
        ("loss", candidate.loss, f"loss {candidate.loss}"),
        ("compile", candidate.compile, "torch.compile"),
        ("activation_offload", candidate.activation_offload, "activation offload"),
        ("optimizer_in_backward", candidate.optimizer_in_backward, "the optimizer in the backward pass"),
    )
    late = ((words, version_that_trains(axis, member)) for axis, member, words in axes)
    return {words: version for words, version in late if version is not None}


def version_needed(candidate: Candidate) -> str | None:
    """The first version that trains a candidate; None where this one does."""
    return max(late_members(candidate).values(), key=_release, default=None)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))
