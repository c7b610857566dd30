"""Updates inside the backward pass: each weight is updated as soon as its gradient is complete, which is then freed.

Every optimizer that updates a parameter from that parameter alone can run so, and all of ours can. One object stays in
charge: a hook shows it one parameter and calls its `step`, so groups, learning rate and state are where they always
are. torch calls the hooks (`register_post_accumulate_grad_hook`) when all uses of a weight have added to its gradient.
No two gradients wait for each other, so nothing can be clipped by the norm of all of them, scaled by a loss scaler,
added up over micro batches, or summed over ranks by DistributedDataParallel, which reduces after the hook. FSDP2 calls
hooks on its shards after it has reduced them; its shards replace the parameters after the optimizer was built, so hooks
are set anew where one is missing.

Two optimizers are made for it, so that neither gradients nor moments are ever all alive. LOMO (arXiv:2306.09782) is
plain SGD. AdaLomo (arXiv:2310.10195, algorithm 1) gives each weight a rate of its own from a second moment stored as a
row and a column (Adafactor's, arXiv:1804.04235), scales the update down to a root mean square of `clip_threshold`, and
makes the step relative to the weight's own root mean square. The moment's decay, 1 - t^-0.8, is the authors' and starts
at zero, so the first moment estimate is unbiased. LOMO does not clip at all, AdaLomo bounds each matrix's update.
Weights in 16 bit are updated in fp32 and rounded once. In addition to the gradient, AdaLomo's update needs one tensor
of its size.

Both are written here because the authors' package, lomo-optim 0.1.1, keeps AdaLomo's state on a CUDA device also where
the model is not, searches all parameters in every hook, and gets the learning rate through a call of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer as TorchOptimizer
from torch.utils.hooks import RemovableHandle

from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.strategy import Method, Precision


class BackwardUpdates:
    """The hooks of one optimizer."""

    def __init__(self, optimizer: TorchOptimizer) -> None:
        self._optimizer = optimizer
        self._hooks: dict[int, RemovableHandle] = {}  # by the parameter's identity
        self.num_updates = 0  # made so far

    @property
    def num_hooks(self) -> int:
        """Parameters that have one."""
        return len(self._hooks)

    def attach(self) -> None:
        """Gives every parameter of the optimizer a hook, and removes hooks of other parameters."""
        wanted = {
            id(parameter): (parameter, index)
            for index, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
        }
        for stale in self._hooks.keys() - wanted.keys():
            self._hooks.pop(stale).remove()
        for key, (parameter, index) in wanted.items():
            if key not in self._hooks:
                self._hooks[key] = parameter.register_post_accumulate_grad_hook(partial(self._update, index))

    def _update(self, index: int, parameter: Tensor) -> None:
        """Updates one parameter of group `index` and frees its gradient."""
        optimizer, groups = self._optimizer, self._optimizer.param_groups
        optimizer.param_groups = [{**groups[index], "params": [parameter]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = groups
        parameter.grad = None
        self.num_updates += 1


def run_in_backward(optimizer: TorchOptimizer) -> None:
    """From now on, every backward pass updates the parameters of `optimizer`; its `step` finds nothing to do."""
    updates = BackwardUpdates(optimizer)
    updates.attach()
    optimizer.__dict__["backward_updates"] = updates  # an attribute that torch's class does not declare


def backward_updates(optimizer: TorchOptimizer) -> BackwardUpdates | None:
    """The hooks of an optimizer that runs in the backward pass; None of one that does not."""
    found = optimizer.__dict__.get("backward_updates")
    assert found is None or isinstance(found, BackwardUpdates)
    return found


def check_in_backward(chosen: Candidate, *, is_layerwise: bool = False) -> None:
    """InputError where a candidate updates inside the backward pass and cannot; `is_layerwise` is GaLore's."""
    what = _what(chosen, is_layerwise=is_layerwise)
    if what is None:
        return
    strategy = chosen.strategy
    if chosen.accumulation > 1:
        raise InputError(
            f"{what} does not accumulate gradients over {chosen.accumulation} micro batches; "
            f"set pin.micro_batch: {chosen.micro_batch * chosen.accumulation}, or an update after the backward pass"
        )
    if not strategy.sharding.facts.updates_in_backward:
        raise InputError(
            f"{what} uses gradients before {strategy.sharding} has summed them over the ranks; "
            f"set pin.sharding: {' or '.join(each for each in Sharding if each.facts.updates_in_backward)}"
        )
    if strategy.precision is Precision.FP16_MIXED:
        raise InputError(f"{what} uses gradients before fp16's loss scale is removed; use bf16-mixed or fp32")


def _what(chosen: Candidate, *, is_layerwise: bool) -> str | None:
    if chosen.strategy.optimizer.facts.updates_in_backward:
        return f"optimizer {chosen.strategy.optimizer}"
    if chosen.optimizer_in_backward:
        return "pin.optimizer_in_backward"
    return "train.galore.layerwise" if is_layerwise and chosen.method is Method.GALORE else None


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
