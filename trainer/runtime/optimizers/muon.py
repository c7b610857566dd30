"""Muon for the matrices of the blocks, AdamW for everything else, as one optimizer.

Muon (torch.optim.Muon) orthogonalises the momentum of a matrix by five Newton-Schulz steps. It is defined for matrices
inside the network; embeddings, head, norms and biases keep AdamW, as its author does
(https://kellerjordan.github.io/posts/muon/). With `match_rms_adamw` an m x n update is scaled by 0.2 sqrt(max(m, n)),
so that its root mean square is AdamW's and both rules share one learning rate and one weight decay (arXiv:2502.16982,
section 2.2).
"""

from collections.abc import Callable
from typing import overload

import torch
from torch.optim.optimizer import Optimizer as TorchOptimizer

from shardwise.trainer.runtime.optimizers.groups import MATRICES, Group

MOMENTUM = 0.95  # Muon's author's, and torch's default


class MuonAndAdamW(TorchOptimizer):
    """Groups called `matrices` go to Muon, all others to AdamW; one state, one list of groups."""

    def __init__(self, groups: list[Group], lr: float, *, betas: tuple[float, float], eps: float) -> None:
        matrices = [group for group in groups if group["name"] == MATRICES]
        others = [group for group in groups if group["name"] != MATRICES]
        self._muon = torch.optim.Muon(matrices, lr=lr, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, eps=eps, foreach=True)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {"lr": lr})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every group by its own rule."""
        assert closure is None, "gradients are complete when a step is taken"
        for group in self.param_groups:  # read anew: loading a state replaces them, an update in backward shows one
            rule = self._muon if group["name"] == MATRICES else self._adamw
            rule.param_groups, rule.state = [group], self.state
            rule.step()  # type: ignore[no-untyped-call]  # torch.optim.Muon has no annotations
        return None
