"""LOMO and AdaLomo: full-parameter training in which neither gradients nor moments are ever all alive.

LOMO (arXiv:2306.09782) is plain SGD that runs inside the backward pass. AdaLomo (arXiv:2310.10195, algorithm 1) gives
each weight a rate of its own from a second moment stored as a row and a column (Adafactor's, arXiv:1804.04235), scales
the update down to a root mean square of `clip_threshold`, and makes the step relative to the weight's own root mean
square. The moment's decay, 1 - t^-0.8, is the authors' and starts at zero, so the first moment estimate is unbiased.

Written here because the authors' package, lomo-optim 0.1.1, keeps AdaLomo's state on a CUDA device also where the model
is not, searches all parameters in every hook, and gets the learning rate through a call of its own. Both classes are
ordinary optimizers; `in_backward` runs them. Neither clips by the norm of all gradients, which are never there
together: LOMO does not clip at all, AdaLomo bounds each matrix's update.

Weights in 16 bit are updated in fp32 and rounded once. In addition to the gradient, AdaLomo's update needs one tensor
of its size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer as TorchOptimizer

SQUARE_FLOOR = 1e-30  # added to squared gradients
SCALE_FLOOR = 1e-3  # of a weight's root mean square
DECAY_POWER = -0.8
CLIP_THRESHOLD = 1.0


class _Fused(TorchOptimizer, ABC):
    """Updates parameters that have a gradient, in fp32."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update; inside the backward pass, of the one parameter whose gradient is complete."""
        assert closure is None, "gradients are complete when a step is taken"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    weight = parameter.float()  # itself where it is fp32
                    self._update(weight, parameter.grad.float(), self.state[parameter], group)
                    if weight is not parameter:
                        parameter.copy_(weight)
        return None

    @abstractmethod
    def _update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Changes an fp32 weight in place by its fp32 gradient."""


class Lomo(_Fused):
    """w <- (1 - lr decay) w - lr g, without state."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    def _update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(gradient, alpha=-group["lr"])


class AdaLomo(_Fused):
    """A step relative to the weight's root mean square, along a normalised gradient with a factored second moment."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        weight_decay: float = 0.0,
        clip_threshold: float = CLIP_THRESHOLD,
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "clip_threshold": clip_threshold})

    def _update(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        update = _normalised(gradient, state, share=state["step"] ** DECAY_POWER)
        update.div_((_rms(update) / group["clip_threshold"]).clamp_(min=1.0))
        step_size = group["lr"] * _rms(weight).clamp_(min=SCALE_FLOOR)
        weight.mul_(1 - step_size * group["weight_decay"]).sub_(update.mul_(step_size))


def _normalised(gradient: Tensor, state: dict[str, Any], *, share: float) -> Tensor:
    """The gradient over the root of its second moment, to which this gradient's squares contribute `share`."""
    if gradient.ndim < 2:
        moment = _moment(state, "exp_avg_sq", gradient.square().add_(SQUARE_FLOOR), share)
        return moment.rsqrt().mul_(gradient)
    rows = _moment(state, "exp_avg_sq_row", _mean_square(gradient, dim=-1), share)
    columns = _moment(state, "exp_avg_sq_col", _mean_square(gradient, dim=-2), share)
    row_factors = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_()
    return (row_factors.unsqueeze(-1) * columns.rsqrt().unsqueeze(-2)).mul_(gradient)


def _moment(state: dict[str, Any], name: str, squares: Tensor, share: float) -> Tensor:
    if name not in state:
        state[name] = torch.zeros_like(squares)
    moment: Tensor = state[name]
    return moment.lerp_(squares, share)


def _mean_square(tensor: Tensor, *, dim: int) -> Tensor:
    """The mean of the squares along a dimension, without a tensor of the squares."""
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dim)
    return norms.square_().div_(tensor.shape[dim]).add_(SQUARE_FLOOR)


def _rms(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor)
    return norm.div_(tensor.numel() ** 0.5)
