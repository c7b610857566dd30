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
"""

from msgspec.structs import replace

from shardwise.trainer.spec.model.blocks import Component
from shardwise.trainer.spec.model.config_fields import MOST_LAYERS, Fields
from shardwise.trainer.spec.model.shape import Linear, ModelShape, Norm
from shardwise.trainer.spec.strategy import Attention


def read_llama(fields: Fields) -> ModelShape:
    bias = fields.is_on("attention_bias")
    return replace(
        gated_shape(fields, "LlamaDecoderLayer"),
        linears=(
            *attention(fields, qkv_bias=bias, output_bias=bias),
            *gated_mlp(fields, bias=fields.is_on("mlp_bias")),
        ),
    )


def read_gemma(fields: Fields) -> ModelShape:
    """The first Gemma: Llama's block with norms in fp32."""
    bias = fields.is_on("attention_bias")
    return replace(
        gated_shape(fields, "GemmaDecoderLayer"),
        linears=(*attention(fields, qkv_bias=bias, output_bias=bias), *gated_mlp(fields)),
    )


def read_granite(fields: Fields) -> ModelShape:
    """Llama's block; embeddings, residuals, scores and logits are multiplied by numbers of the config."""
    return replace(read_llama(fields), block_class="GraniteDecoderLayer")


def read_smollm3(fields: Fields) -> ModelShape:
    """Llama's block, of which every fourth rotates nothing; windows on demand."""
    shape = replace(read_llama(fields), block_class="SmolLM3DecoderLayer")
    if not fields.is_on("use_sliding_window") or "sliding_window" not in fields:
        return shape
    rotates = fields.values.get("no_rope_layers")
    interval = fields.whole("no_rope_layer_interval")
    return with_window(
        shape, fields, num_layers=shape.num_layers // interval if rotates is None else list(rotates).count(0)
    )


def read_olmo(fields: Fields) -> ModelShape:
    """LayerNorms without parameters."""
    shape = replace(read_gemma(fields), block_class="OlmoDecoderLayer")
    return replace(shape, norm=Norm.LAYER, norm_parameters_per_block=0, final_norm_parameters=0)


