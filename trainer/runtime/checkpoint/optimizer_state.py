"""Optimizer state as plain tensors and a count of steps, read and made without ever calling `step()`.

torch's own helpers for reading state (`get_optimizer_state_dict`) take a step on zero gradients where there is no state
yet, which leaves Adam's count one too high: the first real update is then 1.34 times too small. Here state that does
not exist is not there, and what is made on resume is what `Adam._init_group` would have made, with the saved count.
One row of `_LAYOUTS` is one optimizer class; a class or a kind of state that is not listed is refused, never dropped.
"""

from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer as TorchOptimizer

from trainer.runtime.checkpoint.manifest import HyperParameter, ParameterEntry
from trainer.spec.errors import InputError

Group = dict[str, Any]  # as torch keeps them


class _Layout(NamedTuple):
    """What an optimizer keeps for a parameter: tensors of its shape, and perhaps a count of steps."""

    tensors: frozenset[str]
    counts_steps: bool


_LAYOUTS: dict[type[TorchOptimizer], _Layout] = {
    torch.optim.AdamW: _Layout(frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}), counts_steps=True),
    torch.optim.Adam: _Layout(frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}), counts_steps=True),
    torch.optim.SGD: _Layout(frozenset({"momentum_buffer"}), counts_steps=False),
}


def check_supported(optimizer: TorchOptimizer) -> None:
    """InputError for an optimizer whose state has no place in the format yet."""
    if type(optimizer) not in _LAYOUTS:
        known = ", ".join(sorted(kind.__name__ for kind in _LAYOUTS))
        raise InputError(
            f"checkpoints of {type(optimizer).__name__} come with shardwise 0.5; there are those of {known}"
        )


def state_tensors(optimizer: TorchOptimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state tensors of one parameter by name; none before its first step."""
    layout = _LAYOUTS[type(optimizer)]
    state = {key: value for key, value in optimizer.state.get(parameter, {}).items() if value is not None}
    tensors = {key: value for key, value in state.items() if not (layout.counts_steps and key == "step")}
    for key, value in tensors.items():
        if key not in layout.tensors or value.shape != parameter.shape:
            raise InputError(f"checkpoints do not know the state {key} that {type(optimizer).__name__} keeps")
    return tensors


def step_count(optimizer: TorchOptimizer, parameter: torch.Tensor) -> int | None:
    """How many steps the optimizer has counted for one parameter; None where it counts none."""
    if not _LAYOUTS[type(optimizer)].counts_steps:
        return None
    step = optimizer.state.get(parameter, {}).get("step")
    return None if step is None else int(step)


def create_state(
    optimizer: TorchOptimizer, group: Group, parameter: torch.Tensor, entry: ParameterEntry, *, name: str
) -> dict[str, torch.Tensor]:
    """Makes the state of one parameter as after `entry.step` steps; its tensors are still to be filled."""
    expected = _expected_tensors(optimizer, group)
    if not entry.state:
        return {}
    if set(entry.state) != expected:
        saved, wanted = (", ".join(sorted(keys)) or "nothing" for keys in (entry.state, expected))
        raise InputError(f"{name}: the checkpoint holds {saved}, the optimizer of this job keeps {wanted}")
    tensors = {key: torch.empty_like(parameter, memory_format=torch.preserve_format) for key in sorted(expected)}
    state: dict[str, torch.Tensor] = {}
    if _LAYOUTS[type(optimizer)].counts_steps:
        if entry.step is None:
            raise InputError(f"{name}: the checkpoint holds moments and no count of steps")
        state["step"] = _step_tensor(entry.step, group, parameter)
    optimizer.state[parameter] = state | tensors
    return tensors


def named_groups(optimizer: TorchOptimizer) -> dict[str, Group]:
    """The groups by their `name`, or their position where they have none; ValueError where two are called the same."""
    named = {str(group.get("name", position)): group for position, group in enumerate(optimizer.param_groups)}
    if len(named) != len(optimizer.param_groups):
        raise ValueError(f"two parameter groups have the same name: {', '.join(named)}")
    return named


def hyper_parameters(optimizer: TorchOptimizer) -> dict[str, dict[str, HyperParameter]]:
    """Every group's settings by the group's name, for the record."""
    return {
        name: {key: _plain(value) for key, value in sorted(group.items()) if key not in ("params", "param_names")}
        for name, group in named_groups(optimizer).items()
    }


def _expected_tensors(optimizer: TorchOptimizer, group: Group) -> set[str]:
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer"} if group["momentum"] else set()
    return {"exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if group["amsgrad"] else set())


def _step_tensor(step: int, group: Group, parameter: torch.Tensor) -> torch.Tensor:
    """As in torch.optim.adam: on the device and fp32 where the kernel reads it there, else on the CPU."""
    is_on_device = bool(group["capturable"] or group["fused"])
    double = torch.get_default_dtype() == torch.float64 and not group["fused"]
    return torch.tensor(
        float(step),
        dtype=torch.float64 if double else torch.float32,
        device=parameter.device if is_on_device else "cpu",
    )


def _plain(value: object) -> HyperParameter:
    """A setting as JSON can hold it; what is no plain value, as its text."""
    if isinstance(value, torch.Tensor):
        return float(value.item())
    if isinstance(value, list | tuple):
        return tuple(float(item) for item in value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
