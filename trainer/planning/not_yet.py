"""What is planned but not trained by this version: a small table; a line goes when its runtime comes.

Such a row is refused with the version that trains it, while the table of methods still shows what it would need.
"""

from trainer.spec.plan import Candidate
from trainer.spec.strategy import Sharding

TRAINED_FROM: dict[Sharding, str] = {Sharding.HSDP: "0.6"}


def version_that_trains(sharding: Sharding) -> str | None:
    """The first version that trains under it; None where this one does."""
    return TRAINED_FROM.get(sharding)


def late_members(candidate: Candidate) -> tuple[str, ...]:
    """What this version cannot train of a candidate, in words."""
    sharding = candidate.strategy.sharding
    return () if version_that_trains(sharding) is None else (sharding,)


def version_needed(candidate: Candidate) -> str | None:
    """The first version that trains a candidate; None where this one does."""
    return version_that_trains(candidate.strategy.sharding)
