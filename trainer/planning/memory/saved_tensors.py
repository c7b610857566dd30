"""Bytes per token that autograd saves in one block, operation by operation.

An operation saves the tensors that its backward reads. Counted from the modelling files of transformers 5 by hooks on
saved tensors; h hidden, q = heads x head_dim, k = kv_heads x head_dim, f width of the MLP, c bytes of the computing
type, r of the residual stream. In a 16-bit model r = c; under autocast r = 4.

    RMSNorm          its input in fp32, 4h (the residual itself where that is fp32), the normalised input, h in the
                     type of the input, and 4 B; Gemma applies its weights in fp32: 4h for the normalised input
    LayerNorm        its input as it is, rh, and 8 B; fused RMSNorm the same with 4 B
    linear layers    each distinct input, ch; under autocast a cast copy for each layer that reads it (1 B in fp8)
    rotary           rotated query and key are new tensors; the views of a fused product keep all three alive
    attention        query, key, value, output, log-sum-exp of each head; the memory-efficient kernel needs as many key
                     and value heads as queries; with a window PyTorch's attention uses it with a mask, c x sequence
                     a token; without a fused kernel the probabilities: sequence x heads x 4 B a token, and a 16-bit
                     copy, with capped scores two
    MLP              gated: gate, activated gate, up and their product, 4cf; else the activation's input and output.
                     GELU written out in Python keeps four arrays, three of them fp32 under autocast
    experts          a gathered copy of the token for each expert it goes to, their products, and the outputs before
                     they are weighted; autocast does not cast the grouped product, which runs in the residual's type
    dropout          a mask, 1 B an element

A frozen linear layer does not save its input, a frozen RMSNorm not its normalised input. An adapter saves the inputs of
its own two matrices, and with DoRA the products of layer and adapter.

DoRA (arXiv:2402.09353): bytes beyond low-rank adapters, for row norms of the weights that every forward computes.

PEFT's `DoraLinearLayer` multiplies the adapter's two matrices with an identity matrix of the layer's inputs, so that
engines run their forward hooks, adds the product to the whole weight (under QLoRA made from 4 bit) and computes the
norm of each row: `eye` i x i in the adapter's type, under autocast a cast copy that the product's graph saves until
the layer is done, then weight, product, scaled product and sum, i x o each. The output is scaled in the type of the
magnitudes, three arrays at once, and the products of layer and adapter are both saved for the gradient of those.

    saved      2 c o a token for each adapted layer, 12 B a row
    moments    eye and its cast | cast and four weights | cast, two weights and three outputs
    backward   three outputs in the type of the magnitudes, in an MLP's input layer

Each is a moment in the forward of a block: of the last block in the forward pass, of any block if it is recomputed.
Counted in torch 2.13 and PEFT 0.21 with dry runs; `lora.dropout` multiplies with the whole weight once more.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.policy.precision_policy import Dims, PrecisionPolicy, adapted_linears
from shardwise.trainer.planning.policy.reference_trainers import AdapterInputs
from shardwise.trainer.spec.model.shape import Norm
from shardwise.trainer.spec.strategy import Attention, AttentionKernel, Method
from shardwise.trainer.spec.value import Value

NamedLinear: TypeAlias = tuple[str, int, int]
"""Name, inputs and outputs."""

_ROW_BYTES = 3 * 4  # length, magnitude by length, and that less one
_OUTPUTS = 3  # arrays of a layer's output, scaled
# Arrays of hidden states alive in a block that runs, in addition to those it saves: the stream before and after
# attention; in a recomputation under autocast also those of the RMSNorm after it (from dry runs).
_HIDDEN, _HIDDEN_AGAIN, _HIDDEN_AFTER_NORM = 2, 3, 7


class NormMoment(Value, frozen=True, kw_only=True):
    """The worst moment of a block's forward, in bytes of a micro batch."""

    forward: int  # in addition to all that the block saves
    again: int  # the same in a recomputation, which ends with the last tensor that is saved
    alone: int  # if it saves nothing, because it is recomputed


