"""The blocks of a transformers model and their attention modules, found by what they are, not by what they are called.

A block is what transformers itself recomputes: a `GradientCheckpointingLayer`; in a model that has none, whose code is
its own or old, one of the list of modules that holds the most parameters. An attention module is the one in a block
that knows its place in a cache of keys and values (`layer_idx`) and how its heads are cut.
"""

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

_HEAD_FIELDS = ("head_dim", "head_size", "num_heads", "n_heads")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks in the order they run; none where the model has no list of modules."""
    found: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if found:
        return found
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=_num_parameters).children()) if lists else []


def _num_parameters(module: nn.Module) -> int:
    """Elements over all ranks, also of what ZeRO-3 has cut."""
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in module.parameters())


def attention_module(block: nn.Module) -> nn.Module | None:
    """The attention module of a block; None where none is to be seen."""
    for module in block.modules():
        knows_heads = any(hasattr(module, field) for field in _HEAD_FIELDS)
        if module is not block and hasattr(module, "layer_idx") and knows_heads:
            return module
    return None
