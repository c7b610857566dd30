"""Shapes of the models that descend from Llama: one norm before each half of a block, a gated MLP, rotated positions.

They differ in biases, in norms of query and key, in how many norms a block has (Gemma also normalises the output of a
half), in fused projections (Phi-3) and in the blocks whose attention has a window. Sources: the modelling files of
transformers, class by class; tests build every one of them and compare.

In a mixture-of-experts model a router sends each token to a few of many gated MLPs. transformers stores the experts of
a block in two tensors of three dimensions, and the router as a bare weight: none of them is a linear module. For
adapters on "all-linear", peft 0.21 adapts them in Mixtral and Qwen3-MoE all the same, gate and up with twice the rank
since they are two layers in one, and then skips the MLPs of blocks without experts, whose names it considers those of
experts; in Qwen2-MoE it adapts linear modules only. Tests count its adapters. The auxiliary loss that balances the
experts is not added by this project's loss head.

Above the readers are the fields of a config.json (`Fields`) that every reader in this folder reads. A missing field has
the default of that model's config class in transformers. The table below repeats the defaults of all fields that a
shape needs, since nothing here may import transformers; a test compares it with the installed classes. The fields of a
model's size (`hidden_size`, the number of layers, heads and tokens) have no default: a file without them is refused.
Gemma 3 is the exception, whose published files omit default values.

A field that is null is not missing: the readers treat it as the config class does.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.model.shape import Linear, ModelShape, Norm
from shardwise.trainer.spec.strategy import Attention
from shardwise.trainer.spec.value import Value

_NO_DROPOUT = {"attention_dropout": 0.0}
_GPT = {
    "n_positions": 1024,
    "n_inner": None,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_GEMMA = {
    **_NO_DROPOUT,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": 4096,
    "layer_types": None,
}
_QWEN = {
    **_NO_DROPOUT,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_QWEN_LAYERS = {"max_window_layers": 28, "layer_types": None}
_QWEN_EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": None}
_PHI = {**_NO_DROPOUT, "num_key_value_heads": None, "resid_pdrop": 0.0, "tie_word_embeddings": False}

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        **_NO_DROPOUT,
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "mistral": {
        **_NO_DROPOUT,
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    "qwen2": {**_QWEN, **_QWEN_LAYERS, "num_key_value_heads": 32},
    "qwen3": {**_QWEN, **_QWEN_LAYERS, "num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
    "gemma2": {
        **_GEMMA,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
    },
    "phi3": {**_PHI, "hidden_act": "silu", "max_position_embeddings": 4096, "sliding_window": None},
    "phi": {**_PHI, "hidden_act": "gelu_new", "max_position_embeddings": 2048, "qk_layernorm": False},
    "stablelm": {
        **_NO_DROPOUT,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "hidden_dropout": 0.0,
    },
    "gpt2": {**_GPT, "activation_function": "gelu_new"},
    "gpt_bigcode": {**_GPT, "activation_function": "gelu_pytorch_tanh", "multi_query": True},
    "gpt_neox": {
        **_NO_DROPOUT,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "hidden_dropout": 0.0,
        "use_parallel_residual": True,
        "attention_bias": True,
    },
    "mpt": {"expansion_ratio": 4, "max_seq_len": 2048, "attn_config": None, "tie_word_embeddings": True},
    "falcon": {
        **_NO_DROPOUT,
        "num_ln_in_parallel_attn": None,
        "num_kv_heads": None,
        "alibi": False,
        "new_decoder_architecture": False,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
        "max_position_embeddings": 2048,
        "ffn_hidden_size": None,
        "activation": "gelu",
        "tie_word_embeddings": True,
        "hidden_dropout": 0.0,
    },
    "mixtral": {
        **_NO_DROPOUT,
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    "qwen2_moe": {
        **_QWEN,
        **_QWEN_LAYERS,
        **_QWEN_EXPERTS,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "qkv_bias": True,
    },
    "qwen3_moe": {
        **_QWEN,
        **_QWEN_EXPERTS,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
}

# Other names that transformers accepts for a field, by the name that is read here.
_GPT_ALIASES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
ALIASES: Mapping[str, Mapping[str, str]] = {
    "gpt2": _GPT_ALIASES,
    "gpt_bigcode": _GPT_ALIASES,
    "mpt": {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"},
    "falcon": {"hidden_size": "n_embed"},
    "mixtral": {"num_local_experts": "num_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
}


class Fields(Value, frozen=True, kw_only=True):
    """A config with its defaults filled in; each read raises InputError for a value of another kind."""

    origin: str
    values: dict[str, Any]

    def __contains__(self, name: str) -> bool:
        """True if the field is present and not null."""
        return self.values.get(name) is not None

    def whole(self, name: str, *, null: int | None = None, least: int = 1) -> int:
        """A whole number; `null` if the field is missing or null."""
        value = self.values.get(name, null)
        value = null if value is None else value
        if value is None:
            raise KeyError(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive whole number" if least else "a whole number, zero or more"
            raise InputError(f"{self.origin}: {name} must be {kind}, not {value!r}")
        return value

    def number(self, name: str, *, null: float = 0.0) -> float:
        """A number, zero or more."""
        value = self.values.get(name)
        value = null if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise InputError(f"{self.origin}: {name} must be a number, not {value!r}")
        return float(value)

    def cap(self, name: str) -> float | None:
        return self.number(name) if name in self else None

    def is_on(self, name: str) -> bool:
        """True if a switch is on; null is off."""
        value = self.values.get(name)
        if not isinstance(value, bool | None):
            raise InputError(f"{self.origin}: {name} must be true or false, not {value!r}")
        return bool(value)

    def text(self, name: str) -> str:
        return str(self.values[name])

    def indices(self, name: str) -> tuple[int, ...]:
        """A list of block numbers; empty if there is none."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(type(index) is int and index >= 0 for index in value):
            raise InputError(f"{self.origin}: {name} must be a list of whole numbers, not {value!r}")
        return tuple(value)

    def table(self, name: str) -> dict[str, Any]:
        """An object in the config; empty if it is missing or null."""
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise InputError(f"{self.origin}: {name} must be an object, not {value!r}")
        return value

    def head_dim(self, *, hidden: int, num_heads: int) -> int:
        """`head_dim`, or an equal share of the hidden size for each head."""
        return self.whole("head_dim") if "head_dim" in self else self.equal_share(hidden=hidden, num_heads=num_heads)

    def equal_share(self, *, hidden: int, num_heads: int) -> int:
        """The hidden size divided by the number of heads, independent of `head_dim`."""
        if hidden % num_heads:
            raise InputError(
                f"{self.origin}: hidden size {hidden} is not a multiple of the number of attention heads {num_heads}"
            )
        return hidden // num_heads


