"""Names of parameters and persistent buffers as the model's author wrote them, whatever wraps the model."""

import re
from typing import NamedTuple

import torch
from torch import nn

_LEADING_WRAPPERS = re.compile(r"^(?:module\.|base_model\.model\.)+")  # DistributedDataParallel, DeepSpeed; PEFT
_INNER_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")  # torch.compile; checkpointing


class NamedTensor(NamedTuple):
    """A parameter or persistent buffer under its canonical name; one that shares another's tensor is tied to it."""

    tensor: torch.Tensor
    tied_to: str | None
    is_buffer: bool


def canonical_name(name: str) -> str:
    """The name without the prefixes that wrappers add."""
    return _LEADING_WRAPPERS.sub("", _INNER_WRAPPERS.sub("", name))


def named_state(model: nn.Module) -> dict[str, NamedTensor]:
    """Everything of a model that a checkpoint holds, in the model's order; the first name of a tied tensor owns it."""
    owners: dict[int, str] = {}
    found: dict[str, NamedTensor] = {}
    for full_name, tensor, is_buffer in _parameters_and_buffers(model):
        name = canonical_name(full_name)
        if name in found:
            raise ValueError(f"two tensors are named {name} once wrapper prefixes are stripped; one is {full_name}")
        owner = owners.setdefault(id(tensor), name)
        found[name] = NamedTensor(tensor=tensor, tied_to=None if owner == name else owner, is_buffer=is_buffer)
    return found


def _parameters_and_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor, bool]]:
    parameters = [(name, tensor, False) for name, tensor in model.named_parameters(remove_duplicate=False)]
    buffers = [
        (f"{path}.{name}" if path else name, tensor, True)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in module.named_buffers(recurse=False, remove_duplicate=False)
        if name not in module._non_persistent_buffers_set
    ]
    return parameters + buffers
