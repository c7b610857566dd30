"""Optimizer state as plain tensors and a count of steps, read and made without ever calling `step()`.

torch's own helpers (`get_optimizer_state_dict`) run a step on zero gradients if there is no state yet, so that Adam's
count is one too high and the first real update 1.34 times too small. Here state that does not exist is absent. One row
of `LAYOUTS` is one optimizer class: its state of a parameter, made as at its first step, from zeros, with the saved
count. A class or a kind of state that is not listed is refused, never dropped. Under ZeRO a parameter is the flat
partition of a whole group.

8-bit moments of bitsandbytes are one byte for each element and one fp32 scale for each block of 256 (arXiv:2110.02861).
Blocks are counted from the start of the memory an optimizer was given: of a parameter if it is whole, of a partition
that many share under ZeRO. If the blocks of the checkpoint are those of this job, codes and scales are copied as they
are, bit for bit. A block of this job that is made of several, or of elements that were saved in fp32 (bitsandbytes
does so with small tensors), is decoded and coded anew: off by up to half a code's step, as after every update.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer as TorchOptimizer

from shardwise.trainer.runtime.checkpoint.manifest import HyperParameter, ParameterEntry, TensorType
from shardwise.trainer.runtime.checkpoint.pieces import Coded
from shardwise.trainer.runtime.checkpoint.shards import OpenShards
from shardwise.trainer.runtime.optimizers import projectors
from shardwise.trainer.runtime.optimizers.rules import MATRICES
from shardwise.trainer.spec.errors import InputError

BLOCK_ELEMENTS = 256
SCALES = ".absmax"  # after the name of the moment that they are of
_SLICE_ELEMENTS = 1 << 20  # decoded at a time; whole blocks
_NOT_SAVED = -1.0  # in place of a scale: padding, and what was never updated, is zero under any scale
_NOT_CODED = float("inf")  # in place of a scale: saved in fp32


class Stretch(NamedTuple):
    """Elements [start, start + num_elements) of a parameter's moment, at `offset` of the memory they go into."""

    title: str
    entry: ParameterEntry
    state: str
    start: int
    num_elements: int
    offset: int


def fill_coded(moment: Coded, stretches: Sequence[Stretch], shards: OpenShards) -> int:
    """Fills a moment from a checkpoint; how many of its blocks had to be coded anew."""
    table = moment.table.detach().cpu()
    num_coded_anew = 0
    for begin in range(0, moment.codes.numel(), _SLICE_ELEMENTS):
        size = min(_SLICE_ELEMENTS, moment.codes.numel() - begin)
        codes, scales, values = _read(table, stretches, shards, begin=begin, size=size)
        low = torch.where(scales == _NOT_SAVED, _NOT_CODED, scales).amin(dim=1)
        high = scales.amax(dim=1)
        is_anew = (high == _NOT_CODED) | ((low != high) & (high != _NOT_SAVED))
        num_coded_anew += int(is_anew.sum())
        codes[is_anew], high[is_anew] = _coded(values[is_anew], table)
        first = begin // BLOCK_ELEMENTS
        moment.codes[begin : begin + size].copy_(codes.view(-1)[:size])
        moment.scales[first : first + len(high)].copy_(high.clamp_(min=0.0))
    return num_coded_anew


def fill_decoded(values: torch.Tensor, stretch: Stretch, shards: OpenShards) -> None:
    """Fills a flat fp32 tensor with a moment that was saved in 8 bit."""
    for begin in range(0, stretch.num_elements, _SLICE_ELEMENTS):
        size = min(_SLICE_ELEMENTS, stretch.num_elements - begin)
        codes, scales = _read_coded(stretch, shards, start=stretch.start + begin, size=size)
        values[begin : begin + size].copy_(standard_table(stretch.state)[codes.long()] * scales)


def is_coded(entry: ParameterEntry, state: str) -> bool:
    """True if a moment was saved in 8 bit."""
    return entry.state[state].type is TensorType.U8