def fields_of(config: Mapping[str, Any], model_type: str, *, origin: str) -> Fields:
    """The fields of a config of this type, under one name each, with defaults."""
    values = dict(config)
    for name, other in ALIASES.get(model_type, {}).items():
        if other in values:
            values.setdefault(name, values[other])
    return Fields(origin=origin, values={**DEFAULTS[model_type], **values})


def read_llama(fields: Fields) -> ModelShape:
    bias = fields.is_on("attention_bias")
    return replace(
        gated_shape(fields, "LlamaDecoderLayer"),
        linears=(
            *attention(fields, qkv_bias=bias, output_bias=bias),
            *gated_mlp(fields, bias=fields.is_on("mlp_bias")),
        ),
    )


def read_mistral(fields: Fields) -> ModelShape:
    return with_window_everywhere(gated_shape(fields, "MistralDecoderLayer"), fields)


def read_qwen2(fields: Fields) -> ModelShape:
    shape = replace(
        gated_shape(fields, "Qwen2DecoderLayer"),
        linears=(*attention(fields, qkv_bias=True, output_bias=False), *gated_mlp(fields)),
    )
    return _with_window_in_last_layers(shape, fields)


def read_qwen3(fields: Fields) -> ModelShape:
    bias = fields.is_on("attention_bias")
    shape = replace(
        with_qk_norm(gated_shape(fields, "Qwen3DecoderLayer")),
        linears=(*attention(fields, qkv_bias=bias, output_bias=bias), *gated_mlp(fields)),
    )
    return _with_window_in_last_layers(shape, fields)


