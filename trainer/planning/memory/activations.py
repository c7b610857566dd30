"""What the blocks keep between forward and backward, and what the backward of one needs besides.

Every block saves what `saved_tensors` counts; checkpointing keeps less and makes the rest again. Autocast keeps a
16-bit copy of each weight besides. The input of a block is the fp32 residual that its first norm saves anyway, or a
LayerNorm's input; an RMSNorm in a 16-bit model keeps an fp32 copy, and the input is one more.

The most of a block's backward is alive at the backward of the product gate x up: the product is gone, the gradients of
product, silu and up are there (+ 3cf - cf), with the gradient of the residual stream and the new gradient of down_proj;
where f is small beside h, at the backward of the second RMSNorm.

Not covered: workspaces that oneDNN and cuBLAS allocate inside an operation, padding masks; `selective` is the published
recipe (attention output and every second matrix product kept).
"""

from trainer.planning.memory.recipe import Dims, Kernel, Recipe, adapter_parameters, adapts_all
from trainer.planning.memory.saved_tensors import (
    SavedTensors,
    keeps_input,
    saved_tensors,
    shares_product,
    windowed_attention_bytes,
)
from trainer.planning.memory.stacks import AdapterInputs
from trainer.planning.setting import Setting
from trainer.spec.strategy import Checkpointing
from trainer.spec.value import Value

IN_FLIGHT = 2  # kept blocks on the device when the rest is in host RAM: one being copied, one being used
NORM_BACKWARD_BYTES = 24  # an element of the hidden states, six fp32 arrays


class BlockActivations(Value, frozen=True, kw_only=True):
    """Bytes of a whole micro batch on one rank."""

    boundary: int  # input of a block, what full checkpointing keeps
    whole: int  # everything one block saves, its share of cast weights included
    kept: int  # of all blocks together, between forward and backward
    offloaded: int  # of those, in host RAM instead
    kept_by_one: int  # of those, the most that one block keeps
    recomputed: int  # what a block's backward makes again on top of what was kept
    recomputed_beside_mlp: int  # of those, what is left when the feed-forward half is done
    temporaries: int  # gradients of activations at the worst moment of a block's backward
    peaks_at_scores: bool  # that moment is attention's, when the feed-forward half has its gradients
    cast_weights: int  # autocast's copies of the weights of one block


def block_activations(setting: Setting, recipe: Recipe, dims: Dims) -> BlockActivations:
    """What the blocks of the model keep and need in a setting."""
    tokens = recipe.tokens
    boundary = recipe.residual_bytes * dims.hidden * tokens
    cast_weights = _cast_weights(setting, recipe, dims)
    saved = saved_tensors(setting, recipe, dims)
    attention = saved.attention
    whole = saved.total * tokens + cast_weights + _adapted_experts(setting, recipe, dims)
    is_shared = keeps_input(recipe, dims)
    num_recomputed, kept_by_one = _kept(setting, recipe, dims, whole, boundary, attention * tokens)
    kept = num_recomputed * kept_by_one + (dims.layers - num_recomputed) * whole
    if dims.windowed_layers:
        by_mask = (windowed_attention_bytes(setting, recipe, dims) - attention) * tokens
        whole += max(0, by_mask)
        kept += by_mask * dims.windowed_layers * (dims.layers - num_recomputed) // dims.layers
    largest = kept_by_one if num_recomputed == dims.layers else whole
    offloaded = max(0, kept - IN_FLIGHT * largest) if setting.activation_offload else 0
    shared = boundary if is_shared else 0
    if setting.checkpointing is Checkpointing.NONE or not num_recomputed:
        recomputed = 0
    elif setting.checkpointing is Checkpointing.ATTENTION:
        recomputed = attention * tokens
    else:
        recomputed = whole - shared
    in_mlp, at_scores = _temporaries(setting, recipe, dims, saved), _score_temporaries(recipe, dims, saved)
    return BlockActivations(
        boundary=boundary,
        whole=whole,
        kept=kept - offloaded,
        offloaded=offloaded,
        kept_by_one=largest,
        recomputed=recomputed,
        recomputed_beside_mlp=max(0, recomputed - saved.mlp * tokens),
        temporaries=max(in_mlp, at_scores),
        peaks_at_scores=at_scores > in_mlp,
        cast_weights=cast_weights,
    )


