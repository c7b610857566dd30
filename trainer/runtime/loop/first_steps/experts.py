"""Which experts of a mixture have had no gradient since the run began.

An expert that no token was sent to has a gradient of zeros in every step, and so first moments of zeros; that weight
decay shrinks it all the same does not matter. Nothing is concluded from few tokens: an even router would have sent
`LEAST_TOKENS` to each expert. A router may prefer others as strongly, one of a trained model on rows of one subject
for example, so what is found is named and never ends a run.

Looked at are AdamW and Lion with dense moments in memory. Adapters have a check of their own (`loop.adapter_check`).
"""

import re
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer as TorchOptimizer

from shardwise.trainer.runtime.checkpoint.engines import adapter_of
from shardwise.trainer.runtime.checkpoint.pieces import canonical_name
from shardwise.trainer.runtime.loop.adapter_check import experts_by_layer
from shardwise.trainer.runtime.loop.first_steps.problem import Problem
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.spec.engines import Sharding

LEAST_TOKENS = 256  # that an even router would have sent to each expert
_ELEMENTS = 64  # of each expert and tensor that are read
_STACKED = re.compile(r"(.*\.experts)\.[^.]+")
_SINGLE = re.compile(r"(.*\.experts)\.(\d+)\..+")


def expert_problems(
    model: nn.Module,
    optimizer: TorchOptimizer,
    sharding: Sharding,
    *,
    num_experts: int,
    even_share: float,
    device: torch.device,
    step: int,
) -> list[Problem]:
    """A problem if experts have had no gradient, though an even router would have sent them many tokens; collective."""
    if even_share < LEAST_TOKENS:
        return []
    idle = idle_experts(model, optimizer, sharding, num_experts=num_experts, device=device)
    if not idle:
        return []
    text = (
        f"step {step}: no gradient since the start for {experts_by_layer(idle)}; an even share would be "
        f"{even_share:,.0f} tokens for each expert"
    )
    return [Problem(text, is_certain=False)]


def idle_experts(
    model: nn.Module, optimizer: TorchOptimizer, sharding: Sharding, *, num_experts: int, device: torch.device
) -> dict[str, tuple[list[int], int]]:
    """By the module that holds them, the experts whose first moments are zeros on every rank, and how many it has."""
    places: dict[str, tuple[str, int, int, int]] = {}  # of a tensor: owner, first expert, experts, elements of each
    for name, parameter in plain_model(model).named_parameters():
        shape, path = tuple(getattr(parameter, "ds_shape", parameter.shape)), canonical_name(name)
        single, stacked = _SINGLE.fullmatch(path), _STACKED.fullmatch(path)
        if single is not None:
            places[path] = (single[1], int(single[2]), 1, prod(shape))
        elif stacked is not None and len(shape) == 3 and shape[0] == num_experts:
            places[path] = (stacked[1], 0, num_experts, prod(shape[1:]))
    flags = {owner: torch.zeros(num_experts, dtype=torch.uint8) for owner, *_ in places.values()}
    if not flags:
        return {}
    for piece in adapter_of(sharding).held_pieces(model, optimizer):
        if piece.state == "exp_avg" and piece.name in places:
            owner, first, count, size = places[piece.name]
            flags[owner][first : first + count] |= _moved(piece.values, piece.start, count, size)
    every = torch.cat([*flags.values()]).to(device)
    if dist.is_initialized():
        dist.all_reduce(every, op=dist.ReduceOp.MAX)
    found = every.cpu().split(num_experts)
    idle = {
        owner: [int(each) for each in (part == 0).nonzero()[:, 0]] for owner, part in zip(flags, found, strict=True)
    }
    return {owner: (numbers, num_experts) for owner, numbers in idle.items() if numbers}


def _moved(values: Tensor, start: int, count: int, size: int) -> Tensor:
    """uint8 [count]: 1 where an element of an expert, of those that are read of this piece, is not zero."""
    offsets = torch.arange(0, size, max(1, size // _ELEMENTS))
    places = (torch.arange(count)[:, None] * size + offsets).view(-1)
    is_here = (places >= start) & (places < start + values.numel())
    hits = (values[(places[is_here] - start).to(values.device)] != 0).cpu()
    moved = torch.zeros(count, dtype=torch.uint8)
    moved[places[is_here][hits] // size] = 1
    return moved
