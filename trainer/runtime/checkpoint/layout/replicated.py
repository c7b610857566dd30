"""The engines in which every rank holds every tensor whole: a single process, and DistributedDataParallel."""

import torch
from torch import nn
from torch.optim.optimizer import Optimizer as TorchOptimizer

from trainer.runtime.checkpoint.files.manifest import Manifest, ParameterEntry, TensorEntry
from trainer.runtime.checkpoint.files.ranges import Blocks
from trainer.runtime.checkpoint.layout.model_state import NamedTensor, named_state
from trainer.runtime.checkpoint.layout.optimizer_state import create_state as create_parameter_state
from trainer.runtime.checkpoint.layout.optimizer_state import groups_of_parameters, state_tensors, step_count
from trainer.runtime.checkpoint.layout.optimizers import StateTensor
from trainer.runtime.checkpoint.layout.pieces import Piece, flat, type_of


def describe(model: nn.Module, optimizer: TorchOptimizer) -> dict[str, ParameterEntry]:
    """Every parameter and persistent buffer with its group, steps and state, without chunks."""
    groups = groups_of_parameters(optimizer)
    return {
        name: described(item, optimizer, groups[id(item.tensor)][0] if id(item.tensor) in groups else None)
        for name, item in named_state(model).items()
    }


def described(item: NamedTensor, optimizer: TorchOptimizer, group: str | None) -> ParameterEntry:
    """The entry of one tensor whose state the optimizer keeps under that very tensor, of a group or of none."""
    if item.tied_to is not None:
        return ParameterEntry(tied_to=item.tied_to, is_trained=group is not None, is_buffer=item.is_buffer)
    return ParameterEntry(
        weight=_tensor_entry(item.tensor),
        is_trained=group is not None,
        is_buffer=item.is_buffer,
        group=group,
        step=step_count(optimizer, item.tensor),
        state={
            key: state_entry(kept, tuple(item.tensor.shape))
            for key, kept in state_tensors(optimizer, item.tensor).items()
        },
    )


def held_pieces(model: nn.Module, optimizer: TorchOptimizer) -> list[Piece]:
    """All weights and states, whole, a tied one once."""
    pieces = []
    for name, item in named_state(model).items():
        if item.tied_to is None:
            pieces.append(Piece(name, None, 0, flat(item.tensor, name=name), is_shared=True))
            num_elements, states = item.tensor.numel(), state_tensors(optimizer, item.tensor)
            pieces += [
                Piece(
                    name, key, 0, kept.values.reshape(-1), is_shared=True, coded=kept.coded,
                    blocks=None if kept.block == 1 else Blocks(num_elements, min(kept.block, num_elements), kept.block),
                )
                for key, kept in states.items()
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
    """Nothing is left to do: what was filled is what the model computes with."""


def state_entry(kept: StateTensor, shape: tuple[int, ...]) -> TensorEntry:
    """The entry of a state tensor; values that stand for blocks of elements have the shape of the parameter."""
    own = tuple(kept.values.shape) if kept.block == 1 else shape
    return TensorEntry(shape=own, type=type_of(kept.values), chunks=(), block=kept.block)


def _tensor_entry(tensor: torch.Tensor) -> TensorEntry:
    return TensorEntry(shape=tuple(tensor.shape), type=type_of(tensor), chunks=())
