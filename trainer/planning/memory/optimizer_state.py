"""Bytes that an optimizer keeps for each trained weight, and what its step needs for a moment.

Per element, w = bytes of a master weight: AdamW two moments (2w); Lion one (w); SGD without momentum none; 8-bit Adam
two bytes and one fp32 scale per 256 elements and moment (bitsandbytes `blocksize=256`, tensors below 4096 elements
stay fp32, which is norms only); Adafactor and AdaLomo a row and a column per matrix; Muon one momentum for the
matrices of the blocks and AdamW for the rest; LOMO none. GaLore (arXiv:2403.03507) keeps the moments of an m x n
matrix, m >= n, as 2 r m and a projector r n.

Temporaries of the step: `adamw` (foreach) takes the square root of every second moment at once (w an element);
`adamw_fused` none; Adafactor and Muon work matrix by matrix.
"""

from trainer.planning.memory.recipe import Dims
from trainer.planning.setting import Setting
from trainer.spec.strategy import Method, Optimizer
from trainer.spec.value import Value

EIGHT_BIT_BYTES = 1 + 4 / 256  # one 8-bit state of one element with its share of the scale


class OptimizerBytes(Value, frozen=True, kw_only=True):
    """Whole-model bytes, before sharding."""

    state: int
    temporaries: int
    is_paged: bool  # lives in CUDA managed memory, outside torch's counters


def optimizer_bytes(setting: Setting, dims: Dims, *, num_trained: int, width: int) -> OptimizerBytes:
    """State and step temporaries of the optimizer over `num_trained` elements whose masters have `width` bytes."""
    optimizer = setting.strategy.optimizer
    if setting.method is Method.GALORE:
        low_rank = _galore_elements(setting, dims)
        per_moment = 1.0 if _is_8bit(optimizer) else float(width)
        state = round(low_rank[0] * per_moment) + low_rank[1] * width
        return OptimizerBytes(state=state, temporaries=4 * dims.largest_tensor, is_paged=False)
    return OptimizerBytes(
        state=_state_bytes(optimizer, dims, num_trained, width),
        temporaries=_temporaries(optimizer, dims, num_trained, width),
        is_paged=optimizer in (Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT),
    )


def _is_8bit(optimizer: Optimizer) -> bool:
    return optimizer in (
        Optimizer.ADAMW_8BIT,
        Optimizer.PAGED_ADAMW_8BIT,
        Optimizer.LION_8BIT,
        Optimizer.LAMB_8BIT,
    )


def _state_bytes(optimizer: Optimizer, dims: Dims, num_trained: int, width: int) -> int:
    if optimizer is Optimizer.LION_8BIT:
        return round(EIGHT_BIT_BYTES * num_trained)
    if _is_8bit(optimizer):
        return round(2 * EIGHT_BIT_BYTES * num_trained)
    if optimizer is Optimizer.LION:
        return width * num_trained
    if optimizer in (Optimizer.SGD, Optimizer.LOMO):
        return 0
    if optimizer in (Optimizer.ADAFACTOR, Optimizer.ADALOMO):
        return min(4 * _rows_and_columns(dims), width * num_trained)
    if optimizer is Optimizer.MUON:
        matrices = min(num_trained, dims.layers * dims.linear)
        return width * matrices + 2 * width * (num_trained - matrices)
    return 2 * width * num_trained


def _temporaries(optimizer: Optimizer, dims: Dims, num_trained: int, width: int) -> int:
    if optimizer is Optimizer.ADAMW:
        return width * num_trained
    largest = min(num_trained, dims.largest_tensor)
    if optimizer in (Optimizer.ADAFACTOR, Optimizer.MUON):
        return 3 * 4 * largest
    if optimizer in (Optimizer.LION, Optimizer.ADALOMO):
        return 4 * largest
    return 0


def _rows_and_columns(dims: Dims) -> int:
    per_block = sum(i + o for _, i, o in dims.linears) + 2 * dims.hidden
    tables = (2 if dims.head else 1) * (dims.vocab + dims.hidden)
    return dims.layers * per_block + tables + dims.hidden


def _galore_elements(setting: Setting, dims: Dims) -> tuple[int, int]:
    """(elements of all moments, elements of all projectors): low rank in the blocks' matrices, full elsewhere."""
    moments = projectors = 0
    for _, num_inputs, num_outputs in dims.linears:
        long, short = max(num_inputs, num_outputs), min(num_inputs, num_outputs)
        rank = min(setting.galore.rank, short)
        moments += 2 * rank * long
        projectors += rank * short
    outside = dims.parameters - dims.layers * dims.linear
    return dims.layers * moments + 2 * outside, dims.layers * projectors
