"""The blocks of a transformers model and their attention modules, found by what they are, not by what they are called.

A block is what transformers itself recomputes: a `GradientCheckpointingLayer`. An attention module is the one in a
block that knows its place in a cache of keys and values (`layer_idx`) and how its heads are cut.
"""

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

_HEAD_FIELDS = ("head_dim", "head_size", "num_heads", "n_heads")


def blocks_of(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The blocks in the order they run."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def attention_module(block: nn.Module) -> nn.Module | None:
    """The attention module of a block; None where none is to be seen."""
    for module in block.modules():
        knows_heads = any(hasattr(module, field) for field in _HEAD_FIELDS)
        if module is not block and hasattr(module, "layer_idx") and knows_heads:
            return module
    return None
