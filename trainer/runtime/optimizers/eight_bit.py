"""Optimizers on bitsandbytes' 8-bit moments: AdamW on the shards of FSDP2, and LAMB.

bitsandbytes' kernels need plain tensors. AdamW's update of an element depends on no other element but by the scale of
its block, so that a rank updates its rows of a DTensor as a tensor of their own, in blocks of 256 elements from its
first. The moments of a tensor are 8 bit if the shard of the first rank, the largest, has 4,096 elements: ranks must
agree on what a checkpoint holds.

LAMB (arXiv:1904.00962): Adam's update of a tensor, scaled to the norm of the tensor itself.

    r = m / (sqrt(v) + eps) + decay w        w <- w - lr |w| / |r| r

bitsandbytes has a class of that name whose update is Adam's: the 8-bit kernels of `lamb` and `adam` are one, and |w|
is never used (docs/workarounds.md, W12). So the moments are bitsandbytes' (blocks of 256 elements, tensors below
4,096 elements in fp32), its kernel updates a scratch tensor of zeros with a rate of one, which writes
-m / (sqrt(v) + eps) there, and the rest is done here. The ratio |w| / |r| is one where either is zero, as in the
authors' code.

Imports bitsandbytes, which takes seconds: imported by `build_optimizer` only where it is used.
"""

from math import prod
from typing import Any

import bitsandbytes
import torch
from torch import nn
from torch.distributed.tensor import DTensor


class AdamW8bit(bitsandbytes.optim.AdamW8bit):  # type: ignore[misc]  # bitsandbytes is published without type information
    """bitsandbytes' AdamW of that name, also for DTensors: the moments are plain tensors, those of this rank's rows."""

    @torch.no_grad()
    def init_state(self, group: dict[str, Any], p: nn.Parameter, gindex: int, pindex: int) -> None:
        """Zeros in place of the moments; bitsandbytes' `step` calls it."""
        if not isinstance(p, DTensor):
            super().init_state(group, p, gindex, pindex)
            return
        local, least = p.to_local(), self.args.min_8bit_size
        self.args.min_8bit_size = 0 if _largest_shard(p) >= least else local.numel() + 1
        try:
            super().init_state(group, local, gindex, pindex)
        finally:
            self.args.min_8bit_size = least
        self.state[p] = self.state.pop(local)

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: nn.Parameter, gindex: int, pindex: int) -> None:
        """Updates one parameter; bitsandbytes' `step` calls it."""
        if not isinstance(p, DTensor):
            super().update_step(group, p, gindex, pindex)
            return
        local, gradient = p.to_local(), p.grad
        if local.numel() == 0:
            self.state[p]["step"] += 1
            return
        assert isinstance(gradient, DTensor), "FSDP2 reduces gradients to shards"
        local.grad = gradient.to_local()
        self.state[local] = self.state[p]
        try:
            super().update_step(group, local, gindex, pindex)
        finally:
            del self.state[local]


def _largest_shard(parameter: DTensor) -> int:
    """Elements of the first rank's rows."""
    rows, *others = parameter.shape
    return -(-rows // parameter.device_mesh.size(-1)) * prod(others)


class Lamb8bit(bitsandbytes.optim.AdamW8bit):  # type: ignore[misc]  # bitsandbytes is published without type information
    """One trust ratio a tensor. Scratch: a tensor like the weight, in the weight's type."""

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: nn.Parameter, gindex: int, pindex: int) -> None:
        """Updates one parameter; bitsandbytes' `step` calls it."""
        p.data = p.data.contiguous()
        lr, decay, weight = group["lr"], group["weight_decay"], p.data
        p.data = torch.zeros_like(weight)
        try:
            super().update_step({**group, "lr": 1.0, "weight_decay": 0.0}, p, gindex, pindex)
            update = p.data.neg_()
        finally:
            p.data = weight
        update.add_(weight, alpha=decay)
        weight_norm, update_norm = torch.linalg.vector_norm(weight), torch.linalg.vector_norm(update)
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        weight.sub_(update.mul_(ratio * lr))
