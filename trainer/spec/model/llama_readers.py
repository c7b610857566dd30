"""Shapes of the models that descend from Llama: one norm before each half of a block, a gated MLP, rotated positions.

They differ in biases, in norms of query and key, in how many norms a block has (Gemma normalises what a half puts out
as well), in fused projections (Phi-3) and in where attention sees a window only. Sources: the modelling files of
transformers, class by class; tests build every one of them and compare.
"""

from msgspec.structs import replace

from trainer.spec.model.architecture import Linear, ModelShape, Norm
from trainer.spec.model.config_fields import Fields
from trainer.spec.strategy import Attention


def read_llama(fields: Fields) -> ModelShape:
    bias = fields.says("attention_bias")
    return replace(
        gated_shape(fields, "LlamaDecoderLayer"),
        linears=(*attention(fields, qkv_bias=bias, output_bias=bias), *gated_mlp(fields, bias=fields.says("mlp_bias"))),
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
    bias = fields.says("attention_bias")
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
    is_parallel = fields.says("use_parallel_residual")
    norms = 1 if is_parallel else 2
    has_qk_norm = fields.says("qk_layernorm")
    return replace(
        shape,
        linears=(
            *attention(fields, qkv_bias=fields.says("use_qkv_bias"), output_bias=False),
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
    """A Llama without biases: what its descendants change."""
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
        is_tied=fields.says("tie_word_embeddings"),
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
    """The same with an RMSNorm of query and one of key, over the width of a head."""
    parameters = shape.norm_parameters_per_block + 2 * shape.head_dim
    return replace(shape, has_qk_norm=True, norm_parameters_per_block=parameters)


def with_window_everywhere(shape: ModelShape, fields: Fields) -> ModelShape:
    """The same with the window of the config, where it has one, in every block."""
    if "sliding_window" not in fields:
        return shape
    return with_window(shape, fields, num_layers=shape.num_layers)


def with_window(shape: ModelShape, fields: Fields, *, num_layers: int) -> ModelShape:
    """The same with the config's window in so many blocks; `layer_types`, where given, names them instead."""
    if "layer_types" in fields:
        num_layers = list(fields.values["layer_types"]).count("sliding_attention")
    if num_layers == 0:
        return shape
    return replace(shape, sliding_window=fields.whole("sliding_window"), num_sliding_layers=num_layers)


def rotary_dim(fields: Fields, head_dim: int, *, share: float, name: str = "partial_rotary_factor") -> int | None:
    """How many of a head's dimensions are rotated; None: all. `share` where neither place of the config says it."""
    scaling = fields.table("rope_scaling") or fields.table("rope_parameters")
    rotated = int(head_dim * scaling.get("partial_rotary_factor", fields.number(name, null=share)))
    return None if rotated == head_dim else rotated


def _with_window_in_last_layers(shape: ModelShape, fields: Fields) -> ModelShape:
    if not fields.says("use_sliding_window") or "sliding_window" not in fields:
        return shape
    first = fields.whole("max_window_layers", least=0)
    return with_window(shape, fields, num_layers=max(0, shape.num_layers - first))


def _gemma(fields: Fields, block_class: str, *, pattern: int) -> ModelShape:
    """Four norms a block; every `pattern`th block attends to all tokens, the others within the window."""
    shape = gated_shape(fields, block_class, activation="hidden_activation")
    bias = fields.says("attention_bias")
    shape = replace(
        shape,
        linears=(*attention(fields, qkv_bias=bias, output_bias=bias), *gated_mlp(fields)),
        num_norms=4,
        norm_parameters_per_block=4 * shape.hidden_size,
        logit_softcap=fields.cap("final_logit_softcapping"),
    )
    return with_window(shape, fields, num_layers=shape.num_layers - shape.num_layers // pattern)
