"""The adapter table: for each sharding, how to see the model and optimizer state that a rank holds.

An adapter answers with `Piece`s: views of live memory, each a flat range of a logical tensor. Writing and reading are
the same view in two directions, so a new engine is three functions and a row here; nothing else in this package knows
engines. FSDP2's local rows, ZeRO's fragments and its partitions are pieces with a start; a replicated engine holds
every tensor whole, and the ranks share the writing by bytes.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from torch.optim.optimizer import Optimizer as TorchOptimizer

from trainer.runtime.checkpoint import replicated
from trainer.runtime.checkpoint.manifest import Manifest, ParameterEntry
from trainer.runtime.checkpoint.pieces import Piece
from trainer.spec.errors import InputError
from trainer.spec.strategy import Sharding


class Engine(NamedTuple):
    """How one engine's state is seen."""

    describe: Callable[[nn.Module, TorchOptimizer], dict[str, ParameterEntry]]
    """Every parameter's entry, without chunks; the same on every rank."""
    held_pieces: Callable[[nn.Module, TorchOptimizer], list[Piece]]
    """What this rank holds and may write."""
    create_state: Callable[[nn.Module, TorchOptimizer, Manifest], list[Piece]]
    """Makes the optimizer's state without stepping; what is to be filled on this rank."""
    is_replicated: bool
    """Whether every rank holds the same pieces, so that each writes only its share."""


_REPLICATED = Engine(
    describe=replicated.describe,
    held_pieces=replicated.held_pieces,
    create_state=replicated.create_state,
    is_replicated=True,
)

ENGINES: dict[Sharding, Engine] = {
    Sharding.NONE: _REPLICATED,
    Sharding.DDP: _REPLICATED,
}


def engine_of(sharding: Sharding) -> Engine:
    """The adapter of a sharding; InputError for those that are to come."""
    engine = ENGINES.get(sharding)
    if engine is None:
        raise InputError(f"checkpoints of {sharding} come with shardwise 0.5; there are those of {', '.join(ENGINES)}")
    return engine