def _cast_weights(setting: Setting, recipe: Recipe, dims: Dims) -> int:
    if not recipe.is_autocast or (recipe.is_fp8 and not recipe.is_frozen):
        return 0  # the fp8 copies are counted with the weights
    trained = adapter_parameters(setting, dims) if recipe.is_frozen else dims.linear
    return recipe.compute_bytes * trained


def _adapted_experts(setting: Setting, recipe: Recipe, dims: Dims) -> int:
    """Adapters on experts make each expert's weight anew, and its product keeps it."""
    return recipe.compute_bytes * dims.bare_adapted_weights if recipe.is_frozen and adapts_all(setting) else 0


def _kept(setting: Setting, recipe: Recipe, dims: Dims, whole: int, boundary: int, attention: int) -> tuple[int, int]:
    """(blocks that recompute, what each of them keeps)."""
    checkpointing = setting.checkpointing
    if checkpointing is Checkpointing.NONE:
        return 0, whole
    if checkpointing is Checkpointing.FULL:
        return dims.layers, boundary
    if checkpointing is Checkpointing.EVERY_N:
        return dims.layers // (setting.checkpoint_every_n or 1), boundary
    if checkpointing is Checkpointing.ATTENTION:
        return dims.layers, whole - attention
    c = recipe.compute_bytes
    matmuls = c * (dims.query + dims.kv + dims.ffn + dims.hidden)  # every second of seven
    kept = boundary + (matmuls + c * dims.query + 4 * dims.heads) * recipe.tokens
    return dims.layers, min(whole, kept)


def _temporaries(setting: Setting, recipe: Recipe, dims: Dims, saved: SavedTensors) -> int:
    c, h, f, tokens = recipe.compute_bytes, dims.hidden, dims.ffn, recipe.tokens
    in_mlp = (2 if dims.is_gated else 1) * c * f + _activation_temporaries(recipe, dims) * f
    in_mlp += recipe.residual_bytes * h
    if recipe.is_frozen:
        in_mlp = max(in_mlp, _frozen_temporaries(setting, recipe, dims))
    elif recipe.stack.keeps_block_output and recipe.is_checkpointed:
        in_mlp += recipe.residual_bytes * h
    # RMSNorm after the MLP is done with: six fp32 arrays, its saved input counted already, its output gone.
    if not recipe.is_frozen:
        in_norm = (NORM_BACKWARD_BYTES - 4 - 2 * c + recipe.residual_bytes) * h - saved.mlp
        in_mlp = max(in_mlp, in_norm)
    return in_mlp * tokens


def _score_temporaries(recipe: Recipe, dims: Dims, saved: SavedTensors) -> int:
    """Softmax backward: gradients of probabilities and scores, by when the second half of the block is gone."""
    if recipe.kernel in (Kernel.FLASH, Kernel.EFFICIENT):
        return 0
    c, h = recipe.compute_bytes, dims.hidden
    gone = saved.mlp + saved.norms // 2 + c * dims.query + (2 * c * h)
    in_16_bit = 0 if c == 4 else c if recipe.kernel is Kernel.MATH else -c
    scores = dims.heads * recipe.seq_len * (8 + in_16_bit) + recipe.residual_bytes * h - gone
    return max(0, scores) * recipe.tokens


def _frozen_temporaries(setting: Setting, recipe: Recipe, dims: Dims) -> int:
    """Adapters cast their inputs and the gradients of them; where they share the product, its gradient replaces it."""
    c, h, f = recipe.compute_bytes, dims.hidden, dims.ffn
    if recipe.has_fp32_products:
        return (3 * 4 - c) * f + (4 + c) * h
    if recipe.adapter_inputs is AdapterInputs.SHARED and shares_product(setting, dims):
        return c * (2 * f + h)
    if not dims.is_gated:
        return c * (4 * f + 2 * h)
    return c * (3 * f + recipe.stack.frozen_block_arrays * h)


def _activation_temporaries(recipe: Recipe, dims: Dims) -> int:
    """Gradients inside an activation function that is written out in Python, an element."""
    if dims.activation != "gelu_new":
        return 0
    if recipe.is_autocast:
        return 2 * 4 + (0 if recipe.is_frozen else recipe.compute_bytes)
    return recipe.compute_bytes
