"""Names of parameters and persistent buffers as the model's author wrote them, whatever wraps the model.

Of a model with adapters a checkpoint holds these alone: the frozen base is where it came from, and known again by its
fingerprint. They are told by PEFT's names, which stand where the base's layers are (`q_proj.lora_A.default.weight`).
"""

import re
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_LEADING_WRAPPERS = re.compile(r"^(?:module\.|base_model\.model\.)+")  # DistributedDataParallel, DeepSpeed; PEFT
_INNER_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")  # torch.compile; checkpointing


_ADAPTER = re.compile(r"(?:^|\.)lora_[^.]+\.")


class NamedTensor(NamedTuple):
    """A parameter or persistent buffer under its canonical name; one that shares another's tensor is tied to it."""

    tensor: torch.Tensor
    tied_to: str | None
    is_buffer: bool


def canonical_name(name: str) -> str:
    """The name without the prefixes that wrappers add."""
    return _LEADING_WRAPPERS.sub("", _INNER_WRAPPERS.sub("", name))


def named_state(model: nn.Module) -> dict[str, NamedTensor]:
    """Everything of a model that a checkpoint holds, in the model's order; the first name of a tied tensor owns it.

    Parameters and persistent buffers; of a model with adapters, the adapters. FSDP2 leaves weights gathered after a
    forward without a backward, as in an evaluation: they are cut again, so that they are those the optimizer knows.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
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
    parameters: list[tuple[str, torch.Tensor, bool]] = [
        (name, tensor, False) for name, tensor in model.named_parameters(remove_duplicate=False)
    ]
    buffers = [
        (f"{path}.{name}" if path else name, tensor, True)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in module.named_buffers(recurse=False, remove_duplicate=False)
        if name not in module._non_persistent_buffers_set
    ]
    adapters = [item for item in parameters if _ADAPTER.search(item[0])]
    return adapters or parameters + buffers
