"""Optimizer state after a step: dtypes, shapes and bytes of each state tensor, as text."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer as TorchOptimizer

from shardwise.trainer.runtime.optimizers.in_backward import backward_updates

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