def read_olmo2(fields: Fields) -> ModelShape:
    """OLMo 2 and 3: each half is normalised at its end; query and key have norms over all heads; OLMo 3 has windows."""
    model_type = fields.text("model_type")
    shape = replace(read_gemma(fields), block_class=f"{model_type.capitalize()}DecoderLayer", has_qk_norm=True)
    shape = replace(shape, norm_parameters_per_block=2 * shape.hidden_size + shape.query_size + shape.kv_size)
    if model_type == "olmo2":
        return shape
    return with_window(shape, fields, num_layers=shape.num_layers - shape.num_layers // 4)


def read_glm(fields: Fields) -> ModelShape:
    """GLM-4: gate and up in one product, half of each head rotated; 0414 models also normalise the output of a half."""
    num_norms = 4 if fields.text("model_type") == "glm4" else 2
    shape = gated_shape(fields, "Glm4DecoderLayer" if num_norms == 4 else "GlmDecoderLayer")
    return replace(
        shape,
        linears=(*attention(fields, qkv_bias=fields.is_on("attention_bias")), *_fused_gated_mlp(shape)),
        num_norms=num_norms,
        norm_parameters_per_block=num_norms * shape.hidden_size,
        rotary_dim=rotary_dim(fields, shape.head_dim, share=0.5),
    )


def read_cohere(fields: Fields) -> ModelShape:
    """Command-R: one norm for both halves side by side; Command-R+ has norms of query and key. Logits are scaled."""
    shape = replace(read_gemma(fields), block_class="CohereDecoderLayer", num_norms=1, is_parallel=True)
    has_qk_norm = fields.is_on("use_qk_norm")
    qk_parameters = shape.query_size + shape.kv_size if has_qk_norm else 0
    return replace(shape, has_qk_norm=has_qk_norm, norm_parameters_per_block=shape.hidden_size + qk_parameters)


def read_starcoder2(fields: Fields) -> ModelShape:
    """LayerNorms with biases and an MLP of two matrices, around Llama's attention."""
    bias = fields.is_on("use_bias")
    shape = gated_shape(fields, "Starcoder2DecoderLayer")
    hidden, ffn = shape.hidden_size, shape.ffn_size
    shape = replace(
        shape,
        linears=(
            *attention(fields, qkv_bias=bias, output_bias=bias),
            Linear(name="c_fc", num_inputs=hidden, num_outputs=ffn, has_bias=bias),
            Linear(name="c_proj", num_inputs=ffn, num_outputs=hidden, has_bias=bias),
        ),
        norm=Norm.LAYER,
        norm_parameters_per_block=4 * hidden,
        final_norm_parameters=2 * hidden,
        is_gated=False,
        hidden_dropout=fields.number("residual_dropout"),
    )
    return with_window_everywhere(shape, fields)


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
    hidden = shape.hidden_size
    shape = replace(
        shape,
        linears=(
            Linear(name="qkv_proj", num_inputs=hidden, num_outputs=shape.query_size + 2 * shape.kv_size),
            Linear(name="o_proj", num_inputs=shape.query_size, num_outputs=hidden),
            *_fused_gated_mlp(shape),
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
        num_layers=fields.whole("num_hidden_layers", most=MOST_LAYERS),
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
    part = Component.ATTENTION
    query, kv = num_heads * head_dim, fields.whole("num_key_value_heads", null=num_heads) * head_dim
    return (
        Linear(name="q_proj", num_inputs=hidden, num_outputs=query, has_bias=qkv_bias, component=part),
        Linear(name="k_proj", num_inputs=hidden, num_outputs=kv, has_bias=qkv_bias, component=part),
        Linear(name="v_proj", num_inputs=hidden, num_outputs=kv, has_bias=qkv_bias, component=part),
        Linear(name="o_proj", num_inputs=query, num_outputs=hidden, has_bias=output_bias, component=part),
    )


def gated_mlp(fields: Fields, *, size: str = "intermediate_size", bias: bool = False) -> tuple[Linear, ...]:
    hidden, ffn = fields.whole("hidden_size"), fields.whole(size)
    return (
        Linear(name="gate_proj", num_inputs=hidden, num_outputs=ffn, has_bias=bias),
        Linear(name="up_proj", num_inputs=hidden, num_outputs=ffn, has_bias=bias),
        Linear(name="down_proj", num_inputs=ffn, num_outputs=hidden, has_bias=bias),
    )


def _fused_gated_mlp(shape: ModelShape) -> tuple[Linear, ...]:
    """Gate and up as one product, and down."""
    return (
        Linear(name="gate_up_proj", num_inputs=shape.hidden_size, num_outputs=2 * shape.ffn_size),
        Linear(name="down_proj", num_inputs=shape.ffn_size, num_outputs=shape.hidden_size),
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
        num_layers = fields.names("layer_types").count("sliding_attention")
    if num_layers == 0:
        return shape
    return replace(shape, sliding_window=fields.whole("sliding_window"), num_sliding_layers=num_layers)


def rotary_dim(fields: Fields, head_dim: int, *, share: float, name: str = "partial_rotary_factor") -> int | None:
    """Number of rotated dimensions of a head; None: all. `share` is the default if the config has none."""
    scaling = replace(fields, values=fields.table("rope_scaling") or fields.table("rope_parameters"))
    rotated = int(head_dim * scaling.number("partial_rotary_factor", null=fields.number(name, null=share)))
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
    gate = Linear(
        name="shared_expert_gate",
        num_inputs=fields.whole("hidden_size"),
        num_outputs=1,
        adapter_rank_factor=0,
        component=Component.ROUTER,
    )
    shared_mlp = gated_mlp(fields, size="shared_expert_intermediate_size")
    shared = (*(replace(linear, component=Component.SHARED_EXPERTS) for linear in shared_mlp), gate)
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
        component=Component.EXPERTS,
    )
    router = Linear(
        name="gate",
        num_inputs=hidden,
        num_outputs=num_experts,
        is_linear_module=False,
        adapter_rank_factor=0,
        component=Component.ROUTER,
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
        has_router_loss=True,
        experts_per_token=down.num_used,
    )


def _num_dense_layers(fields: Fields) -> int:
    """Blocks without experts: those the config lists, and all but every `decoder_sparse_step`th."""
    num_layers = fields.whole("num_hidden_layers", most=MOST_LAYERS)
    if fields.values.get("num_experts") == 0:
        return num_layers
    listed = set(fields.indices("mlp_only_layers"))
    step = fields.whole("decoder_sparse_step", null=1)
    without = num_layers - num_layers // step
    return without + sum(layer < num_layers and (layer + 1) % step == 0 for layer in listed)