def read_gemma2(fields: Fields) -> ModelShape:
    """Scores are capped before the softmax, which PyTorch's attention cannot do: flash-attn or eager."""
    return replace(
        _gemma(fields, "Gemma2DecoderLayer", pattern=2),
        attention_softcap=fields.cap("attn_logit_softcapping"),
        attentions=(Attention.FLASH, Attention.EAGER),
    )


def read_gemma3(fields: Fields) -> ModelShape:
    """The text part. A config may ask for capped scores, but the model does not cap them."""
    pattern = fields.whole("sliding_window_pattern", null=6)
    return with_qk_norm(_gemma(fields, "Gemma3DecoderLayer", pattern=pattern))


def read_phi3(fields: Fields) -> ModelShape:
    """Phi-3 and Phi-4: query, key and value in one product, gate and up in another."""
    shape = gated_shape(fields, "Phi3DecoderLayer")
    hidden, ffn = shape.hidden_size, shape.ffn_size
    shape = replace(
        shape,
        linears=(
            Linear(name="qkv_proj", num_inputs=hidden, num_outputs=shape.query_size + 2 * shape.kv_size),
            Linear(name="o_proj", num_inputs=shape.query_size, num_outputs=hidden),
            Linear(name="gate_up_proj", num_inputs=hidden, num_outputs=2 * ffn),
            Linear(name="down_proj", num_inputs=ffn, num_outputs=hidden),
        ),
        hidden_dropout=fields.number("resid_pdrop"),
        rotary_dim=rotary_dim(fields, shape.head_dim, share=1.0),
    )
    return with_window_everywhere(shape, fields)


def read_stablelm(fields: Fields) -> ModelShape:
    """LayerNorms with biases; query and key may have one norm a head, without; half of them rotated, or less."""
    shape = gated_shape(fields, "StableLmDecoderLayer")
    is_parallel = fields.is_on("use_parallel_residual")
    norms = 1 if is_parallel else 2
    has_qk_norm = fields.is_on("qk_layernorm")
    return replace(
        shape,
        linears=(
            *attention(fields, qkv_bias=fields.is_on("use_qkv_bias"), output_bias=False),
            *gated_mlp(fields),
        ),
        norm=Norm.LAYER,
        num_norms=norms,
        norm_parameters_per_block=norms * 2 * shape.hidden_size
        + (shape.query_size + shape.kv_size if has_qk_norm else 0),
        final_norm_parameters=2 * shape.hidden_size,
        has_qk_norm=has_qk_norm,
        is_parallel=is_parallel,
        hidden_dropout=fields.number("hidden_dropout"),
        rotary_dim=rotary_dim(fields, shape.head_dim, share=0.25),
    )


def gated_shape(fields: Fields, block_class: str, *, activation: str = "hidden_act") -> ModelShape:
    """A Llama without biases, the base of its descendants."""
    hidden, num_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    return ModelShape(
        model_type=fields.text("model_type"),
        block_class=block_class,
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        ffn_size=fields.whole("intermediate_size"),
        num_layers=fields.whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.whole("num_key_value_heads", null=num_heads),
        head_dim=fields.head_dim(hidden=hidden, num_heads=num_heads),
        max_positions=fields.whole("max_position_embeddings"),
        is_tied=fields.is_on("tie_word_embeddings"),
        linears=(*attention(fields), *gated_mlp(fields)),
        norm_parameters_per_block=2 * hidden,
        activation=fields.text(activation),
        attention_dropout=fields.number("attention_dropout"),
    )


