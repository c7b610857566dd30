"""What is planned but not trained by this version: two small tables; a line goes when its runtime comes.

Such a row is refused with the version that trains it, while the table of methods still shows what it would need.
"""

from trainer.spec.plan import Candidate
from trainer.spec.strategy import Method, Optimizer, Sharding

TRAINED_FROM: dict[Sharding, str] = {Sharding.HSDP: "0.6"}
# Checkpoints of a run under one of these engines, and going on from them.
SAVED_FROM: dict[Sharding, str] = {Sharding.HSDP: "0.6"}

# Optimizers whose state a checkpoint has a place for: torch's own, and DeepSpeed's Adam.
_SAVED_OPTIMIZERS = (Optimizer.ADAMW, Optimizer.ADAMW_FUSED, Optimizer.SGD, Optimizer.DEEPSPEED_CPU_ADAM)
_OTHERS_SAVED_FROM = "0.5"


def version_that_trains(sharding: Sharding) -> str | None:
    """The first version that trains under it; None where this one does."""
    return TRAINED_FROM.get(sharding)


def version_that_saves(sharding: Sharding) -> str | None:
    """The first version whose runs under it can be resumed; None where those of this one can."""
    return SAVED_FROM.get(sharding)


def unsaved_words(candidate: Candidate) -> str | None:
    """Of what about a candidate no checkpoint is written yet, and the first version that does; None where one is."""
    strategy = candidate.strategy
    version = version_that_saves(strategy.sharding)
    if version is not None:
        return f"under {strategy.sharding} come with shardwise {version}"
    if candidate.method is Method.GALORE:
        return f"of {Method.GALORE} come with shardwise {_OTHERS_SAVED_FROM}"
    if candidate.optimizer_in_backward:
        return f"of an optimizer in the backward pass come with shardwise {_OTHERS_SAVED_FROM}"
    if strategy.optimizer not in _SAVED_OPTIMIZERS:
        return f"of {strategy.optimizer} come with shardwise {_OTHERS_SAVED_FROM}"
    return None


def late_members(candidate: Candidate) -> tuple[str, ...]:
    """What this version cannot train of a candidate, in words."""
    sharding = candidate.strategy.sharding
    return () if version_that_trains(sharding) is None else (sharding,)


def version_needed(candidate: Candidate) -> str | None:
    """The first version that trains a candidate; None where this one does."""
    return version_that_trains(candidate.strategy.sharding)
