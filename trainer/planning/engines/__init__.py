"""The planner's side of every engine, one file for each library behind one interface; a library without one is an
error on import.

    engine      the interface, and the values of its functions
    parts       shares of a rank, and bytes of gathered blocks
    replicated  the whole model on every rank: one device, DistributedDataParallel
    fsdp        FSDP2, and FSDP1 of other trainers
    zero        DeepSpeed
"""

from shardwise.trainer.planning.engines.engine import PlannedEngine
from shardwise.trainer.planning.engines.fsdp import Fsdp
from shardwise.trainer.planning.engines.replicated import Replicated
from shardwise.trainer.planning.engines.zero import Zero
from shardwise.trainer.spec.engines import Engine, Sharding
from shardwise.trainer.spec.value import complete

_ENGINES: dict[Engine, PlannedEngine] = complete(
    Engine,
    {
        Engine.TORCH: Replicated(expands_segments=True, other_streams=()),
        # Its buckets and flat partitions are cached in segments of one size.
        Engine.DEEPSPEED: Zero(expands_segments=False, other_streams=()),
        Engine.FSDP: Fsdp(expands_segments=True, other_streams=("gathered_weights", "reduce_scatter", "gradients")),
    },
    "trainer.planning.engines",
)


def engine_of(sharding: Sharding) -> PlannedEngine:
    """The planner's side of the library that runs a sharding."""
    return _ENGINES[sharding.facts.engine]