_NOTHING = NormMoment(forward=0, again=0, alone=0)


def uses_dora(configuration: Configuration) -> bool:
    """True if magnitudes are trained (DoRA)."""
    return configuration.lora.dora and configuration.method.freezes_base


def row_bytes(configuration: Configuration, dims: Dims) -> int:
    """Bytes that the graph saves for the rows of one block's adapted weights, regardless of tokens."""
    return _ROW_BYTES * sum(o for _, _, o in adapted_linears(configuration, dims)) if uses_dora(configuration) else 0


def saved_product_bytes(
    configuration: Configuration, policy: PrecisionPolicy, dims: Dims, adapted: Iterable[tuple[str, int, int]]
) -> int:
    """Bytes per token that the products of these layers and their adapters save."""
    if not uses_dora(configuration):
        return 0
    # A 4-bit layer returns fp32 if its input is fp32, which attention's output is not.
    output = dims.linears[1 if dims.is_qkv_fused else 3]
    wide = 4 if policy.has_fp32_products else policy.compute_bytes
    return sum(
        (policy.compute_bytes + (policy.compute_bytes if each == output else wide)) * each[2] for each in adapted
    )


def norm_moment(configuration: Configuration, policy: PrecisionPolicy, dims: Dims, mlp_bytes: int) -> NormMoment:
    """The worst moment of one block; `mlp_bytes` are saved per token in the feed-forward half."""
    if not uses_dora(configuration):
        return _NOTHING
    layers = _Layers(configuration, policy, dims)
    last_of_size = {tuple(sizes): index for index, (_, *sizes) in enumerate(layers.adapted)}  # by when most is saved
    moments = [_NOTHING, *(layers.moment(index, mlp_bytes) for index in last_of_size.values())]
    return NormMoment(
        forward=max(moment.forward for moment in moments),
        again=max(moment.again for moment in moments),
        alone=max(moment.alone for moment in moments),
    )


