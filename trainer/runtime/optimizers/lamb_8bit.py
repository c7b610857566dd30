"""LAMB (arXiv:1904.00962) on 8-bit moments: Adam's update of a tensor, scaled to the norm of the tensor itself.

    r = m / (sqrt(v) + eps) + decay w        w <- w - lr |w| / |r| r

bitsandbytes has a class of that name whose update is Adam's: the 8-bit kernels of `lamb` and `adam` are one, and |w|
is never used (docs/workarounds.md, W12). So the moments are bitsandbytes' (blocks of 256 elements, tensors below
4,096 elements in fp32), its kernel updates a scratch tensor of zeros with a rate of one, which writes
-m / (sqrt(v) + eps) there, and the rest is done here. The ratio |w| / |r| is one where either is zero, as in the
authors' code.

Imports bitsandbytes, which takes seconds: imported by `build_optimizer` only where it is used.
"""

from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit
from torch import nn


class Lamb8bit(AdamW8bit):  # type: ignore[misc]  # bitsandbytes is published without type information
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
