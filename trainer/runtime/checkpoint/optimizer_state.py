"""Optimizer state as plain tensors and a count of steps, read and made without ever calling `step()`.

torch's own helpers for reading state (`get_optimizer_state_dict`) take a step on zero gradients where there is no state
yet, which leaves Adam's count one too high: the first real update is then 1.34 times too small. Here state that does
not exist is not there, and what is made on resume is what `Adam._init_group` would have made, with the saved count.
One row of `_LAYOUTS` is one optimizer class; a class or a kind of state that is not listed is refused, never dropped.
A parameter is whatever the optimizer was given: under ZeRO the flat partition of a whole group.
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


_ADAM = frozenset({"exp_avg", "exp_avg_sq"})
_LAYOUTS: dict[str, _Layout] = {  # by the path of the class: importing DeepSpeed takes seconds
    "torch.optim.adamw.AdamW": _Layout(_ADAM | {"max_exp_avg_sq"}, counts_steps=True),
    "torch.optim.adam.Adam": _Layout(_ADAM | {"max_exp_avg_sq"}, counts_steps=True),
    "torch.optim.sgd.SGD": _Layout(frozenset({"momentum_buffer"}), counts_steps=False),
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": _Layout(_ADAM, counts_steps=True),
}


def check_supported(optimizer: TorchOptimizer) -> None:
    """InputError for an optimizer whose state has no place in the format yet."""
    if _path(optimizer) not in _LAYOUTS:
        known = ", ".join(sorted(path.rpartition(".")[2] for path in _LAYOUTS))
        raise InputError(
            f"checkpoints of {type(optimizer).__name__} come with shardwise 0.5; there are those of {known}"
        )


def state_tensors(optimizer: TorchOptimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state tensors of one parameter by name; none before its first step."""
    layout = _LAYOUTS[_path(optimizer)]
    state = {key: value for key, value in optimizer.state.get(parameter, {}).items() if value is not None}
    tensors = {key: value for key, value in state.items() if not (layout.counts_steps and key == "step")}
    for key, value in tensors.items():
        if key not in layout.tensors or value.shape != parameter.shape:
            raise InputError(f"checkpoints do not know the state {key} that {type(optimizer).__name__} keeps")
    return tensors


def step_count(optimizer: TorchOptimizer, parameter: torch.Tensor) -> int | None:
    """How many steps the optimizer has counted for one parameter; None where it counts none."""
    if not _LAYOUTS[_path(optimizer)].counts_steps:
        return None
    step = optimizer.state.get(parameter, {}).get("step")
    return None if step is None else int(step)


def create_state(
    optimizer: TorchOptimizer, group: Group, parameter: torch.Tensor, entry: ParameterEntry, *, name: str
) -> None:
    """Makes the state of one parameter as after `entry.step` steps; its tensors are zeros, to be filled.

    Tensors that are there already stay the ones: an engine may hold on to them, and there may be no room for others.
    """
    expected = _expected_tensors(optimizer, group)
    if not entry.state:
        return
    if set(entry.state) != expected:
        saved, wanted = (", ".join(sorted(keys)) or "nothing" for keys in (entry.state, expected))
        raise InputError(f"{name}: the checkpoint holds {saved}, the optimizer of this job keeps {wanted}")
    kept = state_tensors(optimizer, parameter)
    tensors = {key: kept[key].zero_() if key in kept else _zeros(optimizer, parameter) for key in sorted(expected)}
    state: dict[str, Any] = {}
    if _LAYOUTS[_path(optimizer)].counts_steps:
        if entry.step is None:
            raise InputError(f"{name}: the checkpoint holds moments and no count of steps")
        state["step"] = _step_value(optimizer, entry.step, group, parameter)
    optimizer.state[parameter] = state | tensors


def count_up(optimizer: Any, step: int) -> None:  # noqa: ANN401  # torch's, or DeepSpeed's
    """Takes an optimizer that counts outside of its state to where it was after so many steps.

    DeepSpeedCPUAdam keeps the powers of its betas as running products in fp32. After a jump it would take them by pow()
    instead, so losses after a resume would differ in their last bits; so a number that is nobody's takes the steps
    (0.19.8, csrc/includes/cpu_adam.h, IncrementStep). Powers that 1 is not told from any more need no steps.
    """
    settings = optimizer.param_groups[0]
    if not hasattr(optimizer, "ds_opt_adam") or max(settings["betas"]) ** step < torch.finfo(torch.float32).eps / 4:
        return
    number, gradient, *moments = (torch.zeros(1) for _ in range(4))
    for count in range(1, step + 1):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id, count, 0.0, *settings["betas"], settings["eps"], 0.0, settings["bias_correction"],
            number, gradient, *moments,
        )  # fmt: skip


def named_groups(optimizer: TorchOptimizer) -> dict[str, Group]:
    """The groups by their `name`, or their position where they have none; ValueError where two are called the same."""
    named = {str(group.get("name", position)): group for position, group in enumerate(optimizer.param_groups)}
    if len(named) != len(optimizer.param_groups):
        raise ValueError(f"two parameter groups have the same name: {', '.join(named)}")
    return named


def groups_of_parameters(optimizer: TorchOptimizer) -> dict[int, tuple[str, Group]]:
    """The group that updates each parameter and its name, by the parameter's identity."""
    return {
        id(parameter): (name, group) for name, group in named_groups(optimizer).items() for parameter in group["params"]
    }


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


def _path(optimizer: TorchOptimizer) -> str:
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def _zeros(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:  # noqa: ANN401  # torch's, or DeepSpeed's
    """State of a parameter's shape, in the type the optimizer makes it: DeepSpeedCPUAdam's in fp32 unless told."""
    dtype = torch.float32 if getattr(optimizer, "fp32_optimizer_states", False) else parameter.dtype
    return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)


def _step_value(optimizer: TorchOptimizer, step: int, group: Group, parameter: torch.Tensor) -> torch.Tensor | int:
    """As in torch.optim.adam: on the device and fp32 where the kernel reads it there, else on the CPU.

    DeepSpeedCPUAdam counts in a plain number.
    """
    if "capturable" not in group:
        return step
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
