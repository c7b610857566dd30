"""The loss head: what it holds at the end of the forward, in the backward of cross-entropy and of lm_head.

V vocabulary, T tokens of the micro batch, C = min(T, slice of `chunked`), c bytes of the computing type.

    eager         forward 8 V T: fp32 logits and their log-softmax, and the 16-bit logits, 2 V T; 4 V T stay;
                  backward 12 V T: log-softmax, its gradient, the gradient of the logits; then the product with the
                  head's weight, from gradients of the logits in the computing type
    chunked       nothing of V x T. A slice: forward 8 V C, fp32 logits and their log-softmax; backward (4 + c) V C in
                  16 bit, 4 V C in fp32, where the gradient takes the place of the logits; gone before the next slice.
                  Besides, the fp32 gradient of the head, the gradient of all hidden states and, in 16 bit, a slice's
                  share of the head's gradient before it is added
    fused         logits once in the computing type, cross-entropy in place; its gradient replaces them
    fused_linear  no logits: slices of tokens such that a slice of logits is no larger than the hidden states (Liger)

On a CPU whose bf16 products sum in an fp32 array, 4 V T stand beside the logits until their product is complete, and
4 V h beside the gradient of the head's weight.

The final norm saves what the norms of a block do. Under autocast the head's weight is cast, 2 V h.
"""

from shardwise.trainer.planning.memory.recipe import Dims, Recipe
from shardwise.trainer.planning.setting import Setting
from shardwise.trainer.spec.model.shape import Norm
from shardwise.trainer.spec.strategy import LossHead
from shardwise.trainer.spec.value import Value

DEFAULT_CHUNK_TOKENS = 1024
FUSED_SLICE_TOKENS = 256  # as in trainer.runtime.loss.head
TOKEN_BYTES = 24  # input_ids, labels and shifted labels, 8 bytes each
POSITION_BYTES = 8  # of packed rows
_REDUCTIONS = 24  # bytes a token of the slice: targets, their index, ones


class HeadMemory(Value, frozen=True, kw_only=True):
    """Bytes on one rank."""

    kept: int  # final norm and cast weight, from the forward until the head's backward
    forward_logits: int
    backward_logits: int  # backward of cross-entropy
    backward_extra: int  # beside them: gradients of hidden states and of the weight
    gradient_logits: int  # in the backward of lm_head's matrix product; 0 where that is part of the above
    gradient_extra: int


def head_memory(setting: Setting, recipe: Recipe, dims: Dims) -> HeadMemory:
    """Bytes of the loss head."""
    tokens, c = recipe.tokens, recipe.compute_bytes
    logits, hidden = dims.vocab * tokens, c * dims.hidden * tokens
    cast_head = c * dims.embedding if recipe.is_autocast and not recipe.is_frozen else 0
    kept = _final_norm_bytes(recipe, dims) * tokens + cast_head
    cast_gradient = 0 if recipe.is_frozen else c * dims.embedding
    sums = recipe.sum_bytes * (dims.hidden * tokens if recipe.is_frozen else dims.embedding)
    # Autocast hands the gradient of its cast weight on in fp32.
    gradient = cast_gradient + (recipe.weight_bytes * dims.embedding if recipe.is_autocast and cast_gradient else 0)
    foreign = recipe.stack.logits.get(setting.loss)
    if foreign is not None:
        is_whole = setting.loss is not LossHead.FUSED_LINEAR
        return HeadMemory(
            kept=kept,
            forward_logits=round(foreign.forward * logits),
            backward_logits=round(foreign.backward * logits),
            backward_extra=foreign.num_head_gradients * cast_gradient,
            gradient_logits=c * logits if is_whole else 0,
            gradient_extra=gradient + hidden if is_whole else 0,
        )
    if setting.loss is LossHead.EAGER:
        # Autocast casts the weight's gradient to fp32 once the product has freed its inputs.
        capped = c if dims.caps_logits else 0  # the tanh
        at_cast = gradient - cast_head - hidden - c * logits if recipe.is_autocast else 0
        return HeadMemory(
            kept=kept,
            forward_logits=(8 + (0 if c == 4 else c) + capped) * logits,
            backward_logits=(12 + capped) * logits,
            backward_extra=0,
            gradient_logits=c * logits,
            gradient_extra=max(cast_gradient + sums, at_cast) + hidden,
        )
    if setting.loss is LossHead.FUSED:
        # The logits once; only a slice of them is ever fp32, and where they are fp32 the gradient takes their place.
        in_slice = dims.vocab * min(tokens, FUSED_SLICE_TOKENS)
        own = (0 if c == 4 else 4) + (4 if dims.caps_logits else 0)
        at_cast = gradient - cast_head - hidden - c * logits if recipe.is_autocast else 0
        return HeadMemory(
            kept=kept + 4 * tokens,
            forward_logits=c * logits + max((8 if dims.caps_logits else 4) * in_slice, recipe.sum_bytes * logits),
            backward_logits=c * logits + own * in_slice,
            backward_extra=0,
            gradient_logits=c * logits,
            gradient_extra=max(cast_gradient + sums, at_cast) + hidden,
        )
    if setting.loss is LossHead.FUSED_LINEAR:
        in_slice = min(logits, 2 * dims.hidden * tokens)
        return HeadMemory(
            kept=kept + hidden + cast_gradient,
            forward_logits=(c + 4) * in_slice // 2,
            backward_logits=0,
            backward_extra=0,
            gradient_logits=0,
            gradient_extra=0,
        )
    in_slice = min(tokens, setting.loss_chunk_tokens or DEFAULT_CHUNK_TOKENS)
    slice_logits, is_fp32 = dims.vocab * in_slice, c == 4
    own = (4 if is_fp32 else 4 + c) + (4 if dims.caps_logits else 0)  # the slope of a cap
    fp32_gradient = 0 if recipe.is_frozen else 4 * dims.embedding
    # In 16 bit each slice's product is a tensor of its own, which the CPU casts to fp32 before it adds it.
    product = 0 if is_fp32 or recipe.is_frozen else cast_gradient + (0 if recipe.is_cuda else fp32_gradient)
    return HeadMemory(
        kept=kept + 4 * tokens,
        forward_logits=8 * slice_logits,
        backward_logits=own * slice_logits + _REDUCTIONS * in_slice,
        backward_extra=fp32_gradient + hidden,
        gradient_logits=c * slice_logits if product else 0,  # the fp32 ones are gone by then
        gradient_extra=fp32_gradient + hidden + product if product else 0,
    )


def _final_norm_bytes(recipe: Recipe, dims: Dims) -> int:
    """Bytes per token kept by the last norm and the input of the head."""
    c, h = recipe.compute_bytes, dims.hidden
    if dims.norm is Norm.LAYER and not recipe.is_autocast:
        return 2 * c * h + 8
    if recipe.is_fused:
        return 2 * c * h + 4
    if recipe.is_frozen:
        return (4 + (c if recipe.stack.keeps_block_output else 0)) * h + 4
    if recipe.is_autocast:
        return (4 + 4 + c) * h + 4
    return (4 + 2 * c) * h + 4
