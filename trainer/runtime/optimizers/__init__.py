"""The optimizer of a plan, over two groups of parameters: those with weight decay and those without.

Decay applies to matrices (two or more dimensions); norms and biases have none. Betas and epsilon are those of
Llama-type training (Llama 2, arXiv:2307.09288, section 2.2). The learning rate is set before every step by the loop.

`deepspeed_cpu_adam` is built here, with `adamw_mode` on: Accelerate's own replacement of an optimizer under offload
would turn it off without a word (docs/workarounds.md, W5).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer as TorchOptimizer

from trainer.spec.errors import InputError
from trainer.spec.job import GaloreJob
from trainer.spec.strategy import Optimizer

BETAS = (0.9, 0.95)
EPSILON = 1e-8
DECAY, NO_DECAY = "decay", "no_decay"

Group = dict[str, Any]


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[Group]:
    """Two groups, `decay` and `no_decay`, of the parameters that are trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay, "name": DECAY},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "name": NO_DECAY},
    ]


def build_optimizer(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    galore: GaloreJob | None = None,
    in_backward: bool = False,
) -> TorchOptimizer:
    """The optimizer over both groups; with `galore` the one inside GaLore, with `in_backward` run by gradient hooks."""
    if galore is not None or in_backward:
        raise InputError("GaLore and the optimizer in the backward pass come with shardwise 0.3")
    build = _BUILDERS.get(optimizer)
    if build is None:
        raise InputError(
            f"pin.optimizer: {optimizer} comes with shardwise 0.3; there are {', '.join(sorted(_BUILDERS))}"
        )
    return build(parameter_groups(model, weight_decay=weight_decay), lr)


def expected_class_name(optimizer: Optimizer, *, is_galore: bool = False, in_backward: bool = False) -> str:
    """The class that `build_optimizer` answers with; what Accelerate or DeepSpeed put in its place has another."""
    return _CLASS_NAMES[optimizer]


def updates_in_backward(optimizer: object) -> bool:
    """Whether weights are updated while the backward pass runs, so that no gradient is left to clip or to step on."""
    return bool(getattr(unwrapped(optimizer), "updates_in_backward", False))


def optimizer_facts(optimizer: object) -> dict[str, str]:
    """What its state is seen to be after a step, in words: types, shapes, where it lies."""
    return {}


def unwrapped(optimizer: object) -> TorchOptimizer:
    """The optimizer inside Accelerate's and DeepSpeed's wrappers, the one that updates parameters."""
    inner = optimizer
    while not (isinstance(inner, TorchOptimizer) and type(inner).__module__.startswith(_PLAIN_MODULES)):
        assert hasattr(inner, "optimizer"), f"{type(inner).__name__} wraps no optimizer"
        inner = inner.optimizer
    return inner


def set_learning_rate(optimizer: Any, lr: float) -> None:  # noqa: ANN401  # torch's, Accelerate's or DeepSpeed's, alike in this
    """Sets the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _adamw(groups: Iterable[Group], lr: float) -> TorchOptimizer:
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPSILON, foreach=True)


def _adamw_fused(groups: Iterable[Group], lr: float) -> TorchOptimizer:
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPSILON, fused=True)


def _sgd(groups: Iterable[Group], lr: float) -> TorchOptimizer:
    return torch.optim.SGD(groups, lr=lr)


def _deepspeed_cpu_adam(groups: Iterable[Group], lr: float) -> TorchOptimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    built = DeepSpeedCPUAdam(groups, lr=lr, betas=BETAS, eps=EPSILON, adamw_mode=True)
    assert isinstance(built, TorchOptimizer)
    return built


_PLAIN_MODULES = ("torch.optim", "deepspeed.ops")
_CLASS_NAMES = {
    Optimizer.ADAMW: "AdamW",
    Optimizer.ADAMW_FUSED: "AdamW",
    Optimizer.SGD: "SGD",
    Optimizer.DEEPSPEED_CPU_ADAM: "DeepSpeedCPUAdam",
}
_BUILDERS: dict[Optimizer, Callable[[Iterable[Group], float], TorchOptimizer]] = {
    Optimizer.ADAMW: _adamw,
    Optimizer.ADAMW_FUSED: _adamw_fused,
    Optimizer.SGD: _sgd,
    Optimizer.DEEPSPEED_CPU_ADAM: _deepspeed_cpu_adam,
}
