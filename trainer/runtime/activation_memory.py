"""Which activations are kept for the backward pass, and which are computed again.

`none` keeps all of them; `full` keeps the input of each block and runs the block's forward once more in the backward.
The others come with shardwise 0.3.
"""

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.spec.errors import InputError
from trainer.spec.strategy import Checkpointing

_SETTINGS = {"use_reentrant": False}  # of torch.utils.checkpoint


def apply_checkpointing(model: PreTrainedModel, checkpointing: Checkpointing, *, every_n: int | None = None) -> None:
    """Makes the model recompute what `checkpointing` says; `every_n` blocks where it says every_n."""
    if checkpointing is Checkpointing.NONE:
        return
    if checkpointing is not Checkpointing.FULL:
        raise InputError(f"pin.checkpointing: {checkpointing} comes with shardwise 0.3; none and full are there")
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=_SETTINGS)
    else:  # transformers 5.17 has only the old name; newer ones warn of it
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=_SETTINGS)


def offload_activations(model: PreTrainedModel) -> None:
    """Keeps what blocks save for the backward pass in host RAM."""
    raise InputError("pin.activation_offload comes with shardwise 0.3")


def compile_blocks(model: PreTrainedModel) -> None:
    """Compiles every block by itself."""
    raise InputError("pin.compile comes with shardwise 0.3")


def activation_facts(model: nn.Module) -> dict[str, str]:
    """What is seen of recomputation, offload and compilation after a step, in words."""
    return {}


def count_checkpointed_blocks(model: nn.Module) -> int:
    """Blocks that will recompute their forward."""
    return sum(
        isinstance(module, GradientCheckpointingLayer) and bool(getattr(module, "gradient_checkpointing", False))
        for module in model.modules()
    )