def backward_bytes(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """Bytes of a token in the backward of one block: the widest output, scaled, less a shared product freed by then."""
    if not uses_dora(configuration):
        return 0
    c = policy.compute_bytes
    freed = c * (dims.ffn + dims.hidden) if policy.adapter_inputs is AdapterInputs.SHARED else 0
    if not dims.is_gated:  # the last layer's products are freed as well
        freed += 2 * c * dims.hidden
    widest = max((o for _, _, o in adapted_linears(configuration, dims)), default=0)
    return _OUTPUTS * _magnitude_bytes(policy) * widest - freed


def _magnitude_bytes(policy: PrecisionPolicy) -> int:
    """Bytes of an element that a magnitude is multiplied with: engines cast it, autocast does not."""
    return policy.trained_bytes if policy.is_autocast else policy.compute_bytes


class _Layers:
    """The adapted layers of one block in the order they run."""

    def __init__(self, configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> None:
        self._configuration, self._policy, self._dims = configuration, policy, dims
        self.adapted = adapted_linears(configuration, dims)
        self._casts_inputs = policy.adapter_inputs is AdapterInputs.AUTOCAST
        num_attention = 2 if dims.is_qkv_fused else 4
        self._num_in_attention = sum(each in self.adapted for each in dims.linears[:num_attention])

    def moment(self, index: int, mlp_bytes: int) -> NormMoment:
        """While layer `index` runs."""
        policy, rank = self._policy, self._configuration.lora.rank
        _, num_inputs, num_outputs = self.adapted[index]
        c, eye = policy.compute_bytes, _magnitude_bytes(policy)
        wide = 4 if self._casts_inputs else c  # of the layer's input, which the weight is cast to
        is_made = wide != c or self._configuration.method is Method.QLORA
        square, weight = num_inputs**2, num_inputs * num_outputs
        cast = c * square if policy.is_autocast and eye != c else 0
        retained_eye = cast or eye * square
        at_eye = eye * square + cast + c * weight
        at_norm = retained_eye + (3 + is_made) * wide * weight
        at_output = retained_eye + (1 + is_made) * wide * weight
        own = c * (num_outputs + rank) + (c * num_inputs if self._casts_inputs else 0)  # saved after the norm
        # The input itself, and in fp32 as PEFT casts it for the adapter.
        both = wide if policy.has_fp32_products else c + wide
        inputs = both * num_inputs if self._casts_inputs else 0
        hidden = policy.residual_bytes * self._dims.hidden
        scaled, tokens = eye * num_outputs, policy.tokens
        # A recomputation ends where the output is scaled, unless a dropout saves its mask behind it.
        has_dropout = self._dims.has_hidden_dropout and self._configuration.has_dropout
        is_last = index + 1 == len(self.adapted) and not has_dropout
        other = inputs - self._saved_after(index, mlp_bytes)
        at_weight = max(at_eye, at_norm) - own * tokens
        others = 2 * c * num_outputs + (c * self._dims.ffn if self._num_in_attention <= index and not is_last else 0)
        alone = max(
            eye * square + max(cast, c * weight),
            (3 + is_made) * wide * weight,
            (1 + is_made) * wide * weight + _OUTPUTS * scaled * tokens,
        )
        return NormMoment(
            forward=max(at_weight, at_output + _OUTPUTS * scaled * tokens) + (other + _HIDDEN * hidden) * tokens,
            again=max(at_weight, at_output + (1 if is_last else _OUTPUTS) * scaled * tokens)
            + (other + self._num_hidden_again() * hidden) * tokens,
            alone=alone + (inputs + others + _HIDDEN * hidden) * tokens,
        )

    def _num_hidden_again(self) -> int:
        policy = self._policy
        if policy.residual_bytes == policy.compute_bytes and self._casts_inputs:
            return _HIDDEN_AFTER_NORM if self._dims.norm is Norm.RMS else _HIDDEN
        return _HIDDEN_AGAIN

    def _saved_after(self, index: int, mlp_bytes: int) -> int:
        """Bytes of a token that the block saves when this layer is done."""
        later = sum(self._adapter_bytes(each) for each in self.adapted[index + 1 :])
        if index < self._num_in_attention:
            return later + mlp_bytes
        if index + 1 == len(self.adapted):
            return later
        # The layer's own output, and where the last one shares its input with its adapter, their product.
        product = self._policy.compute_bytes * self._dims.ffn
        is_split = self._dims.is_gated and not self._dims.is_gate_up_fused
        return later + (product if is_split else mlp_bytes) + (0 if self._casts_inputs else product)

    def _adapter_bytes(self, linear: tuple[str, int, int]) -> int:
        products = saved_product_bytes(self._configuration, self._policy, self._dims, (linear,))
        copied = linear[1] if self._casts_inputs else 0
        return products + self._policy.compute_bytes * (self._configuration.lora.rank + copied)


_EXPERT_INDICES = 4 * 8  # order of the tokens, its inverse, the tokens' weights and experts: 8 bytes each an expert


def keeps_input(policy: PrecisionPolicy, dims: Dims) -> bool:
    """True if the first norm saves the block's input itself, not a copy in another dtype."""
    if dims.has_centred_norms or not dims.begins_with_norm:
        return False
    if dims.norm is Norm.LAYER:
        return policy.residual_bytes == 4 or not policy.is_autocast
    return policy.residual_bytes == 4 or policy.is_fused


class SavedTensors(Value, frozen=True, kw_only=True):
    """Bytes of one token in one block."""

    norms: int
    linear_inputs: int
    attention: int
    mlp: int
    dropout: int

    @property
    def total(self) -> int:
        return self.norms + self.linear_inputs + self.attention + self.mlp + self.dropout


def saved_tensors(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> SavedTensors:
    """Bytes that one block saves without recomputation, including its input if the first norm saves it."""
    hidden_masks = 2 * dims.hidden if dims.has_hidden_dropout and configuration.has_dropout else 0
    return SavedTensors(
        norms=_norm_bytes(policy, dims) + _head_norm_bytes(policy, dims),
        linear_inputs=_linear_input_bytes(configuration, policy, dims),
        attention=attention_bytes(configuration, policy, dims),
        mlp=mlp_bytes(policy, dims),
        dropout=hidden_masks,
    )


def _norm_bytes(policy: PrecisionPolicy, dims: Dims) -> int:
    """The norms of a block, without what they hand on."""
    h, inputs, norms = dims.hidden, dims.num_norm_inputs, dims.num_norms
    if dims.norm is Norm.LAYER:
        # Autocast runs it in fp32: where the residual stream is 16 bit, each norm keeps a copy of its own.
        own_copies = (policy.is_autocast or dims.has_fp32_norms) and policy.residual_bytes != 4
        return (norms * 4 if own_copies else inputs * policy.residual_bytes) * h + 8 * norms
    if policy.is_fused:
        return inputs * policy.residual_bytes * h + 4 * norms
    normalised = 0
    if not policy.is_frozen and dims.has_fp32_norms:
        normalised = 4 * norms
    elif not policy.is_frozen:  # those after a half read products in the computing type
        wide = max(policy.residual_bytes, policy.compute_bytes)
        normalised = wide * min(norms, 2) + policy.compute_bytes * max(norms - 2, 0)
    centred = 4 * norms if dims.has_centred_norms else 0
    return (inputs * 4 + normalised + centred) * h + 4 * norms


def _head_norm_bytes(policy: PrecisionPolicy, dims: Dims) -> int:
    """Norms of query and key; their inputs are products in the computing type."""
    if not dims.has_qk_norm:
        return 0
    if dims.norm is Norm.LAYER:
        return policy.compute_bytes * (dims.query + dims.kv) + 8 * (dims.heads + dims.kv_heads)
    normalised = 0 if policy.is_frozen else 4 if dims.has_fp32_norms else policy.compute_bytes
    return (4 + normalised) * (dims.query + dims.kv) + 4 * (dims.heads + dims.kv_heads)


def _linear_input_bytes(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """Inputs of linear layers that nothing else keeps: those that come from norms."""
    c, h = policy.compute_bytes, dims.hidden
    if policy.is_frozen:
        return _adapter_input_bytes(configuration, policy, dims) + saved_product_bytes(
            configuration, policy, dims, adapted_linears(configuration, dims)
        )
    if policy.is_autocast:
        attention, mlp = _normed_linears(dims)
        others = dims.num_normed_linears - len(attention) - len(mlp)
        return _cast_input_bytes(policy, attention + mlp) + others * c * h
    return dims.num_norm_outputs * c * h


def _normed_linears(dims: Dims) -> tuple[tuple[NamedLinear, ...], tuple[NamedLinear, ...]]:
    """The linear layers that read a norm, of attention and of a feed-forward half without experts."""
    num_attention = 1 if dims.is_qkv_fused else 3
    rest = () if dims.experts_per_token else dims.linears[num_attention + 1 :]
    return dims.linears[:num_attention], rest[: dims.num_normed_linears - num_attention]


def _cast_input_bytes(policy: PrecisionPolicy, linears: Sequence[NamedLinear]) -> int:
    """Bytes a token of the copies that layers keep of their inputs: in FP8 where Transformer Engine multiplies."""
    c = policy.compute_bytes
    return sum(
        num_inputs * (1 if policy.multiplies_by_te and (num_inputs, num_outputs) in policy.fp8_shapes else c)
        for _, num_inputs, num_outputs in linears
    )


def _adapter_input_bytes(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    c, adapted, rank = policy.compute_bytes, adapted_linears(configuration, dims), configuration.lora.rank
    if policy.adapter_inputs is AdapterInputs.AUTOCAST:
        return c * (sum(copied_inputs(policy, dims, adapted)) + rank * len(adapted))
    if policy.adapter_inputs is AdapterInputs.FP32:
        return sum(4 * num_inputs for _, num_inputs, _ in adapted) + 4 * rank * len(adapted)
    if policy.adapter_inputs is AdapterInputs.FUSED:
        return sum(c * num_inputs for _, num_inputs, _ in adapted[1:])
    names = {name for name, _, _ in adapted}
    distinct = sum(num_inputs for sources, num_inputs in _sources(dims) if names & sources)
    return c * (distinct + rank * len(adapted))


def copied_inputs(policy: PrecisionPolicy, dims: Dims, adapted: Iterable[tuple[str, int, int]]) -> Iterator[int]:
    """Inputs of each of these layers that its adapter casts and keeps; attention's output is 16 bit already."""
    output = dims.linears[1 if dims.is_qkv_fused else 3] if policy.has_fp32_products else None
    return (linear[1] for linear in adapted if linear != output)


def shares_product(configuration: Configuration, dims: Dims) -> bool:
    """True if an adapter reads the input of the last layer of the MLP."""
    return any(name in _MLP_OUTPUTS for name, _, _ in adapted_linears(configuration, dims))


def _sources(dims: Dims) -> tuple[tuple[frozenset[str], int], ...]:
    """The linear layers that read the same tensor, and its width; attention's output is saved by attention."""
    return (
        (_ATTENTION_INPUTS, dims.hidden),
        (_MLP_INPUTS, dims.hidden),
        (_MLP_OUTPUTS, dims.shared_ffn or dims.ffn),
    )


_ATTENTION_INPUTS = frozenset(("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "Wqkv", "c_attn"))
_ATTENTION_OUTPUTS = frozenset(("o_proj", "out_proj", "dense", "c_proj"))
_MLP_INPUTS = frozenset(("gate_proj", "up_proj", "gate_up_proj", "dense_h_to_4h", "c_fc", "fc1", "shared_expert_gate"))
_MLP_OUTPUTS = frozenset(("down_proj", "dense_4h_to_h", "fc2"))


def attention_bytes(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """Query, key, value, output and what the kernel keeps."""
    c, q, k = policy.compute_bytes, dims.query, dims.kv
    if policy.kernel.is_fused:
        # Flash lays its output out as its query is: where that was put together anew, the next product needs a copy.
        # The kernels of packed rows lay it out for the product.
        is_copied = dims.is_rotary_joined and policy.kernel is AttentionKernel.FLASH and not policy.is_packed
        is_copied = is_copied and (not policy.is_frozen or policy.has_fp32_products)
        inputs = _attention_inputs(dims, is_repeated=policy.repeats_kv)
        if policy.has_fp32_products:  # attention casts them
            inputs = q + keys_and_values(dims, is_repeated=policy.repeats_kv)
        # Documents that run one by one keep an output each, and the next product that of the row.
        is_one_by_one = policy.is_packed and policy.kernel is AttentionKernel.EFFICIENT
        is_copied = is_copied or (is_one_by_one and _reads_attention(configuration, policy, dims))
        return c * (inputs + (2 * q if is_copied else q)) + 4 * dims.heads
    scores = dims.heads * policy.seq_len
    if policy.kernel is AttentionKernel.EAGER:
        return 4 * c * q + scores * (4 + (c if c != 4 else 0) + (c if dims.caps_scores else 0))
    # PyTorch's own product of query, key and value runs in fp32, on as many heads unless it broadcasts them.
    output = c * q if _reads_attention(configuration, policy, dims) else 0  # no kernel keeps it here
    return 4 * (q + 2 * (k if dims.broadcasts_heads else q)) + output + 4 * scores


def _reads_attention(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> bool:
    """True if the layer after attention, or its adapter, saves the output of attention unchanged."""
    if not policy.is_frozen:
        return True
    adapted = {name for name, _, _ in adapted_linears(configuration, dims)}
    return policy.adapter_inputs is AdapterInputs.SHARED and bool(adapted & _ATTENTION_OUTPUTS)


def attention_module_bytes(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """Bytes freed by recomputing the attention module: all it saves except its input."""
    inside = attention_bytes(configuration, policy, dims) + _head_norm_bytes(policy, dims)
    c, h = policy.compute_bytes, dims.hidden
    if policy.is_frozen:
        inside += _attention_adapter_bytes(configuration, policy, dims)
        names = {name for name, _, _ in adapted_linears(configuration, dims)}
        is_shared = policy.adapter_inputs is AdapterInputs.SHARED and bool(names & _ATTENTION_INPUTS)
        return inside - (0 if is_shared else c * h)
    if policy.is_autocast:  # a cast copy for each product that reads the input
        return inside + _cast_input_bytes(policy, _normed_linears(dims)[0]) - policy.residual_bytes * h
    return inside


def _attention_adapter_bytes(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """Bytes that the adapters of the attention module save, without an input that they share."""
    if policy.adapter_inputs not in (AdapterInputs.AUTOCAST, AdapterInputs.SHARED):
        return 0
    c, adapted = policy.compute_bytes, adapted_linears(configuration, dims)
    inside = [each for each in dims.linears[: 2 if dims.is_qkv_fused else 4] if each in adapted]
    is_copied = policy.adapter_inputs is AdapterInputs.AUTOCAST
    copied = sum(copied_inputs(policy, dims, inside)) if is_copied else 0
    return c * (configuration.lora.rank * len(inside) + copied) + saved_product_bytes(
        configuration, policy, dims, inside
    )


def windowed_attention_bytes(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> int:
    """The same in a block that sees a window only, where PyTorch's attention needs a mask for that.

    It then runs its memory-efficient kernel on as many key and value heads as queries, and keeps the mask as numbers.
    """
    needs_mask = dims.window is not None and policy.seq_len >= dims.window and configuration.attention is Attention.SDPA
    needs_mask = needs_mask and not policy.is_packed  # a window is the kernel's own there
    if not needs_mask or not policy.kernel.is_fused:
        return attention_bytes(configuration, policy, dims)
    c, q = policy.compute_bytes, dims.query
    return c * (_attention_inputs(dims, is_repeated=True) + q + policy.seq_len) + 4 * dims.heads


def keys_and_values(dims: Dims, *, is_repeated: bool) -> int:
    """Elements of both as attention reads them; a single head is only viewed as many."""
    return 2 * dims.query if is_repeated and 1 < dims.kv_heads < dims.heads else 2 * dims.kv


def _attention_inputs(dims: Dims, *, is_repeated: bool) -> int:
    """Elements of query, key and value as the kernel reads them, and of the fused product that its views keep alive."""
    read = keys_and_values(dims, is_repeated=is_repeated)
    if not dims.is_qkv_fused:
        return dims.query + read
    fused = dims.query + 2 * dims.kv
    if read == 2 * dims.kv:
        return fused + (dims.query + dims.kv if dims.has_rotary else 0)
    return read + (dims.query if dims.has_rotary else fused)


def mlp_bytes(policy: PrecisionPolicy, dims: Dims) -> int:
    """The feed-forward half without its input."""
    c = 4 if policy.has_fp32_products else policy.compute_bytes
    # A frozen output layer does not keep its input. A compiler computes a gated activation again, and so does Liger's
    # SwiGLU, which saves gate and up alone (liger-kernel 0.8.5, LigerSiLUMulFunction).
    products = (2 if dims.is_gated else 0) + (not policy.is_frozen) - (policy.recomputes_gate and dims.is_gated)
    each = _activation_bytes(policy, dims) + products * c
    if not dims.experts_per_token:
        return each * dims.ffn
    wide = policy.residual_bytes if policy.is_autocast else c
    expert = wide * (2 * dims.hidden + (1 + products) * dims.ffn) + _EXPERT_INDICES
    return dims.experts_per_token * expert + 4 * dims.experts + each * dims.shared_ffn


def _activation_bytes(policy: PrecisionPolicy, dims: Dims) -> int:
    """Bytes per element that the activation function saves; most are one kernel that saves its input."""
    c = 4 if policy.has_fp32_products else policy.compute_bytes
    if dims.activation == "relu" and not policy.is_frozen and not policy.is_fp8:
        return 0  # its output, which the next layer saves
    if dims.activation == "gelu_new":  # x, tanh, 1 + tanh and x / 2; autocast computes powers in fp32
        return 3 * 4 + c if policy.is_autocast else 4 * c
    return 3 * c if dims.activation == "quick_gelu" else c
