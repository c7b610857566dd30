"""What one block keeps for its backward pass, and what its backward needs besides.

Counted operation by operation from transformers' Llama, Mistral and Qwen blocks: autograd saves what the backward of
each operation reads. h hidden, q = heads x head_dim, k = kv_heads x head_dim, f ffn, c bytes of the computing type;
bytes of one token in one block:

    operation                      fp32      16-bit model     autocast (fp32 weights and residual stream)
    RMSNorm, twice: input          4h        4h (fp32 copy)   4h
                    normalised     4h        2h               4h
    input of the linear layers     4h (x2)   2h (x2)          2h (x5: autocast casts for each layer)
    RMSNorm: 1/rms, twice          8         8                8
    rotated query, attention out   2cq       2cq              2cq
    rotated key, value             2ck       2ck              2ck
    log-sum-exp of each head       4 heads   4 heads          4 heads
    gate, silu, up, product        4cf       4cf              4cf

Autocast keeps a 16-bit copy of each weight besides. A frozen layer does not keep its input, and a frozen norm not its
normalised input; an adapter keeps the input of its own two matrices (a 16-bit copy under autocast). Eager attention
and PyTorch's unfused one keep the probabilities: sequence x heads x 4 bytes a token, and a 16-bit copy.

The most of a block's backward is alive at the backward of the product gate x up: the product is gone, the gradients of
product, silu and up are there (+ 3cf - cf), with the gradient of the residual stream and the new gradient of down_proj;
where f is small beside h, at the backward of the second RMSNorm.

Not covered: workspaces that oneDNN and cuBLAS allocate inside an operation, dropout masks, padding masks, sparse
blocks; `selective` is the published recipe (attention output and every second matrix product kept).
"""

from trainer.planning.memory.recipe import Dims, Kernel, Recipe, adapted_linears, adapter_parameters
from trainer.planning.setting import Setting
from trainer.spec.strategy import Checkpointing
from trainer.spec.value import Value

NORM_BACKWARD_BYTES = 24  # an element of the hidden states, six fp32 arrays


class BlockActivations(Value, frozen=True, kw_only=True):
    """Bytes of a whole micro batch on one rank."""

    boundary: int  # input of a block, what full checkpointing keeps
    whole: int  # everything one block saves, its share of cast weights included
    kept: int  # of all blocks together, between forward and backward
    kept_by_one: int  # of those, the most that one block keeps
    recomputed: int  # what a block's backward makes again on top of what was kept
    temporaries: int  # gradients of activations at the worst moment of a block's backward
    cast_weights: int  # autocast's copies of the weights of one block


def block_activations(setting: Setting, recipe: Recipe, dims: Dims) -> BlockActivations:
    """What the blocks of the model keep and need in a setting."""
    tokens = recipe.tokens
    boundary = recipe.residual_bytes * dims.hidden * tokens
    cast_weights = _cast_weights(setting, recipe, dims)
    attention = _attention_bytes(recipe, dims)
    whole = (_norm_bytes(recipe, dims) + attention + _linear_input_bytes(setting, recipe, dims)) * tokens
    whole += _mlp_bytes(recipe, dims) * tokens + cast_weights
    # The input of a block is the fp32 residual that its first norm saves anyway; in a 16-bit model it is one more.
    is_shared = recipe.residual_bytes == 4
    num_recomputed, kept_by_one = _kept(setting, recipe, dims, whole, boundary, attention * tokens)
    kept = num_recomputed * kept_by_one + (dims.layers - num_recomputed) * whole
    shared = boundary if is_shared else 0
    if setting.checkpointing is Checkpointing.NONE or not num_recomputed:
        recomputed = 0
    elif setting.checkpointing is Checkpointing.ATTENTION:
        recomputed = attention * tokens
    else:
        recomputed = whole - shared
    return BlockActivations(
        boundary=boundary,
        whole=whole,
        kept=kept,
        kept_by_one=kept_by_one if num_recomputed == dims.layers else whole,
        recomputed=recomputed,
        temporaries=_temporaries(setting, recipe, dims),
        cast_weights=cast_weights,
    )


