"""FSDP2: a rank holds some rows of each parameter and of its state, which are a flat range of it.

Rows are dealt as `torch.chunk` deals them: where they do not divide, the last ranks hold fewer or none. The padding
that FSDP2 allocates for its collectives is no part of a shard. The shards are the masters: what blocks compute with is
gathered from them at each forward, so nothing has to be refreshed. With CPU offload they are in host RAM. Under hybrid
sharding the ranks at the same place of each replica hold the same rows.
"""

from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.optimizer import Optimizer as TorchOptimizer

from trainer.runtime.checkpoint.layout.model_state import named_state
from trainer.runtime.checkpoint.layout.optimizer_state import state_tensors
from trainer.runtime.checkpoint.layout.pieces import Piece, Replica, flat


def held_pieces(model: nn.Module, optimizer: TorchOptimizer) -> list[Piece]:
    """This rank's rows of weights and states, a tied one once, and the buffers, which every rank holds."""
    pieces = []
    for name, item in named_state(model).items():
        if item.tied_to is None:
            pieces.append(_piece(name, None, item.tensor))
            states = state_tensors(optimizer, item.tensor)
            pieces += [_piece(name, key, kept.values) for key, kept in states.items()]
    return [piece for piece in pieces if piece.num_elements]


def _piece(name: str, state: str | None, tensor: torch.Tensor) -> Piece:
    if not isinstance(tensor, DTensor):
        return Piece(name, state, 0, flat(tensor, name=name), is_shared=True)
    *replicated, sharded = tensor.placements
    assert sharded == Shard(0) and replicated in ([], [Replicate()]), f"{name}: lies as {tensor.placements}"
    mesh = tensor.device_mesh
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    replica = Replica(mesh.get_local_rank(0), mesh.size(0)) if replicated else None
    return Piece(name, state, offset[0] * prod(tensor.shape[1:]), flat(tensor.to_local(), name=name), replica=replica)
