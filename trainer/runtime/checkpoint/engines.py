"""The state adapters: for each engine, the model and optimizer state that a rank holds.

An adapter returns `Piece`s: views of live memory, each a flat range of a logical tensor. Writing and reading are the
same view in two directions, so a new engine is four functions and a row here; nothing else in this package depends
on engines.

    none, ddp   every rank holds every tensor whole, and the ranks share the writing by bytes
    FSDP2       a rank holds some rows of each parameter and of its state, which are a flat range of it
    ZeRO        fragments or partitions (`zero`)

FSDP2 deals rows as `torch.chunk` deals them: if they do not divide, the last ranks hold fewer or none. The padding that
FSDP2 allocates for its collectives is no part of a shard. The shards are the masters: what blocks compute with is
gathered from them at each forward, so nothing has to be refreshed. With CPU offload they are in host RAM. Under hybrid
sharding the ranks at the same place of each replica hold the same rows.
"""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.optimizer import Optimizer as TorchOptimizer

from shardwise.trainer.runtime.checkpoint import zero
from shardwise.trainer.runtime.checkpoint.manifest import Blocks, Manifest, ParameterEntry, TensorEntry
from shardwise.trainer.runtime.checkpoint.optimizer_state import (
    StateTensor,
    groups_of_parameters,
    state_tensors,
    step_count,
)
from shardwise.trainer.runtime.checkpoint.optimizer_state import create_state as create_parameter_state
from shardwise.trainer.runtime.checkpoint.pieces import Piece, Replica, flat, named_state, type_of
from shardwise.trainer.spec.engines import Engine, Sharding
from shardwise.trainer.spec.value import complete


def describe(model: nn.Module, optimizer: TorchOptimizer) -> dict[str, ParameterEntry]:
    """Every parameter and persistent buffer with its group, steps and state, without chunks."""
    groups = groups_of_parameters(optimizer)
    entries = {}
    for name, item in named_state(model).items():
        group, _ = groups.get(id(item.tensor), (None, None))
        shape, is_trained = tuple(item.tensor.shape), group is not None
        if item.tied_to is not None:
            entries[name] = ParameterEntry(tied_to=item.tied_to, is_trained=is_trained, is_buffer=item.is_buffer)
            continue
        entries[name] = ParameterEntry(
            weight=TensorEntry(shape=shape, type=type_of(item.tensor), chunks=()),
            is_trained=is_trained,
            is_buffer=item.is_buffer,
            group=group,
            step=step_count(optimizer, item.tensor),
            state={
                key: _state_entry(stored, shape, is_shard=isinstance(item.tensor, DTensor))
                for key, stored in state_tensors(optimizer, item.tensor).items()
            },
        )
    return entries


def held_pieces(model: nn.Module, optimizer: TorchOptimizer) -> list[Piece]:
    """All weights and states, whole, a tied one once."""
    pieces = []
    for name, item in named_state(model).items():
        if item.tied_to is None:
            pieces.append(Piece(name, None, 0, flat(item.tensor, name=name), is_shared=True))
            num_elements, states = item.tensor.numel(), state_tensors(optimizer, item.tensor)
            pieces += [
                Piece(
                    name, key, 0, each.values.reshape(-1), is_shared=True, coded=each.coded,
                    blocks=None if each.block == 1 else Blocks(num_elements, min(each.block, num_elements), each.block),
                )
                for key, each in states.items()
            ]  # fmt: skip
    return [piece for piece in pieces if piece.num_elements]


def create_state(model: nn.Module, optimizer: TorchOptimizer, manifest: Manifest) -> None:
    """Makes the state of every trained parameter, also of one of which this rank holds no element."""
    groups = groups_of_parameters(optimizer)
    for name, item in named_state(model).items():
        if item.tied_to is None and id(item.tensor) in groups:
            group = groups[id(item.tensor)][1]
            create_parameter_state(optimizer, group, item.tensor, manifest.entry(name), name=name)


def settle(model: nn.Module) -> None:
    """Nothing: the filled tensors are those that the model computes with."""


def _state_entry(stored: StateTensor, shape: tuple[int, ...], *, is_shard: bool) -> TensorEntry:
    """The entry of a state tensor; shards, and values that stand for blocks, have the shape of the parameter."""
    own = tuple(stored.values.shape) if stored.block == 1 and not is_shard else shape
    return TensorEntry(shape=own, type=type_of(stored.values), chunks=(), block=stored.block)


def fsdp_pieces(model: nn.Module, optimizer: TorchOptimizer) -> list[Piece]:
    """This rank's rows of weights and states, a tied one once, and the buffers, which every rank holds."""
    pieces = []
    for name, item in named_state(model).items():
        if item.tied_to is None:
            pieces.append(_fsdp_piece(name, None, item.tensor, StateTensor(item.tensor)))
            states = state_tensors(optimizer, item.tensor)
            pieces += [_fsdp_piece(name, key, item.tensor, stored) for key, stored in states.items()]
    return [piece for piece in pieces if piece.num_elements]


def _fsdp_piece(name: str, state: str | None, tensor: torch.Tensor, stored: StateTensor) -> Piece:
    """Values of the parameter `tensor`, or of a state of it: a DTensor, or a plain tensor of this rank's rows."""
    values = stored.values.to_local() if isinstance(stored.values, DTensor) else stored.values
    if not isinstance(tensor, DTensor):
        return Piece(name, state, 0, flat(values, name=name), is_shared=True)
    num_elements = tensor.to_local().numel()
    blocks = None if stored.block == 1 else Blocks(num_elements, min(stored.block, num_elements), stored.block)
    *replicated, sharded = tensor.placements
    assert sharded == Shard(0) and replicated in ([], [Replicate()]), f"{name}: lies as {tensor.placements}"
    mesh = tensor.device_mesh
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    replica = Replica(mesh.get_local_rank(0), mesh.size(0)) if replicated else None
    start = offset[0] * prod(tensor.shape[1:])
    return Piece(
        name, state, start, flat(values, name=name), replica=replica, blocks=blocks, coded=stored.coded
    )  # fmt: skip


class StateAdapter(NamedTuple):
    """The view of one engine's state."""

    describe: Callable[[nn.Module, TorchOptimizer], dict[str, ParameterEntry]]
    """Every parameter's entry, without chunks; the same on every rank."""
    held_pieces: Callable[[nn.Module, TorchOptimizer], list[Piece]]
    """Pieces that this rank holds: to be written, or to be filled once the state is made."""
    create_state: Callable[[nn.Module, TorchOptimizer, Manifest], None]
    """Makes the optimizer's state without stepping; its tensors are still to be filled."""
    settle: Callable[[nn.Module], None]
    """Once pieces have been filled, makes what the model computes with follow them; collective."""


_REPLICATED = StateAdapter(describe, held_pieces, create_state, settle)
_FSDP = _REPLICATED._replace(held_pieces=fsdp_pieces)  # a DTensor has the shape of the whole
_ZERO = StateAdapter(zero.describe, zero.held_pieces, zero.create_state, zero.settle)

ADAPTERS: dict[Engine, StateAdapter] = complete(
    Engine, {Engine.TORCH: _REPLICATED, Engine.FSDP: _FSDP, Engine.DEEPSPEED: _ZERO}, "ADAPTERS"
)


def adapter_of(sharding: Sharding) -> StateAdapter:
    """The adapter of a sharding."""
    return ADAPTERS[sharding.facts.engine]