def standard_table(state: str) -> torch.Tensor:
    """Values of the codes of a moment: signed, except for squares."""
    from bitsandbytes.functional import create_dynamic_map  # takes seconds

    table: torch.Tensor = create_dynamic_map(signed=not state.endswith("_sq"))
    return table


def _read(
    table: torch.Tensor, stretches: Sequence[Stretch], shards: OpenShards, *, begin: int, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale and value of each element of [begin, begin + size), in rows of one block, the last filled up."""
    num_blocks = -(-size // BLOCK_ELEMENTS)
    zero = int((table == 0).nonzero()[0])
    codes = torch.full((num_blocks * BLOCK_ELEMENTS,), zero, dtype=torch.uint8)
    scales = torch.full(codes.shape, _NOT_SAVED)
    values = torch.zeros(codes.shape)
    for each in stretches:
        first, last = max(each.offset, begin), min(each.offset + each.num_elements, begin + size)
        if first >= last:
            continue
        here, start = slice(first - begin, last - begin), each.start + first - each.offset
        if is_coded(each.entry, each.state):
            codes[here], scales[here] = _read_coded(each, shards, start=start, size=last - first)
            values[here] = table[codes[here].long()] * scales[here]
        else:
            shards.fill(values[here], each.entry.state[each.state], start=start, what=each.title)
            scales[here] = _NOT_CODED
    rows = (num_blocks, BLOCK_ELEMENTS)
    return codes.view(rows), scales.view(rows), values.view(rows)


def _read_coded(stretch: Stretch, shards: OpenShards, *, start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = torch.empty(size, dtype=torch.uint8), torch.empty(size)
    shards.fill(codes, stretch.entry.state[stretch.state], start=start, what=stretch.title)
    shards.fill(scales, stretch.entry.state[stretch.state + SCALES], start=start, what=f"{stretch.title}, its scales")
    return codes, scales


def _coded(values: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks in rows as codes of the nearest values, and the scale of each block."""
    scales = values.abs().amax(dim=1)
    relative = values / torch.where(scales == 0, 1.0, scales).unsqueeze(1)
    middles = (table[1:] + table[:-1]) / 2
    return torch.bucketize(relative, middles).to(torch.uint8), scales


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
_STACKED = {  # by the path of the class: one tensor that holds several moments, along a first dimension of its own
    "bitsandbytes.optim.ademamix.AdEMAMix8bit": {"state1": ("exp_avg", "exp_avg_slow")},
}
_CODED = {"state1": ("absmax1", "qmap1"), "state2": ("absmax2", "qmap2")}
# Counted, computed anew before each use, the same for all, or looked into by `projectors`.
_NO_TENSORS = frozenset({"step", "RMS", "projector", "absmax1", "absmax2", "qmap1", "qmap2"})
_PROJECTOR = "projector"
_SIDES = ("left", "right")


class StateTensor(NamedTuple):
    """One tensor of an optimizer's state; a value of it stands for `block` elements of the parameter."""

    values: Tensor
    block: int = 1
    coded: Coded | None = None  # where the values are codes


class Made(NamedTuple):
    """Inputs from which the state of a parameter is made."""

    optimizer: Any  # torch's, or bitsandbytes', untyped
    group: Group
    parameter: Tensor
    step: int | None  # the saved count

    def zeros(self, key: str, shape: Shape | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros of the parameter's shape and type, or others; an existing tensor of that kind under `key` is reused.

        There may be no room for another one. It is not zeroed: a caller that does not fill all of it must do that.
        """
        like = self.parameter
        dtype = dtype or like.dtype
        stored = self.optimizer.state.get(like, {}).get(key)
        if (
            isinstance(stored, Tensor)
            and stored.dtype is dtype
            and stored.shape == (like.shape if shape is None else shape)
        ):
            return stored
        if shape is None:
            return torch.zeros_like(like, dtype=dtype, memory_format=torch.preserve_format)
        return torch.zeros(shape, dtype=dtype, device=like.device)

    def saved_count(self) -> int:
        """The saved count of steps; InputError where there is none."""
        if self.step is None:
            raise InputError("the checkpoint holds moments and no count of steps")
        return self.step


def retained_tensors(optimizer: TorchOptimizer, parameter: Tensor) -> dict[str, StateTensor]:
    """State tensors of a parameter by their names in a checkpoint; InputError for a tensor without a name."""
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    stacked = _STACKED.get(_path(optimizer), {})
    found: dict[str, StateTensor] = {}
    for key, value in state.items():
        if value is None or key in _NO_TENSORS:
            continue
        if key not in _NAMES:
            raise InputError(f"checkpoints do not know the state {key} that {type(optimizer).__name__} keeps")
        names = stacked.get(key, (_NAMES[key],))
        moments = value if key in stacked else (value,)
        if value.dtype is torch.uint8:
            scales, table = (state[each] for each in _CODED[key])
            scales = scales if key in stacked else (scales,)
            for name, moment, own in zip(names, moments, scales, strict=True):
                found[name] = StateTensor(moment, coded=Coded(moment.view(-1), own, table))
                found[name + SCALES] = StateTensor(own, block=BLOCK_ELEMENTS)
        else:
            found |= {name: StateTensor(moment) for name, moment in zip(names, moments, strict=True)}
    matrices = projectors(state)
    sides = [_PROJECTOR] if len(matrices) == 1 else [f"{_PROJECTOR}.{side}" for side in _SIDES]
    return found | {name: StateTensor(matrix) for name, matrix in zip(sides, matrices, strict=False)}


def layout_of(optimizer: TorchOptimizer) -> Callable[[Made], dict[str, Any]] | None:
    """Builder of an optimizer's state of one parameter; None for an optimizer without checkpoints."""
    return LAYOUTS.get(_path(optimizer))


def _path(optimizer: TorchOptimizer) -> str:
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


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
    """DeepSpeed's: in fp32 unless configured otherwise, the count a plain number."""
    dtype = torch.float32 if made.optimizer.fp32_optimizer_states else made.parameter.dtype
    moments = {key: made.zeros(key, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": made.saved_count(), **moments}


def _sgd(made: Made) -> dict[str, Any]:
    return {"momentum_buffer": made.zeros("momentum_buffer")} if made.group["momentum"] else {}


def _muon(made: Made) -> dict[str, Any]:
    if made.group["name"] == MATRICES:
        return {"momentum_buffer": made.zeros("momentum_buffer")}
    return _adam(made)


def _factored(made: Made, shape: Shape | None = None, *, has_rms: bool = True) -> dict[str, Any]:
    """State of transformers' Adafactor, which computes the root mean square of the weights before it uses it."""
    factors = _factors(made, tuple(made.parameter.shape) if shape is None else shape)
    return {"step": made.saved_count(), **({"RMS": 0} if has_rms else {}), **factors}


def _factors(made: Made, shape: Shape) -> dict[str, Tensor]:
    """Means of squares by row and by column, in fp32; of a vector the squares."""
    if len(shape) < 2:
        return {"exp_avg_sq": made.zeros("exp_avg_sq", shape, dtype=torch.float32)}
    return {
        "exp_avg_sq_row": made.zeros("exp_avg_sq_row", shape[:-1], dtype=torch.float32),
        "exp_avg_sq_col": made.zeros("exp_avg_sq_col", (*shape[:-2], shape[-1]), dtype=torch.float32),
    }


def _bitsandbytes(made: Made) -> dict[str, Any]:
    """State of bitsandbytes' optimizers: 8 bit from 4,096 elements on, paged where it pages."""
    optimizer, parameter = made.optimizer, made.parameter
    stored = optimizer.state.get(parameter)
    if stored is None or "state1" not in stored:
        number = next(index for index, group in enumerate(optimizer.param_groups) if group is made.group)
        listed = made.group["params"]
        made.group["params"] = [parameter]  # ZeRO-3 lists a partition only while it is stepped on
        try:
            optimizer.init_state(made.group, parameter, number, 0)
        finally:
            made.group["params"] = listed
        stored = optimizer.state[parameter]
    return {**stored, "step": made.saved_count()}


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
    """Shape of a matrix's projected gradient in galore-torch 1.0, and shapes of its projectors."""
    rows, columns = shape
    rank = min(rank, rows, columns)
    left, right = (rows, rank), (rank, columns)
    if projection == "full":
        return (rank, rank), (left, right)
    is_tall = rows >= columns
    projects_columns = {"std": is_tall, "reverse_std": not is_tall, "right": True, "left": False}[projection]
    return ((rows, rank), (right,)) if projects_columns else ((rank, columns), (left,))


def _galore_adam(made: Made, shape: Shape) -> dict[str, Any]:
    return {"step": made.saved_count(), **{key: made.zeros(key, shape) for key in ("exp_avg", "exp_avg_sq")}}


def _galore_8bit(made: Made, shape: Shape) -> dict[str, Any]:
    """bitsandbytes reads shape and size of the weight; galore-torch passes it the projected one, as is done here."""
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
    "shardwise.trainer.runtime.optimizers.eight_bit.AdamW8bit": _bitsandbytes,
    "bitsandbytes.optim.adamw.PagedAdamW32bit": _bitsandbytes,
    "bitsandbytes.optim.adamw.PagedAdamW8bit": _bitsandbytes,
    "bitsandbytes.optim.lion.Lion8bit": _bitsandbytes,
    "bitsandbytes.optim.ademamix.AdEMAMix8bit": _bitsandbytes,
    "shardwise.trainer.runtime.optimizers.eight_bit.Lamb8bit": _bitsandbytes,
    "lion_pytorch.lion_pytorch.Lion": lambda made: {"exp_avg": made.zeros("exp_avg")},
    "transformers.optimization.Adafactor": _factored,
    "shardwise.trainer.runtime.optimizers.rules.MuonAndAdamW": _muon,
    "shardwise.trainer.runtime.optimizers.in_backward.Lomo": lambda made: {},
    "shardwise.trainer.runtime.optimizers.in_backward.AdaLomo": lambda made: _factored(made, has_rms=False),
    "galore_torch.adamw.AdamW": _galore(_galore_adam),
    "galore_torch.adamw8bit.AdamW8bit": _galore(_galore_8bit),
    "galore_torch.adafactor.Adafactor": _galore(_factored, projects_in=torch.float32),
}


def check_supported(optimizer: TorchOptimizer) -> None:
    """InputError for an optimizer whose state has no place in the format."""
    if layout_of(optimizer) is None:
        known = ", ".join(sorted({path.rpartition(".")[2] for path in LAYOUTS}))
        raise InputError(f"there are no checkpoints of {type(optimizer).__name__}; there are those of {known}")


def state_tensors(optimizer: TorchOptimizer, parameter: torch.Tensor) -> dict[str, StateTensor]:
    """The state tensors of one parameter by their names in a checkpoint, in order; none before its first step."""
    return dict(sorted(retained_tensors(optimizer, parameter).items()))


def step_count(optimizer: TorchOptimizer, parameter: torch.Tensor) -> int | None:
    """Steps that the optimizer has counted for one parameter; None if it counts none."""
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
    """Advances an optimizer that counts outside of its state to where it was after so many steps.

    DeepSpeedCPUAdam keeps the powers of its betas as running products in fp32. After a jump it would use pow() instead,
    and losses after a resume would differ in their last bits; so it steps on a number of its own
    (0.19.8, csrc/includes/cpu_adam.h, IncrementStep). Powers below fp32's resolution of 1 need no steps.
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
