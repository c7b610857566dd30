"""Sharding engines: one module builds, fills, steps, verifies and reads one of them; `ENGINES` names all."""

from torch import nn

from shardwise.trainer.runtime.engines.engine import Engine
from shardwise.trainer.runtime.engines.fsdp import Fsdp
from shardwise.trainer.runtime.engines.replicated import Replicated
from shardwise.trainer.runtime.engines.zero import Zero
from shardwise.trainer.spec import engines as facts
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.value import complete

ENGINES: dict[facts.Engine, Engine] = complete(
    facts.Engine,
    {  # the first that wraps a model runs it
        facts.Engine.DEEPSPEED: Zero(),
        facts.Engine.FSDP: Fsdp(),
        facts.Engine.TORCH: Replicated(),
    },
    "ENGINES",
)


def engine_of(sharding: Sharding) -> Engine:
    """The engine of a plan."""
    return ENGINES[sharding.facts.engine]


def running_engine(model: nn.Module) -> Engine:
    """The engine that wraps a prepared model, by the classes of the objects themselves."""
    return next(engine for engine in ENGINES.values() if engine.runs(model))
