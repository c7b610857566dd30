"""Activations: bytes that blocks save for the backward, and temporaries of a block's backward.

Every block saves the tensors that `saved_tensors` counts; checkpointing saves fewer and recomputes the rest. Autocast
also saves a 16-bit copy of each weight. The input of a block is the fp32 residual that its first norm saves anyway, or
a LayerNorm's input; an RMSNorm in a 16-bit model saves an fp32 copy in addition to the input.

The peak of a block's backward is at the backward of the product gate x up: the product is freed, the gradients of
product, silu and up exist (+ 3cf - cf), with the gradient of the residual stream and the new gradient of down_proj. If
f is small compared with h, the peak is at the backward of the second RMSNorm. On a CPU whose bf16 products sum in an
fp32 array, it is at the product that computes the gradient of gate x up (c f + 4 f).

Recomputation: `full` recomputes the whole block. `every_n` does so in the first of each n, so that nothing is
recomputed while all activations are still saved. `attention` saves the module's input and recomputes the module when
the feed-forward half is freed. `selective` saves the output of attention and of every second matrix product, the first,
third, ... in the order they run, and recomputes the rest; a saved product that the backward reads needs no more memory.

Offload does not move the last block's activations; on a GPU those of the next block return during a block's backward.

Not covered: workspaces that oneDNN and cuBLAS allocate inside an operation, padding masks.

The loss head, at the end of the forward and in the backward of cross-entropy and lm_head: V vocabulary, T tokens of the
micro batch, C = min(T, slice of `chunked`), c bytes of the computing type.

    eager         forward 8 V T: fp32 logits and their log-softmax, and the 16-bit logits, 2 V T; 4 V T stay;
                  backward 12 V T: log-softmax, its gradient, the gradient of the logits; then the product with the
                  head's weight, from gradients of the logits in the computing type
    chunked       nothing of V x T. A slice: forward 8 V C, fp32 logits and their log-softmax; backward (4 + c) V C in
                  16 bit, 4 V C in fp32, where the gradient replaces the logits; freed before the next slice.
                  In addition the fp32 gradient of the head, the gradient of all hidden states and, in 16 bit, a slice's
                  share of the head's gradient before it is added
    fused         logits once in the computing type, cross-entropy in place; its gradient replaces them
    fused_linear  Liger's: a slice of logits in the computing type, whose gradient replaces them, 1 / 2^n of the tokens
                  but no fewer than give as many logits as hidden states; gradients are made in the forward, the head's
                  in fp32 and cast at its end

On a CPU whose bf16 products sum in an fp32 array, 4 V T are added to the logits until their product is complete, and
4 V h to the gradient of the head's weight.

The final norm saves what the norms of a block do. Under autocast the head's weight is cast, 2 V h.
"""

from shardwise.trainer.planning.configuration import Configuration, same_for_all
from shardwise.trainer.planning.memory.saved_tensors import (
    NormMoment,
    SavedTensors,
    attention_module_bytes,
    backward_bytes,
    keeps_input,
    keys_and_values,
    norm_moment,
    row_bytes,
    saved_tensors,
    shares_product,
    uses_dora,
    windowed_attention_bytes,
)
from shardwise.trainer.planning.memory.traced import retained, run_of
from shardwise.trainer.planning.policy.precision_policy import (
    Dims,
    PrecisionPolicy,
    adapted_linears,
    adapter_parameters,
    adapts_all,
    traced_adapters,
)
from shardwise.trainer.planning.policy.reference_trainers import AdapterInputs
from shardwise.trainer.spec.model.shape import Norm
from shardwise.trainer.spec.strategy import AttentionKernel, Checkpointing, LossHead
from shardwise.trainer.spec.value import Value

NORM_BACKWARD_BYTES = 24  # an element of the hidden states, six fp32 arrays