def attention(fields: Fields, *, qkv_bias: bool = False, output_bias: bool = False) -> tuple[Linear, ...]:
    """Query, key, value and output as four linear layers."""
    hidden, num_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head_dim = fields.head_dim(hidden=hidden, num_heads=num_heads)
    query, kv = num_heads * head_dim, fields.whole("num_key_value_heads", null=num_heads) * head_dim
    return (
        Linear(name="q_proj", num_inputs=hidden, num_outputs=query, has_bias=qkv_bias),
        Linear(name="k_proj", num_inputs=hidden, num_outputs=kv, has_bias=qkv_bias),
        Linear(name="v_proj", num_inputs=hidden, num_outputs=kv, has_bias=qkv_bias),
        Linear(name="o_proj", num_inputs=query, num_outputs=hidden, has_bias=output_bias),
    )


def gated_mlp(fields: Fields, *, size: str = "intermediate_size", bias: bool = False) -> tuple[Linear, ...]:
    hidden, ffn = fields.whole("hidden_size"), fields.whole(size)
    return (
        Linear(name="gate_proj", num_inputs=hidden, num_outputs=ffn, has_bias=bias),
        Linear(name="up_proj", num_inputs=hidden, num_outputs=ffn, has_bias=bias),
        Linear(name="down_proj", num_inputs=ffn, num_outputs=hidden, has_bias=bias),
    )


def with_qk_norm(shape: ModelShape) -> ModelShape:
    """The shape with an RMSNorm of query and one of key, over the width of a head."""
    parameters = shape.norm_parameters_per_block + 2 * shape.head_dim
    return replace(shape, has_qk_norm=True, norm_parameters_per_block=parameters)


def with_window_everywhere(shape: ModelShape, fields: Fields) -> ModelShape:
    """The shape with the window of the config, if it has one, in every block."""
    if "sliding_window" not in fields:
        return shape
    return with_window(shape, fields, num_layers=shape.num_layers)


def with_window(shape: ModelShape, fields: Fields, *, num_layers: int) -> ModelShape:
    """The shape with the config's window in `num_layers` blocks; a given `layer_types` determines them instead."""
    if "layer_types" in fields:
        num_layers = list(fields.values["layer_types"]).count("sliding_attention")
    if num_layers == 0:
        return shape
    return replace(shape, sliding_window=fields.whole("sliding_window"), num_sliding_layers=num_layers)


def rotary_dim(fields: Fields, head_dim: int, *, share: float, name: str = "partial_rotary_factor") -> int | None:
    """Number of rotated dimensions of a head; None: all. `share` is the default if the config has none."""
    scaling = fields.table("rope_scaling") or fields.table("rope_parameters")
    rotated = int(head_dim * scaling.get("partial_rotary_factor", fields.number(name, null=share)))
    return None if rotated == head_dim else rotated


def _with_window_in_last_layers(shape: ModelShape, fields: Fields) -> ModelShape:
    if not fields.is_on("use_sliding_window") or "sliding_window" not in fields:
        return shape
    first = fields.whole("max_window_layers", least=0)
    return with_window(shape, fields, num_layers=max(0, shape.num_layers - first))


