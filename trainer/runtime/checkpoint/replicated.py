"""The engines in which every rank holds every tensor whole: a single process, and DistributedDataParallel."""

import torch
from torch import nn
from torch.optim.optimizer import Optimizer as TorchOptimizer

from trainer.runtime.checkpoint.manifest import Manifest, ParameterEntry, TensorEntry
from trainer.runtime.checkpoint.model_state import NamedTensor, named_state
from trainer.runtime.checkpoint.optimizer_state import Group, named_groups, state_tensors, step_count
from trainer.runtime.checkpoint.optimizer_state import create_state as create_parameter_state
from trainer.runtime.checkpoint.pieces import Piece, flat, type_of
from trainer.spec.errors import InputError


def describe(model: nn.Module, optimizer: TorchOptimizer) -> dict[str, ParameterEntry]:
    """Every parameter and persistent buffer with its group, steps and state, without chunks."""
    groups = {parameter: name for parameter, (name, _) in _group_by_parameter(optimizer).items()}
    return {name: _entry(item, optimizer, groups.get(id(item.tensor))) for name, item in named_state(model).items()}


def held_pieces(model: nn.Module, optimizer: TorchOptimizer) -> list[Piece]:
    """All weights and states, whole, a tied one once."""
    pieces = []
    for name, item in named_state(model).items():
        if item.tied_to is None:
            pieces.append(Piece(name, None, 0, flat(item.tensor, name=name)))
            states = sorted(state_tensors(optimizer, item.tensor).items())
            pieces += [Piece(name, key, 0, tensor.reshape(-1)) for key, tensor in states]
    return [piece for piece in pieces if piece.num_elements]


def create_state(model: nn.Module, optimizer: TorchOptimizer, manifest: Manifest) -> list[Piece]:
    """Makes the state of every trained parameter on every rank; all of it is to be filled."""
    groups = _group_by_parameter(optimizer)
    pieces = []
    for name, item in named_state(model).items():
        if item.tied_to is not None:
            continue
        entry = manifest.entry(name)
        group = groups.get(id(item.tensor))
        if entry.is_trained != (group is not None):
            was, is_now = ("trained", "frozen") if entry.is_trained else ("frozen", "trained")
            raise InputError(f"{name}: was {was} when the checkpoint was saved and is {is_now} in this job")
        if group is None:
            continue
        tensors = create_parameter_state(optimizer, group[1], item.tensor, entry, name=name)
        pieces += [Piece(name, key, 0, tensor.view(-1)) for key, tensor in tensors.items()]
    return [piece for piece in pieces if piece.num_elements]


def _entry(item: NamedTensor, optimizer: TorchOptimizer, group: str | None) -> ParameterEntry:
    if item.tied_to is not None:
        return ParameterEntry(tied_to=item.tied_to, is_trained=group is not None, is_buffer=item.is_buffer)
    return ParameterEntry(
        weight=_tensor_entry(item.tensor),
        is_trained=group is not None,
        is_buffer=item.is_buffer,
        group=group,
        step=step_count(optimizer, item.tensor),
        state={key: _tensor_entry(tensor) for key, tensor in sorted(state_tensors(optimizer, item.tensor).items())},
    )


def _group_by_parameter(optimizer: TorchOptimizer) -> dict[int, tuple[str, Group]]:
    """The group that updates each parameter and its name, by the parameter's identity."""
    return {
        id(parameter): (name, group) for name, group in named_groups(optimizer).items() for parameter in group["params"]
    }


def _tensor_entry(tensor: torch.Tensor) -> TensorEntry:
    return TensorEntry(shape=tuple(tensor.shape), type=type_of(tensor), chunks=())
