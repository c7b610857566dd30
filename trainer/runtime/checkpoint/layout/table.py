"""The adapter table: for each sharding, how to see the model and optimizer state that a rank holds.

An adapter answers with `Piece`s: views of live memory, each a flat range of a logical tensor. Writing and reading are
the same view in two directions, so a new engine is four functions and a row here; nothing else in this package knows
engines. FSDP2's local rows, ZeRO's fragments and its partitions are pieces with a start; a replicated engine holds
every tensor whole, and the ranks share the writing by bytes.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from torch.optim.optimizer import Optimizer as TorchOptimizer

from trainer.runtime.checkpoint.files.manifest import Manifest, ParameterEntry
from trainer.runtime.checkpoint.layout import fsdp, replicated, zero
from trainer.runtime.checkpoint.layout.pieces import Piece
from trainer.spec.strategy import Sharding


class Engine(NamedTuple):
    """How one engine's state is seen."""

    describe: Callable[[nn.Module, TorchOptimizer], dict[str, ParameterEntry]]
    """Every parameter's entry, without chunks; the same on every rank."""
    held_pieces: Callable[[nn.Module, TorchOptimizer], list[Piece]]
    """What this rank holds: to be written, or to be filled once the state is made."""
    create_state: Callable[[nn.Module, TorchOptimizer, Manifest], None]
    """Makes the optimizer's state without stepping; its tensors are still to be filled."""
    settle: Callable[[nn.Module], None]
    """Once pieces have been filled, makes what the model computes with follow them; collective."""


_REPLICATED = Engine(
    describe=replicated.describe,
    held_pieces=replicated.held_pieces,
    create_state=replicated.create_state,
    settle=replicated.settle,
)
_FSDP = Engine(
    describe=replicated.describe,  # a DTensor shows the shape of the whole
    held_pieces=fsdp.held_pieces,
    create_state=replicated.create_state,
    settle=replicated.settle,
)
_ZERO = Engine(
    describe=zero.describe,
    held_pieces=zero.held_pieces,
    create_state=zero.create_state,
    settle=zero.settle,
)

ENGINES: dict[Sharding, Engine] = {
    Sharding.NONE: _REPLICATED,
    Sharding.DDP: _REPLICATED,
    Sharding.FSDP: _FSDP,
    Sharding.FSDP_GRAD_OP: _FSDP,
    Sharding.HSDP: _FSDP,
    Sharding.ZERO1: _ZERO,
    Sharding.ZERO2: _ZERO,
    Sharding.ZERO3: _ZERO,
}


def engine_of(sharding: Sharding) -> Engine:
    """The adapter of a sharding."""
    return ENGINES[sharding]