def _gemma(fields: Fields, block_class: str, *, pattern: int) -> ModelShape:
    """Four norms a block; every `pattern`th block attends to all tokens, the others within the window."""
    shape = gated_shape(fields, block_class, activation="hidden_activation")
    bias = fields.is_on("attention_bias")
    shape = replace(
        shape,
        linears=(*attention(fields, qkv_bias=bias, output_bias=bias), *gated_mlp(fields)),
        num_norms=4,
        norm_parameters_per_block=4 * shape.hidden_size,
        logit_softcap=fields.cap("final_logit_softcapping"),
    )
    return with_window(shape, fields, num_layers=shape.num_layers - shape.num_layers // pattern)


def read_mixtral(fields: Fields) -> ModelShape:
    shape = gated_shape(fields, "MixtralDecoderLayer")
    experts = _experts(fields, count="num_local_experts", size="intermediate_size", has_adapters=True)
    return with_window_everywhere(_with_experts(shape, (*attention(fields), *experts)), fields)


def read_qwen2_moe(fields: Fields) -> ModelShape:
    """Every token passes a shared expert as well, weighted by a gate of its own."""
    projections = attention(fields, qkv_bias=fields.is_on("qkv_bias"), output_bias=False)
    gate = Linear(name="shared_expert_gate", num_inputs=fields.whole("hidden_size"), num_outputs=1)
    shared = (*gated_mlp(fields, size="shared_expert_intermediate_size"), gate)
    experts = _experts(fields, count="num_experts", size="moe_intermediate_size", has_adapters=False)
    shape = _with_experts(
        gated_shape(fields, "Qwen2MoeDecoderLayer"),
        (*projections, *shared, *experts),
        num_dense=_num_dense_layers(fields),
        dense=(*projections, *gated_mlp(fields)),
    )
    if not fields.is_on("use_sliding_window"):
        return shape
    num_first = min(shape.num_layers, fields.whole("max_window_layers", least=0))
    return with_window(shape, fields, num_layers=(num_first + 1) // 2)


def read_qwen3_moe(fields: Fields) -> ModelShape:
    bias = fields.is_on("attention_bias")
    projections = attention(fields, qkv_bias=bias, output_bias=bias)
    experts = _experts(fields, count="num_experts", size="moe_intermediate_size", has_adapters=True)
    mlp = (replace(linear, adapter_rank_factor=0) for linear in gated_mlp(fields))
    shape = _with_experts(
        with_qk_norm(gated_shape(fields, "Qwen3MoeDecoderLayer")),
        (*projections, *experts),
        num_dense=_num_dense_layers(fields),
        dense=(*projections, *mlp),
    )
    return with_window_everywhere(shape, fields) if fields.is_on("use_sliding_window") else shape


def _experts(fields: Fields, *, count: str, size: str, has_adapters: bool) -> tuple[Linear, ...]:
    """The router and its experts."""
    num_experts = fields.whole(count, least=0)
    hidden, ffn, used = fields.whole("hidden_size"), fields.whole(size), fields.whole("num_experts_per_tok")
    rank_factor = 1 if has_adapters else 0
    gate_up = Linear(
        name="experts.gate_up_proj",
        num_inputs=hidden,
        num_outputs=2 * ffn,
        num_copies=num_experts,
        num_used=used,
        is_linear_module=False,
        adapter_rank_factor=2 * rank_factor,
    )
    router = Linear(
        name="gate",
        num_inputs=hidden,
        num_outputs=num_experts,
        is_linear_module=False,
        adapter_rank_factor=rank_factor,
    )
    down = replace(
        gate_up, name="experts.down_proj", num_inputs=ffn, num_outputs=hidden, adapter_rank_factor=rank_factor
    )
    return router, gate_up, down


def _with_experts(
    shape: ModelShape, linears: tuple[Linear, ...], *, num_dense: int = 0, dense: tuple[Linear, ...] = ()
) -> ModelShape:
    """The shape with experts in the blocks that have them; a dense one if none has."""
    if num_dense == shape.num_layers:
        return replace(shape, linears=dense)
    down = linears[-1]
    return replace(
        shape,
        linears=linears,
        num_dense_layers=num_dense,
        dense_linears=dense if num_dense else (),
        ffn_size=down.num_inputs,
        num_experts=down.num_copies,
        experts_per_token=down.num_used,
    )


def _num_dense_layers(fields: Fields) -> int:
    """Blocks without experts: those the config lists, and all but every `decoder_sparse_step`th."""
    num_layers = fields.whole("num_hidden_layers")
    if fields.values.get("num_experts") == 0:
        return num_layers
    listed = set(fields.indices("mlp_only_layers"))
    step = fields.whole("decoder_sparse_step", null=1)
    without = num_layers - num_layers // step
    return without + sum(layer < num_layers and (layer + 1) % step == 0 for layer in listed)
