"""Bytes that an optimizer keeps for each trained weight, and what its step needs for a moment.

Per element, w = bytes of a master weight: AdamW two moments (2w); Lion one (w); SGD without momentum none; 8-bit Adam
two bytes and one fp32 scale per 256 elements and moment (bitsandbytes `blocksize=256`, tensors below 4096 elements
stay fp32, which is norms only); Adafactor and AdaLomo a row and a column per matrix; Muon one momentum for the
matrices of the blocks and AdamW for the rest; LOMO none. GaLore (arXiv:2403.03507) keeps the moments of an m x n
matrix, m >= n, as 2 r m and a projector r n.

Temporaries of the step: `adamw` (foreach) takes the square root of every second moment at once (w an element);
`adamw_fused` none; Adafactor and Muon work matrix by matrix; GaLore decomposes one fp32 gradient at a time whenever it
looks for a new projector (torch.linalg.svd of galore_torch). bitsandbytes updates 8-bit state in one kernel; torchao
works on fp32 copies of one tensor's weight and state. Paged state is bitsandbytes' in every stack: torchao pages none.
transformers' Trainer keeps the embedding's state in fp32.
"""

from trainer.planning.memory.recipe import Dims, Recipe
from trainer.planning.setting import Setting
from trainer.spec.strategy import Method, Optimizer
from trainer.spec.value import Value

EIGHT_BIT_BYTES = 1 + 4 / 256  # one 8-bit state of one element with its share of the scale


class OptimizerBytes(Value, frozen=True, kw_only=True):
    """Whole-model bytes, before sharding."""

    state: int
    temporaries: int
    table_temporaries: int  # of the update of the embedding alone, where every gradient is used as it comes
    is_paged: bool  # lives in CUDA managed memory, outside torch's counters


def optimizer_bytes(setting: Setting, recipe: Recipe, dims: Dims, *, num_trained: int) -> OptimizerBytes:
    """State and step temporaries of the optimizer over `num_trained` elements."""
    optimizer, width = setting.strategy.optimizer, recipe.trained_bytes
    if setting.method is Method.GALORE:
        low_rank = _galore_elements(setting, dims)
        per_moment = 1.0 if _is_8bit(optimizer) else float(width)
        state = round(low_rank[0] * per_moment) + low_rank[1] * width
        return OptimizerBytes(state=state, temporaries=_projection_bytes(dims), table_temporaries=0, is_paged=False)
    table = 0 if recipe.is_frozen else dims.embedding
    return OptimizerBytes(
        state=_state_bytes(optimizer, recipe, dims, num_trained),
        temporaries=_temporaries(optimizer, recipe, num_trained, min(num_trained, dims.largest_tensor)),
        table_temporaries=_temporaries(optimizer, recipe, table, table),
        is_paged=optimizer in (Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT),
    )


def _is_8bit(optimizer: Optimizer) -> bool:
    return optimizer in (
        Optimizer.ADAMW_8BIT,
        Optimizer.PAGED_ADAMW_8BIT,
        Optimizer.LION_8BIT,
        Optimizer.LAMB_8BIT,
    )


def _state_bytes(optimizer: Optimizer, recipe: Recipe, dims: Dims, num_trained: int) -> int:
    width = recipe.trained_bytes
    if _is_8bit(optimizer):
        num_moments = 1 if optimizer is Optimizer.LION_8BIT else 2
        table = 0 if recipe.is_frozen or not recipe.stack.keeps_table_state else dims.embedding
        return num_moments * 4 * table + round(num_moments * EIGHT_BIT_BYTES * (num_trained - table))
    if optimizer is Optimizer.LION:
        return width * num_trained
    if optimizer in (Optimizer.SGD, Optimizer.LOMO):
        return 0
    if optimizer in (Optimizer.ADAFACTOR, Optimizer.ADALOMO):
        return min(4 * _rows_and_columns(dims), width * num_trained)
    if optimizer is Optimizer.MUON:
        matrices = min(num_trained, dims.block_linears)
        return width * matrices + 2 * width * (num_trained - matrices)
    return 2 * width * num_trained


def _temporaries(optimizer: Optimizer, recipe: Recipe, num_elements: int, largest: int) -> int:
    """Of the update of `num_elements`, the largest of whose tensors has `largest`."""
    if optimizer is Optimizer.ADAMW:
        return 0 if recipe.stack.fuses_adamw else recipe.trained_bytes * num_elements
    if _is_8bit(optimizer):
        is_torchao = recipe.stack.dequantises_states and optimizer is not Optimizer.PAGED_ADAMW_8BIT
        return 3 * 4 * largest if is_torchao else 0
    if optimizer in (Optimizer.ADAFACTOR, Optimizer.MUON):
        return 3 * 4 * largest
    if optimizer in (Optimizer.LION, Optimizer.ADALOMO):
        return 4 * largest
    return 0


def _projection_bytes(dims: Dims) -> int:
    """What a new projector takes: a gradient in fp32, as the decomposition works on it, and its two sets of vectors."""
    return max(4 * (2 * i * o + min(i, o) * (min(i, o) + max(i, o))) for i, o, _ in dims.matrices)


def _rows_and_columns(dims: Dims) -> int:
    per_block = sum(copies * (i + o) for i, o, copies in dims.matrices) + 2 * dims.hidden
    tables = (2 if dims.head else 1) * (dims.vocab + dims.hidden)
    return dims.layers * per_block + tables + dims.hidden


def _galore_elements(setting: Setting, dims: Dims) -> tuple[int, int]:
    """(elements of all moments, elements of all projectors): low rank in the blocks' matrices, full elsewhere."""
    moments = projectors = 0
    for num_inputs, num_outputs, copies in dims.matrices:
        long, short = max(num_inputs, num_outputs), min(num_inputs, num_outputs)
        rank = min(setting.galore.rank, short)
        moments += copies * 2 * rank * long
        projectors += copies * rank * short
    outside = dims.parameters - dims.block_linears
    return dims.layers * moments + 2 * outside, dims.layers * projectors
