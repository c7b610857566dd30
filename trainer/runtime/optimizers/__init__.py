"""The optimizer of a plan: one object over named groups of parameters, for an update after or in the backward.

`rules` is the table of all optimizers and of the parameters that go together, `galore` projects the matrices of the
blocks, `in_backward` runs any of them while gradients come. The learning rate is set before every step by the loop.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer as TorchOptimizer

from shardwise.trainer.runtime.optimizers.galore import build_galore, galore_class_name
from shardwise.trainer.runtime.optimizers.in_backward import (
    backward_updates,
    check_in_backward,
    run_in_backward,
)
from shardwise.trainer.runtime.optimizers.rules import (
    BETAS,
    DECAY,
    EPSILON,
    MATRICES,
    NO_DECAY,
    UPDATE_RULES,
    WITH_MATRICES,
    Group,
    matrix_groups,
    parameter_groups,
)
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import GaloreJob
from shardwise.trainer.spec.optimizers import Optimizer

__all__ = [
    "BETAS",
    "DECAY",
    "EPSILON",
    "MATRICES",
    "NO_DECAY",
    "Group",
    "build_optimizer",
    "check_in_backward",
    "expected_class_name",
    "expected_groups",
    "optimizer_facts",
    "parameter_groups",
    "set_learning_rate",
    "unwrapped",
    "updates_in_backward",
]

_PLAIN_MODULES = (
    "torch.optim",
    "deepspeed.ops",
    "bitsandbytes.optim",
    "lion_pytorch",
    "galore_torch",
    "transformers.optimization",
    "shardwise.trainer.runtime.optimizers",
)


def build_optimizer(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    galore: GaloreJob | None = None,
    in_backward: bool = False,
) -> TorchOptimizer:
    """The optimizer over its groups; with `galore` the one inside GaLore, with `in_backward` run by gradient hooks.

    InputError where the two do not go with the optimizer or the model.
    """
    if in_backward and optimizer.facts.updates_on_host:
        raise InputError("deepspeed_cpu_adam updates state in host RAM after the backward pass, not inside it")
    if galore is not None:
        built = build_galore(optimizer, model, lr=lr, weight_decay=weight_decay, galore=galore)
    else:
        rule = UPDATE_RULES[optimizer]
        groups = matrix_groups if rule.groups == WITH_MATRICES else parameter_groups
        built = rule.build(groups(model, weight_decay=weight_decay), lr)
    if in_backward or optimizer.facts.updates_in_backward or (galore is not None and galore.layerwise):
        run_in_backward(built)
    return built


def expected_class_name(optimizer: Optimizer, *, is_galore: bool = False) -> str:
    """The class that `build_optimizer` returns; what Accelerate or DeepSpeed put in its place has another.

    An update in the backward pass does not change the class.
    """
    return galore_class_name(optimizer) if is_galore else UPDATE_RULES[optimizer].class_name


def expected_groups(optimizer: Optimizer, *, is_galore: bool = False) -> tuple[str, ...]:
    """The names of the groups that `build_optimizer` makes, in their order."""
    return WITH_MATRICES if is_galore else UPDATE_RULES[optimizer].groups


def updates_in_backward(optimizer: object) -> bool:
    """True if weights are updated during the backward pass: there is no gradient to clip afterwards."""
    return backward_updates(unwrapped(optimizer)) is not None


def optimizer_facts(optimizer: object) -> dict[str, str]:
    """State of the optimizer after a step, as text: dtypes, shapes and bytes on this rank."""
    return state_facts(unwrapped(optimizer))


def unwrapped(optimizer: object) -> TorchOptimizer:
    """The optimizer inside Accelerate's and DeepSpeed's wrappers, the one that updates parameters."""
    inner = optimizer
    while not (isinstance(inner, TorchOptimizer) and type(inner).__module__.startswith(_PLAIN_MODULES)):
        assert hasattr(inner, "optimizer"), f"{type(inner).__name__} wraps no optimizer"
        inner = inner.optimizer
    return inner


def set_learning_rate(optimizer: Any, lr: float) -> None:  # noqa: ANN401  # torch's, Accelerate's or DeepSpeed's, alike in this
    """Sets the learning rate of every group, and hooks on parameters that an engine has put in since the last step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    updates = backward_updates(optimizer) if isinstance(optimizer, TorchOptimizer) else None
    if updates is not None:
        updates.attach()


_TABLES = ("qmap1", "qmap2")  # of bitsandbytes: the 256 values of an 8-bit state, one table for all


def state_facts(optimizer: TorchOptimizer) -> dict[str, str]:
    """`optimizer`, `optimizer_state`, its bytes on this rank, `projectors`, and `updates` inside the backward pass."""
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    facts = {
        "optimizer": f"{type(optimizer).__name__} of {type(optimizer).__module__.split('.')[0]}",
        "optimizer_state": _types(states) or "none",
        "optimizer_state_bytes": f"{_num_bytes(states):,}",
    }
    counts = Counter(_sizes(matrix) for state in states for matrix in projectors(state))
    if counts:
        facts["projectors"] = ", ".join(f"{sizes} of {count} matrices" for sizes, count in sorted(counts.items()))
    updates = backward_updates(optimizer)
    if updates is not None:
        facts["updates"] = (
            f"inside the backward pass, by hooks on {updates.num_hooks} parameters, {updates.num_updates} so far; "
            "gradients are never all there, so none is clipped by their norm"
        )
    return facts


def _types(states: list[Mapping[str, Any]]) -> str:
    """`exp_avg: float32 (21 tensors); state1: uint8 (9 tensors), float32 (12 tensors)`."""
    counts: dict[str, Counter[str]] = {}
    for state in states:
        for name, tensor in _tensors(state):
            counts.setdefault(name, Counter())[_type(tensor)] += 1
    return "; ".join(
        f"{name}: " + ", ".join(f"{type_} ({count} tensors)" for type_, count in sorted(types.items(), reverse=True))
        for name, types in sorted(counts.items())
    )


def _type(tensor: Tensor) -> str:
    paged = " paged" if getattr(tensor, "is_paged", False) else ""
    return str(tensor.dtype).removeprefix("torch.") + paged


def _tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors that belong to one parameter; counts of steps are none."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.ndim > 0 and name not in _TABLES:
            yield name, value.to_local() if isinstance(value, DTensor) else value


def _num_bytes(states: list[Mapping[str, Any]]) -> int:
    held = [tensor for state in states for _, tensor in _tensors(state)]
    held += [matrix for state in states for matrix in projectors(state)]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


def projectors(state: Mapping[str, Any]) -> list[Tensor]:
    """The orthogonal matrices of a parameter under GaLore: one, or two where both sides are projected."""
    found = getattr(state.get("projector"), "ortho_matrix", None)
    if found is None:
        return []
    return list(found) if isinstance(found, list | tuple) else [found]


def _sizes(tensor: Tensor) -> str:
    return " x ".join(str(size) for size in tensor.shape) + f" {_type(tensor)}"
