"""Which parameters an update rule takes together: groups by weight decay, and the matrices inside the blocks.

Decay applies to matrices (two or more dimensions); norms and biases have none. A matrix of a block is what Muon
orthogonalises and what GaLore projects: every trained weight of two dimensions, save embedding tables and the head,
whose rows are tokens. Weights of experts that lie in one tensor of three dimensions are none: neither rule is defined
for them here.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

DECAY, NO_DECAY = "decay", "no_decay"
MATRICES = "matrices"  # of the blocks, updated by a rule of their own

Group = dict[str, Any]  # as torch keeps them


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[Group]:
    """Two groups, `decay` and `no_decay`, of the parameters that are trained."""
    return _by_decay(trained_parameters(model), weight_decay)


def matrix_groups(model: nn.Module, *, weight_decay: float) -> list[Group]:
    """Three groups: `matrices` of the blocks, which decay, then `decay` and `no_decay` of everything else."""
    matrices = block_matrices(model)
    taken = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in trained_parameters(model) if id(parameter) not in taken]
    return [{"params": matrices, "weight_decay": weight_decay, "name": MATRICES}, *_by_decay(others, weight_decay)]


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Every parameter that is trained, a tied one once, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained weights of two dimensions that are neither an embedding table nor the head."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]  # transformers' models have it
    if head is not None:
        tables.add(id(head.weight))
    return [parameter for parameter in trained_parameters(model) if parameter.ndim == 2 and id(parameter) not in tables]


def _by_decay(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[Group]:
    listed = list(parameters)
    return [
        {"params": [p for p in listed if p.ndim >= 2], "weight_decay": weight_decay, "name": DECAY},
        {"params": [p for p in listed if p.ndim < 2], "weight_decay": 0.0, "name": NO_DECAY},
    ]
