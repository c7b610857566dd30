"""Optimizer state as plain tensors and a count of steps, read and made without ever calling `step()`.

torch's own helpers for reading state (`get_optimizer_state_dict`) take a step on zero gradients where there is no state
yet, which leaves Adam's count one too high: the first real update is then 1.34 times too small. Here state that does
not exist is not there. `layouts` has one row for each optimizer class; a class or a kind of state that is not listed is
refused, never dropped.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer as TorchOptimizer

from trainer.runtime.checkpoint.files.manifest import HyperParameter, ParameterEntry
from trainer.runtime.checkpoint.layout.blockwise import SCALES
from trainer.runtime.checkpoint.layout.optimizers import LAYOUTS, Group, Made, StateTensor, kept_tensors, layout_of
from trainer.spec.errors import InputError


def check_supported(optimizer: TorchOptimizer) -> None:
    """InputError for an optimizer whose state has no place in the format."""
    if layout_of(optimizer) is None:
        known = ", ".join(sorted({path.rpartition(".")[2] for path in LAYOUTS}))
        raise InputError(f"there are no checkpoints of {type(optimizer).__name__}; there are those of {known}")


def state_tensors(optimizer: TorchOptimizer, parameter: torch.Tensor) -> dict[str, StateTensor]:
    """The state tensors of one parameter by their names in a checkpoint, in order; none before its first step."""
    return dict(sorted(kept_tensors(optimizer, parameter).items()))


def step_count(optimizer: TorchOptimizer, parameter: torch.Tensor) -> int | None:
    """How many steps the optimizer has counted for one parameter; None where it counts none."""
    step = optimizer.state.get(parameter, {}).get("step")
    return None if step is None else int(step)


def create_state(
    optimizer: TorchOptimizer, group: Group, parameter: torch.Tensor, entry: ParameterEntry, *, name: str
) -> None:
    """Makes the state of one parameter as after `entry.step` steps; its tensors are to be filled.

    What the optimizer keeps already stays as it is, and what it does not is zeros.
    InputError where the optimizer keeps something else than was saved.
    """
    if not entry.state and entry.step is None:
        optimizer.state.pop(parameter, None)  # of later steps, or of a checkpoint that turned out to be damaged
        return
    make = layout_of(optimizer)
    assert make is not None, "check_supported saw it"
    made = Made(optimizer, group, parameter, entry.step)
    try:
        optimizer.state[parameter] = make(made)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    ours, theirs = (_moments(names) for names in (state_tensors(optimizer, parameter), entry.state))
    if ours != theirs:
        saved, wanted = (", ".join(sorted(names)) or "nothing" for names in (theirs, ours))
        raise InputError(f"{name}: the checkpoint holds {saved}, the optimizer of this job keeps {wanted}")


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


def _moments(names: Iterable[str]) -> set[str]:
    """Without the scales of those in 8 bit: what one job keeps so, another may keep in fp32."""
    return {name for name in names if not name.endswith(SCALES)}


def _plain(value: object) -> HyperParameter:
    """A setting as JSON can hold it; what is no plain value, as its text."""
    if isinstance(value, torch.Tensor):
        return float(value.item())
    if isinstance(value, list | tuple):
        return tuple(float(item) for item in value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
