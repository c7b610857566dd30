"""What each optimizer keeps of a parameter, and how that is made: one row of `LAYOUTS` is one optimizer class.

State is made here as the optimizer would have made it at its first step, from zeros, with the saved count; nothing
calls `step()`. A parameter is whatever the optimizer was given: under ZeRO the flat partition of a whole group.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer as TorchOptimizer

from trainer.runtime.checkpoint.layout.blockwise import BLOCK_ELEMENTS, SCALES
from trainer.runtime.checkpoint.layout.pieces import Coded
from trainer.runtime.optimizers.facts import projectors
from trainer.runtime.optimizers.groups import MATRICES
from trainer.spec.errors import InputError

Group = dict[str, Any]  # as torch keeps them
Shape = tuple[int, ...]

# The optimizer's own key, and the name in a checkpoint: bitsandbytes numbers what others name.
_NAMES = {
    "exp_avg": "exp_avg", "state1": "exp_avg",
    "exp_avg_sq": "exp_avg_sq", "state2": "exp_avg_sq",
    "max_exp_avg_sq": "max_exp_avg_sq",
    "momentum_buffer": "momentum_buffer",
    "exp_avg_sq_row": "exp_avg_sq_row", "exp_avg_sq_col": "exp_avg_sq_col",
}  # fmt: skip
_CODED = {"state1": ("absmax1", "qmap1"), "state2": ("absmax2", "qmap2")}
# Counted, computed anew before each use, the same for all, or looked into by `projectors`.
_NO_TENSORS = frozenset({"step", "RMS", "projector", "absmax1", "absmax2", "qmap1", "qmap2"})
_PROJECTOR = "projector"
_SIDES = ("left", "right")


class StateTensor(NamedTuple):
    """One tensor that an optimizer keeps; a value of it stands for `block` elements of the memory it is kept for."""

    values: Tensor
    block: int = 1
    coded: Coded | None = None  # where the values are codes


class Made(NamedTuple):
    """What the state of a parameter is made from."""

    optimizer: Any  # torch's, or bitsandbytes', untyped
    group: Group
    parameter: Tensor
    step: int | None  # the saved count

    def zeros(self, key: str, shape: Shape | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros of the parameter's shape and type, or others; what is kept under `key` already, where it is like that.

        An engine may hold on to tensors that are there, and there may be no room for others. They are not zeroed:
        whoever does not fill all of them does that.
        """
        like = self.parameter
        dtype = dtype or like.dtype
        kept = self.optimizer.state.get(like, {}).get(key)
        if isinstance(kept, Tensor) and kept.dtype is dtype and kept.shape == (like.shape if shape is None else shape):
            return kept
        if shape is None:
            return torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)
        return torch.zeros(shape, dtype=dtype, device=like.device)

    def saved_count(self) -> int:
        """The saved count of steps; InputError where there is none."""
        if self.step is None:
            raise InputError("the checkpoint holds moments and no count of steps")
        return self.step


def kept_tensors(optimizer: TorchOptimizer, parameter: Tensor) -> dict[str, StateTensor]:
    """What is kept of a parameter, by its name in a checkpoint; InputError for a tensor that has none."""
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    found: dict[str, StateTensor] = {}
    for key, value in state.items():
        if value is None or key in _NO_TENSORS:
            continue
        if key not in _NAMES:
            raise InputError(f"checkpoints do not know the state {key} that {type(optimizer).__name__} keeps")
        name = _NAMES[key]
        if value.dtype is torch.uint8:
            scales, table = (state[each] for each in _CODED[key])
            found[name] = StateTensor(value, coded=Coded(value.view(-1), scales, table))
            found[name + SCALES] = StateTensor(scales, block=BLOCK_ELEMENTS)
        else:
            found[name] = StateTensor(value)
    matrices = projectors(state)
    names = [_PROJECTOR] if len(matrices) == 1 else [f"{_PROJECTOR}.{side}" for side in _SIDES]
    return found | {name: StateTensor(matrix) for name, matrix in zip(names, matrices, strict=False)}