def _norm_bytes(recipe: Recipe, dims: Dims) -> int:
    """Both norms of a block with the inputs they hand to the linear layers, a token."""
    h = dims.hidden
    if recipe.is_frozen:
        num_bytes = 2 * 4 * h
    elif recipe.is_autocast:
        num_bytes = 2 * (4 + 4) * h
    else:
        num_bytes = 2 * (4 + recipe.compute_bytes) * h
    if dims.has_qk_norm:
        normalised = 0 if recipe.is_frozen else recipe.compute_bytes
        num_bytes += (4 + normalised) * (dims.query + dims.kv) + 4 * (dims.heads + dims.kv_heads)
    return num_bytes + 8


def _linear_input_bytes(setting: Setting, recipe: Recipe, dims: Dims) -> int:
    """What the linear layers save of their inputs beyond what norm, attention and MLP save anyway, a token."""
    c, h = recipe.compute_bytes, dims.hidden
    num_from_norm = 5 if dims.is_gated else 4  # q, k, v, gate, up
    if not recipe.is_frozen:
        return num_from_norm * c * h if recipe.is_autocast else 2 * c * h
    adapted = adapted_linears(setting, dims)
    rank_bytes = setting.lora.rank * c * len(adapted)
    if recipe.is_autocast:
        return sum(c * num_inputs for _, num_inputs, _ in adapted) + rank_bytes
    if recipe.compute_bytes != 4 and recipe.master_bytes == 4 and not recipe.uses_deepspeed and not recipe.uses_fsdp:
        return sum(4 * num_inputs for _, num_inputs, _ in adapted) + 2 * rank_bytes
    names = {name for name, _, _ in adapted}
    from_first = c * h * bool(names & {"q_proj", "k_proj", "v_proj"})
    from_second = c * h * bool(names & {"gate_proj", "up_proj"})
    product = c * dims.ffn * ("down_proj" in names)
    return from_first + from_second + product + rank_bytes


def _attention_bytes(recipe: Recipe, dims: Dims) -> int:
    """Rotated query and key, value, output and what the kernel keeps, a token."""
    c, q, k = recipe.compute_bytes, dims.query, dims.kv
    if recipe.kernel in (Kernel.FLASH, Kernel.EFFICIENT):
        return 2 * c * q + 2 * c * k + 4 * dims.heads
    probabilities = dims.heads * recipe.seq_len * (4 + (c if c != 4 else 0))
    if recipe.kernel is Kernel.EAGER:
        return 4 * c * q + probabilities
    return 4 * 4 * q + probabilities + 4 * dims.heads


def _mlp_bytes(recipe: Recipe, dims: Dims) -> int:
    c, f = recipe.compute_bytes, dims.ffn
    if not dims.is_gated:
        return 2 * c * f
    return (3 if recipe.is_frozen else 4) * c * f  # a frozen down_proj does not keep the product


def _cast_weights(setting: Setting, recipe: Recipe, dims: Dims) -> int:
    if not recipe.is_autocast:
        return 0
    trained = adapter_parameters(setting, dims) if recipe.is_frozen else dims.linear
    return recipe.compute_bytes * trained


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


def _temporaries(setting: Setting, recipe: Recipe, dims: Dims) -> int:
    c, h, f, tokens = recipe.compute_bytes, dims.hidden, dims.ffn, recipe.tokens
    if recipe.is_frozen:
        return (3 * c * f + 5 * c * h) * tokens  # counted on a fake device: adapters cast their inputs and gradients
    in_mlp = (2 if dims.is_gated else 1) * c * f
    in_mlp += recipe.residual_bytes * h
    # RMSNorm after the MLP is done with: six fp32 arrays, its saved input counted already, its output gone.
    in_norm = (NORM_BACKWARD_BYTES - 4 - 2 * c + recipe.residual_bytes) * h - _mlp_bytes(recipe, dims)
    in_mlp = max(in_mlp, in_norm)
    if recipe.kernel in (Kernel.FLASH, Kernel.EFFICIENT):
        return in_mlp * tokens
    # Softmax backward: gradients of probabilities and scores in fp32, by when the second half of the block is gone.
    gone = _mlp_bytes(recipe, dims) + _norm_bytes(recipe, dims) // 2 + c * dims.query + (2 * c * h)
    scores = dims.heads * recipe.seq_len * (8 if c == 4 else 8 - c) + recipe.residual_bytes * h - gone
    return max(in_mlp, scores) * tokens
