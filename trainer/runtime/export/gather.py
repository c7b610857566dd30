"""The weights that a run exports at its end, gathered from whatever engine holds them."""

from collections.abc import Mapping

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer.runtime.checkpoint import canonical_name
from trainer.runtime.models.adapters import is_adapted
from trainer.runtime.models.build import is_deepspeed, plain_model


def gathered_weights(accelerator: Accelerator, model: nn.Module) -> Mapping[str, torch.Tensor]:
    """What a run exports, on rank 0 at least: adapters where there are any, else the whole model's weights.

    Collective under a sharding engine, which gathers no more than is answered.
    """
    plain = plain_model(model)
    trained = [(name, parameter) for name, parameter in plain.named_parameters() if parameter.requires_grad]
    if is_adapted(name for name, _ in trained):
        with torch.no_grad():
            return {canonical_name(name): _whole(parameter) for name, parameter in trained}
    if isinstance(model, FSDPModule) or is_deepspeed(model):
        weights: Mapping[str, torch.Tensor] = accelerator.get_state_dict(model)
        return weights
    return plain.state_dict()


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """All elements of a parameter on the CPU; collective where ranks hold parts of it."""
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().cpu()
    if hasattr(parameter, "ds_id"):  # ZeRO-3
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().cpu().clone()
    return parameter.detach().cpu()