def layout_of(optimizer: TorchOptimizer) -> Callable[[Made], dict[str, Any]] | None:
    """What makes the state that an optimizer keeps of one parameter; None for one that has no checkpoints."""
    kind = type(optimizer)
    return LAYOUTS.get(f"{kind.__module__}.{kind.__qualname__}")


def _adam(made: Made) -> dict[str, Any]:
    state = {"step": _torch_step(made), "exp_avg": made.zeros("exp_avg"), "exp_avg_sq": made.zeros("exp_avg_sq")}
    return state | ({"max_exp_avg_sq": made.zeros("max_exp_avg_sq")} if made.group["amsgrad"] else {})


def _torch_step(made: Made) -> Tensor:
    """As in torch.optim.adam: on the device and fp32 where the kernel reads it there, else on the CPU."""
    group = made.group
    is_on_device = bool(group["capturable"] or group["fused"])
    double = torch.get_default_dtype() == torch.float64 and not group["fused"]
    return torch.tensor(
        float(made.saved_count()),
        dtype=torch.float64 if double else torch.float32,
        device=made.parameter.device if is_on_device else "cpu",
    )


def _cpu_adam(made: Made) -> dict[str, Any]:
    """DeepSpeed's: in fp32 unless told, the count a plain number."""
    dtype = torch.float32 if made.optimizer.fp32_optimizer_states else made.parameter.dtype
    moments = {key: made.zeros(key, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": made.saved_count(), **moments}


def _sgd(made: Made) -> dict[str, Any]:
    return {"momentum_buffer": made.zeros("momentum_buffer")} if made.group["momentum"] else {}


def _lion(made: Made) -> dict[str, Any]:
    return {"exp_avg": made.zeros("exp_avg")}


def _muon(made: Made) -> dict[str, Any]:
    if made.group["name"] == MATRICES:
        return {"momentum_buffer": made.zeros("momentum_buffer")}
    return _adam(made)


def _factored(made: Made) -> dict[str, Any]:
    """transformers' Adafactor: the root mean square of the weights is computed before it is used."""
    return {"step": made.saved_count(), "RMS": 0, **_factors(made, tuple(made.parameter.shape))}


def _adalomo(made: Made) -> dict[str, Any]:
    return {"step": made.saved_count(), **_factors(made, tuple(made.parameter.shape))}


def _factors(made: Made, shape: Shape) -> dict[str, Tensor]:
    """Means of squares by row and by column, in fp32; of a vector the squares."""
    if len(shape) < 2:
        return {"exp_avg_sq": made.zeros("exp_avg_sq", shape, dtype=torch.float32)}
    return {
        "exp_avg_sq_row": made.zeros("exp_avg_sq_row", shape[:-1], dtype=torch.float32),
        "exp_avg_sq_col": made.zeros("exp_avg_sq_col", (*shape[:-2], shape[-1]), dtype=torch.float32),
    }


def _no_state(made: Made) -> dict[str, Any]:
    return {}


def _bitsandbytes(made: Made) -> dict[str, Any]:
    """As bitsandbytes makes it: 8 bit from 4,096 elements on, paged where it pages."""
    optimizer, parameter = made.optimizer, made.parameter
    kept = optimizer.state.get(parameter)
    if kept is None or "state1" not in kept:
        number = next(index for index, group in enumerate(optimizer.param_groups) if group is made.group)
        listed = made.group["params"]
        made.group["params"] = [parameter]  # ZeRO-3 lists a partition only while it is stepped on
        try:
            optimizer.init_state(made.group, parameter, number, 0)
        finally:
            made.group["params"] = listed
        kept = optimizer.state[parameter]
    return {**kept, "step": made.saved_count()}


def _galore(
    inner: Callable[[Made, Shape], dict[str, Any]], *, projects_in: torch.dtype | None = None
) -> Callable[[Made], dict[str, Any]]:
    """State of the projected gradient, and the projector; of parameters outside of the blocks the state alone.

    A projector has the type in which the gradient is projected: its own, or the one it is cast to before.
    """

    def make(made: Made) -> dict[str, Any]:
        shape = tuple(made.parameter.shape)
        if "rank" not in made.group:
            return inner(made, shape)
        from galore_torch.galore_projector import GaLoreProjector

        group = made.group
        projected, sides = projected_shapes(shape, rank=group["rank"], projection=group["proj_type"])
        projector = GaLoreProjector(
            group["rank"],
            update_proj_gap=group["update_proj_gap"],
            scale=group["scale"],
            proj_type=group["proj_type"],
        )
        dtype = projects_in or made.parameter.dtype
        matrices = [torch.zeros(each, dtype=dtype, device=made.parameter.device) for each in sides]
        projector.ortho_matrix = matrices if group["proj_type"] == "full" else matrices[0]
        return {**inner(made, projected), _PROJECTOR: projector}

    return make


def projected_shapes(shape: Shape, *, rank: int, projection: str) -> tuple[Shape, tuple[Shape, ...]]:
    """Of galore-torch 1.0: the shape of a matrix's projected gradient, and those of its projectors."""
    rows, columns = shape
    rank = min(rank, rows, columns)
    left, right = (rows, rank), (rank, columns)
    if projection == "full":
        return (rank, rank), (left, right)
    is_tall = rows >= columns
    takes_columns = {"std": is_tall, "reverse_std": not is_tall, "right": True, "left": False}[projection]
    return ((rows, rank), (right,)) if takes_columns else ((rank, columns), (left,))


def _galore_adam(made: Made, shape: Shape) -> dict[str, Any]:
    return {"step": made.saved_count(), **{key: made.zeros(key, shape) for key in ("exp_avg", "exp_avg_sq")}}


def _galore_factored(made: Made, shape: Shape) -> dict[str, Any]:
    return {"step": made.saved_count(), "RMS": 0, **_factors(made, shape)}


def _galore_8bit(made: Made, shape: Shape) -> dict[str, Any]:
    """bitsandbytes looks at the weight for shape and size; galore-torch shows it the projected one, as is done here."""
    parameter, weight = made.parameter, made.parameter.data
    parameter.data = weight.new_zeros(shape)
    try:
        return _bitsandbytes(made)
    finally:
        parameter.data = weight


LAYOUTS: dict[str, Callable[[Made], dict[str, Any]]] = {  # by the path of the class: importing DeepSpeed takes seconds
    "torch.optim.adamw.AdamW": _adam,
    "torch.optim.adam.Adam": _adam,
    "torch.optim.sgd.SGD": _sgd,
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam": _cpu_adam,
    "bitsandbytes.optim.adamw.AdamW8bit": _bitsandbytes,
    "bitsandbytes.optim.adamw.PagedAdamW32bit": _bitsandbytes,
    "bitsandbytes.optim.adamw.PagedAdamW8bit": _bitsandbytes,
    "bitsandbytes.optim.lion.Lion8bit": _bitsandbytes,
    "trainer.runtime.optimizers.lamb_8bit.Lamb8bit": _bitsandbytes,
    "lion_pytorch.lion_pytorch.Lion": _lion,
    "transformers.optimization.Adafactor": _factored,
    "trainer.runtime.optimizers.muon.MuonAndAdamW": _muon,
    "trainer.runtime.optimizers.lomo.Lomo": _no_state,
    "trainer.runtime.optimizers.lomo.AdaLomo": _adalomo,
    "galore_torch.adamw.AdamW": _galore(_galore_adam),
    "galore_torch.adamw8bit.AdamW8bit": _galore(_galore_8bit),
    "galore_torch.adafactor.Adafactor": _galore(_galore_factored, projects_in=torch.float32),
}