class BlockActivations(Value, frozen=True, kw_only=True):
    """Bytes of a whole micro batch on one rank."""

    boundary: int  # input of a block, which full checkpointing saves
    whole: int  # everything one block saves, its share of cast weights included
    retained: int  # of all blocks together, between forward and backward
    offloaded: int  # in host RAM instead
    fetched: int  # brought back from there for the next block, while one runs backwards
    retained_by_first: int  # by the first block
    retained_by_last: int
    recomputed: int  # by the first block's backward, in addition to what was saved
    recomputed_by_last: int
    recomputed_after_last: int  # by the block before the last
    recomputed_without_mlp: int  # the same after the backward of the feed-forward half
    temporaries: int  # gradients of activations at the worst moment of a block's backward
    norms: NormMoment  # of DoRA, in a block's forward
    peaks_at_scores: bool  # the worst moment is in attention, when the feed-forward half has its gradients
    cast_weights: int  # autocast's copies of the weights of one block
    cached_casts: int  # those of all blocks that no block keeps, alive until the forward ends


@same_for_all(
    "strategy.precision",
    micro_batch=1,  # the policy has its tokens
    accumulation=1,
    loss=LossHead.EAGER,
    loss_chunk_tokens=None,
    compile=False,  # the policy has what is fused
    fused_kernels=False,
    optimizer_in_backward=False,
    buckets=None,
    shard_group=None,
    reduce_every_micro_batch=False,
    embedding_on_host=False,
)
def block_activations(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> BlockActivations:
    """Bytes that the blocks of the model keep and need."""
    if dims.traced is not None:
        return _traced_activations(configuration, policy, dims)
    tokens = policy.tokens
    boundary = policy.residual_bytes * dims.hidden * tokens
    cast_weights = _cast_weights(configuration, policy, dims)
    saved = saved_tensors(configuration, policy, dims)
    whole = saved.total * tokens + cast_weights + _adapted_experts(configuration, policy, dims)
    whole += row_bytes(configuration, dims)
    shared = boundary if keeps_input(policy, dims) else 0
    in_attention = (
        _in_attention(configuration, policy, dims) if configuration.checkpointing is Checkpointing.ATTENTION else 0
    )
    part = _recomputed_part(configuration, policy, dims, whole=whole, boundary=boundary, in_attention=in_attention)
    num_recomputed, every = _num_recomputed(configuration, dims)
    retained = num_recomputed * part.retained + (dims.layers - num_recomputed) * whole
    if dims.windowed_layers:
        by_mask = (windowed_attention_bytes(configuration, policy, dims) - saved.attention) * tokens
        whole += max(0, by_mask)
        retained += by_mask * dims.windowed_layers * (dims.layers - num_recomputed) // dims.layers
    again = 0
    if configuration.checkpointing is Checkpointing.SELECTIVE:
        again = max(0, whole + boundary - shared + part.unused - part.retained)
    elif configuration.checkpointing is not Checkpointing.ATTENTION:
        again = whole - shared

    def is_recomputed(index: int) -> bool:
        return index % every == 0 and index < num_recomputed * every

    def retained_by(index: int) -> int:
        return part.retained if is_recomputed(index) else whole

    last = dims.layers - 1
    moves = configuration.activation_offload and configuration.checkpointing is not Checkpointing.SELECTIVE
    leaving = max(0, retained - retained_by(last)) if moves else 0
    num_whole = last - min(num_recomputed, -(-last // every))  # blocks before the last that recompute nothing
    offloaded = max(0, leaving - num_whole * _retained_as_views(policy, dims))
    in_mlp, at_scores = _temporaries(configuration, policy, dims, saved), _score_temporaries(policy, dims, saved)
    if configuration.checkpointing is Checkpointing.ATTENTION:
        at_scores = _attention_temporaries(policy, dims, saved, in_attention=in_attention)
    recomputed = again if is_recomputed(0) else 0
    return BlockActivations(
        boundary=boundary,
        whole=whole,
        retained=retained - leaving,
        offloaded=offloaded,
        fetched=min(offloaded, retained_by(last - 1)) if policy.is_cuda else 0,
        retained_by_first=retained_by(0),
        retained_by_last=retained_by(last),
        recomputed=recomputed,
        recomputed_by_last=again if is_recomputed(last) else 0,
        recomputed_after_last=again if is_recomputed(max(0, last - 1)) else 0,
        recomputed_without_mlp=max(0, recomputed - saved.mlp * tokens),
        temporaries=max(in_mlp, at_scores),
        norms=norm_moment(configuration, policy, dims, saved.mlp),
        peaks_at_scores=at_scores > in_mlp,
        cast_weights=cast_weights,
        cached_casts=_cached_casts(configuration, policy, dims, cast_weights, num_recomputed, moves=moves),
    )


def _traced_activations(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> BlockActivations:
    """The same of a model whose blocks were traced; their worst moments are those of `traced`."""
    run = run_of(configuration, policy, dims)
    found = retained(configuration, run)
    *others, before_last, last = (0.0, *found.of_blocks)
    moved = sum(others) + before_last if configuration.activation_offload else 0.0
    casts = [_cast_kind(configuration, policy, dims, kind) for kind in run.order]
    cached = sum(cast for cast, is_again in zip(casts, found.recomputed, strict=True) if is_again)
    return BlockActivations(
        boundary=round(run.boundary),
        whole=round(max(run.saved(kind) for kind in set(run.order))),
        retained=round(found.before[-1] - moved),
        offloaded=round(moved),
        fetched=round(min(moved, before_last)) if policy.is_cuda else 0,
        retained_by_first=round(found.of_blocks[0]),
        retained_by_last=round(last),
        recomputed=0,
        recomputed_by_last=0,
        recomputed_after_last=0,
        recomputed_without_mlp=0,
        temporaries=0,
        norms=NormMoment(forward=0, again=0, alone=0),
        peaks_at_scores=False,
        cast_weights=round(max(casts)),
        cached_casts=round(cached),
    )


def _cast_kind(configuration: Configuration, policy: PrecisionPolicy, dims: Dims, kind: int) -> float:
    """Autocast's copies of the weights of a block of a traced kind."""
    assert dims.traced is not None
    if not policy.is_autocast:
        return 0.0
    trained = dims.traced.kinds[kind].num_parameters
    if policy.is_frozen:
        trained = sum(each.num_elements for each in traced_adapters(dims.traced, configuration.method)[kind])
    return min(run_of(configuration, policy, dims).constant(kind), policy.compute_bytes * trained)


def _retained_as_views(policy: PrecisionPolicy, dims: Dims) -> int:
    """Of a fused product of query, key and value, what its views hold on a device and no copy in host RAM does.

    Query and key are rotated into tensors of their own; the value alone is copied.
    """
    is_held = dims.is_qkv_fused and dims.has_rotary and policy.kernel.is_fused
    return policy.compute_bytes * (dims.query + dims.kv) * policy.tokens if is_held else 0


def _in_attention(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    saved = attention_module_bytes(configuration, policy, dims) * policy.tokens + _attention_casts(
        configuration, policy, dims
    )
    return max(0, saved)  # below: its input is more than all it saves


class _Part(Value, frozen=True, kw_only=True):
    """Bytes that a recomputing block keeps, and the part of them that no backward reads."""

    retained: int
    unused: int = 0


def _num_recomputed(configuration: Configuration, dims: Dims) -> tuple[int, int]:
    """(blocks that recompute something, from one to the next): the first of every n, as the runtime has it."""
    if configuration.checkpointing is Checkpointing.NONE:
        return 0, 1
    if configuration.checkpointing is not Checkpointing.EVERY_N:
        return dims.layers, 1
    every = configuration.checkpoint_every_n or 1
    return dims.layers // every, every


def _recomputed_part(
    configuration: Configuration, policy: PrecisionPolicy, dims: Dims, *, whole: int, boundary: int, in_attention: int
) -> _Part:
    if configuration.checkpointing is Checkpointing.ATTENTION:
        return _Part(retained=whole - in_attention)
    if configuration.checkpointing is not Checkpointing.SELECTIVE:
        return _Part(retained=boundary)
    c = policy.compute_bytes
    outputs = _product_elements(configuration, policy, dims)
    log_sums = 4 * dims.heads if policy.kernel.is_fused else 0
    retained = boundary + c * sum(outputs[::2]) + (c * dims.query + log_sums) * policy.tokens
    # The output of the last product is saved if their number is odd: only the next block reads it.
    unused = c * outputs[-1] if len(outputs) % 2 else 0
    return _Part(retained=min(whole + boundary, retained), unused=unused)


def _product_elements(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> list[int]:
    """Elements that each matrix product of a block makes, in the order they run."""
    adapted = (
        {name for name, _, _ in adapted_linears(configuration, dims)} if configuration.method.freezes_base else set()
    )
    rank, tokens = configuration.lora.rank, policy.tokens
    elements = []
    for (name, num_inputs, _), (_, num_outputs) in zip(dims.linears, dims.products, strict=True):
        elements.append(num_outputs * tokens)
        if name in adapted:
            elements += [rank * num_inputs, num_outputs * num_inputs] if uses_dora(configuration) else []
            elements += [rank * tokens, num_outputs * tokens]
    return elements


def _cast_weights(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """Bytes of the weights that autocast casts, of one block; Transformer Engine's copy in FP8 has a transposed one.

    torchao's layers save their weight itself, and cast it again in the backward.
    """
    if not policy.is_autocast:
        return 0
    if policy.is_frozen:
        return policy.compute_bytes * adapter_parameters(configuration, dims)
    in_fp8 = sum(copies * i * o for i, o, copies in dims.matrices if copies == 1 and (i, o) in policy.fp8_shapes)
    return policy.compute_bytes * (dims.linear - (0 if policy.multiplies_by_te else in_fp8))


def _adapted_experts(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """Adapters on experts make each expert's weight anew, and its product keeps it."""
    return policy.compute_bytes * dims.bare_adapted_weights if policy.is_frozen and adapts_all(configuration) else 0


def _attention_casts(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """Autocast's copies of the weights of attention."""
    cast_weights = _cast_weights(configuration, policy, dims)
    return cast_weights * dims.attention // dims.linear


def _cached_casts(
    configuration: Configuration,
    policy: PrecisionPolicy,
    dims: Dims,
    cast_weights: int,
    num_recomputed: int,
    *,
    moves: bool,
) -> int:
    if moves:  # the host has copies of them
        return (dims.layers if num_recomputed == dims.layers else dims.layers - 1) * cast_weights
    if configuration.checkpointing is Checkpointing.ATTENTION:
        return dims.layers * _attention_casts(configuration, policy, dims)
    return num_recomputed * cast_weights


def _temporaries(configuration: Configuration, policy: PrecisionPolicy, dims: Dims, saved: SavedTensors) -> int:
    c, h, f, tokens = policy.compute_bytes, dims.hidden, dims.ffn, policy.tokens
    in_mlp = max((2 if dims.is_gated else 1) * c, c + policy.sum_bytes) * f + _activation_temporaries(policy, dims) * f
    in_mlp += policy.residual_bytes * h
    if policy.is_frozen:
        in_mlp = max(in_mlp, _frozen_temporaries(configuration, policy, dims))
        if uses_dora(configuration):  # the products of the last layer and its adapter are freed by then
            in_mlp = max(in_mlp - 2 * c * h, backward_bytes(configuration, policy, dims))
    elif policy.reference.keeps_block_output and policy.is_checkpointed:
        in_mlp += policy.residual_bytes * h
    # RMSNorm after the backward of the MLP, or before it: six fp32 arrays, its saved input counted already, its output
    # freed.
    if not policy.is_frozen:
        in_norm = (NORM_BACKWARD_BYTES - 4 - 2 * c + policy.residual_bytes) * h
        in_norm -= 0 if dims.ends_with_norm else saved.mlp
        in_mlp = max(in_mlp, in_norm)
    return in_mlp * tokens


def _score_temporaries(policy: PrecisionPolicy, dims: Dims, saved: SavedTensors) -> int:
    """Softmax backward: gradients of probabilities and scores, when the second half of the block is freed."""
    if policy.kernel.is_fused:
        return 0
    return max(0, _score_gradients(policy, dims) - _freed_before_attention(policy, dims, saved)) * policy.tokens


def _attention_temporaries(policy: PrecisionPolicy, dims: Dims, saved: SavedTensors, *, in_attention: int) -> int:
    """Backward of an attention module that was just recomputed, when the feed-forward half is freed."""
    if policy.kernel.is_fused:
        read = keys_and_values(dims, is_repeated=policy.repeats_kv)
        gradients = policy.compute_bytes * (2 * dims.query + read) + policy.residual_bytes * dims.hidden
    else:
        gradients = _score_gradients(policy, dims)
    freed = _freed_before_attention(policy, dims, saved) - policy.compute_bytes * dims.query
    return max(0, in_attention + (gradients - freed) * policy.tokens)


def _score_gradients(policy: PrecisionPolicy, dims: Dims) -> int:
    """Of probabilities and scores, and of the residual stream."""
    c = policy.compute_bytes
    in_16_bit = 0 if c == 4 else c if policy.kernel is AttentionKernel.MATH else -c
    return dims.heads * policy.seq_len * (8 + in_16_bit) + policy.residual_bytes * dims.hidden


def _freed_before_attention(policy: PrecisionPolicy, dims: Dims, saved: SavedTensors) -> int:
    """Bytes freed by the backward of the feed-forward half and of the output projection."""
    c = policy.compute_bytes
    return saved.mlp + saved.norms // 2 + c * dims.query + 2 * c * dims.hidden


def _frozen_temporaries(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """Adapters cast their inputs and the gradients of them; where they share the product, its gradient replaces it."""
    c, h, f = policy.compute_bytes, dims.hidden, dims.ffn
    if policy.has_fp32_products:
        return (3 * 4 - c) * f + (4 + c) * h
    if policy.adapter_inputs is AdapterInputs.SHARED and shares_product(configuration, dims):
        return c * (2 * f + h)
    if not dims.is_gated:
        return c * (4 * f + 2 * h)
    return c * (3 * f + policy.reference.frozen_block_arrays * h)


def _activation_temporaries(policy: PrecisionPolicy, dims: Dims) -> int:
    """Gradients inside an activation function that is written out in Python, an element."""
    if dims.activation != "gelu_new":
        return 0
    if policy.is_autocast:
        return 2 * 4 + (0 if policy.is_frozen else policy.compute_bytes)
    return policy.compute_bytes


DEFAULT_CHUNK_TOKENS = 1024
FUSED_SLICE_TOKENS = 256  # as in trainer.runtime.loss
TOKEN_BYTES = 24  # input_ids, labels and shifted labels, 8 bytes each
POSITION_BYTES = 8  # of packed rows
_REDUCTIONS = 24  # bytes a token of the slice: targets, their index, ones


class HeadMemory(Value, frozen=True, kw_only=True):
    """Bytes on one rank."""

    retained: int  # final norm and cast weight, from the forward until the head's backward
    forward_logits: int
    backward_logits: int = 0  # backward of cross-entropy
    backward_extra: int = 0  # at that moment: gradients of hidden states and of the weight
    gradient_logits: int = 0  # in the backward of lm_head's matrix product; 0 where that is part of the above
    gradient_extra: int = 0


def head_memory(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> HeadMemory:
    """Bytes of the loss head."""
    tokens, c = policy.tokens, policy.compute_bytes
    logits, hidden = dims.vocab * tokens, c * dims.hidden * tokens
    cast_head = c * dims.embedding if policy.is_autocast and not policy.is_frozen else 0
    norm = (
        _final_norm_bytes(policy, dims) * tokens if dims.traced is None else _traced_norm(configuration, policy, dims)
    )
    retained = norm + cast_head
    cast_gradient = 0 if policy.is_frozen else c * dims.embedding
    # Autocast hands the gradient of its cast weight on in fp32.
    gradient = cast_gradient + (policy.weight_bytes * dims.embedding if policy.is_autocast and cast_gradient else 0)
    foreign = policy.reference.logits.get(configuration.loss)
    if foreign is not None:
        is_whole = foreign.is_whole and configuration.loss is not LossHead.FUSED_LINEAR
        return HeadMemory(
            retained=retained,
            forward_logits=round(foreign.forward * logits),
            backward_logits=round(foreign.backward * logits),
            backward_extra=foreign.num_head_gradients * cast_gradient,
            gradient_logits=c * logits if is_whole else 0,
            gradient_extra=gradient + hidden if is_whole else 0,
        )
    if configuration.loss is LossHead.CHUNKED:
        return _chunked(configuration, policy, dims, retained=retained, cast_gradient=cast_gradient)
    if configuration.loss is LossHead.FUSED_LINEAR:
        return _fused_linear(policy, dims, retained=retained + hidden, cast_gradient=cast_gradient)
    sums = policy.sum_bytes * (dims.hidden * tokens if policy.is_frozen else dims.embedding)
    # Autocast casts the weight's gradient to fp32 once the product has freed its inputs.
    at_cast = gradient - cast_head - hidden - c * logits if policy.is_autocast else 0
    product = {"gradient_logits": c * logits, "gradient_extra": max(cast_gradient + sums, at_cast) + hidden}
    if configuration.loss is LossHead.EAGER:
        capped = c if dims.caps_logits else 0  # the tanh
        forward, backward = (8 + (0 if c == 4 else c) + capped) * logits, (12 + capped) * logits
        return HeadMemory(retained=retained, forward_logits=forward, backward_logits=backward, **product)
    # The logits once; only a slice of them is ever fp32. If they are fp32 the gradient replaces them.
    in_slice = dims.vocab * min(tokens, FUSED_SLICE_TOKENS)
    own = (0 if c == 4 else 4) + (4 if dims.caps_logits else 0)
    return HeadMemory(
        retained=retained + 4 * tokens,
        forward_logits=c * logits + max((8 if dims.caps_logits else 4) * in_slice, policy.sum_bytes * logits),
        backward_logits=c * logits + own * in_slice,
        **product,
    )


def _traced_norm(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """What the last norm leaves, and the hidden states unless the head is frozen."""
    after = run_of(configuration, policy, dims).after
    return round(after - (policy.compute_bytes * dims.hidden * policy.tokens if policy.is_frozen else 0))


def liger_slice_tokens(num_tokens: int, *, hidden: int, vocab: int) -> int:
    """Tokens of a slice of logits of `fused_linear` (liger-kernel 0.8.5, ops/fused_linear_cross_entropy.py)."""
    fewest = -(-num_tokens // -(-vocab // hidden))
    return min(num_tokens, 1 << (fewest - 1).bit_length())


def _fused_linear(policy: PrecisionPolicy, dims: Dims, *, retained: int, cast_gradient: int) -> HeadMemory:
    in_slice = liger_slice_tokens(policy.tokens, hidden=dims.hidden, vocab=dims.vocab)
    fp32_gradient = 0 if policy.is_frozen else 4 * dims.embedding
    at_slice = policy.compute_bytes * dims.vocab * in_slice + fp32_gradient - cast_gradient
    is_cast = policy.compute_bytes != 4
    return HeadMemory(
        retained=retained + cast_gradient,
        forward_logits=max(at_slice, fp32_gradient if is_cast else 0) + 4 * policy.tokens,
        backward_extra=policy.weight_bytes * dims.embedding if policy.is_autocast and cast_gradient else 0,
    )


def _chunked(
    configuration: Configuration, policy: PrecisionPolicy, dims: Dims, *, retained: int, cast_gradient: int
) -> HeadMemory:
    tokens, c = policy.tokens, policy.compute_bytes
    hidden = c * dims.hidden * tokens
    in_slice = configuration.loss_chunk_tokens or DEFAULT_CHUNK_TOKENS
    if not configuration.compiled_head:  # which fills every slice up; its fewer arrays of logits are not counted
        in_slice = min(tokens, in_slice)
    slice_logits, is_fp32 = dims.vocab * in_slice, c == 4
    own = (4 if is_fp32 else 4 + c) + (4 if dims.caps_logits else 0)  # the slope of a cap
    fp32_gradient = 0 if policy.is_frozen else 4 * dims.embedding
    # In 16 bit each slice's product is a tensor of its own, which the CPU casts to fp32 before it adds it.
    product = 0 if is_fp32 or policy.is_frozen else cast_gradient + (0 if policy.is_cuda else fp32_gradient)
    return HeadMemory(
        retained=retained + 4 * tokens,
        forward_logits=8 * slice_logits,
        backward_logits=own * slice_logits + _REDUCTIONS * in_slice,
        backward_extra=fp32_gradient + hidden,
        gradient_logits=c * slice_logits if product else 0,  # the fp32 ones are freed by then
        gradient_extra=fp32_gradient + hidden + product if product else 0,
    )


def _final_norm_bytes(policy: PrecisionPolicy, dims: Dims) -> int:
    """Bytes per token that the last norm and the head's input save."""
    c, h = policy.compute_bytes, dims.hidden
    if dims.norm is Norm.LAYER and not policy.is_autocast:
        return 2 * c * h + 8
    if policy.is_fused:
        return 2 * c * h + 4
    if policy.is_frozen:
        return (4 + (c if policy.reference.keeps_block_output else 0)) * h + 4
    if policy.is_autocast:
        return (4 + 4 + c) * h + 4
    return (4 + 2 * c) * h + 4
