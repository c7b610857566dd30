"""The shape of a causal language model from its Hugging Face config.json, and the readers of GPT-2's descendants.

Covered: the decoder-only architectures in `_READERS`. Parameter counts are exact for them: tests build each on the
meta device with transformers and compare, as they do for the class of the blocks and for the targets of adapters. Of a
config with vision or sound the text part is read (`stored`). Anything else is refused rather than guessed. Readers of
Llama's descendants are in `llama_readers`, the defaults of a config in `config_fields`.

GPT-2's descendants have LayerNorms and an MLP of two matrices; half of them read attention and MLP from the same input.
Sources: the modelling files of transformers, class by class. A field that transformers ignores is ignored here: MPT has
no bias, no learned positions and no dropout of its own for residuals, because the class that is trained has none.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec

from shardwise.trainer import FOLDER
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.kinds import shown
from shardwise.trainer.spec.model.config_fields import MOST_LAYERS, Fields, fields_of
from shardwise.trainer.spec.model.config_values import refuse_values
from shardwise.trainer.spec.model.llama_readers import (
    attention,
    read_cohere,
    read_gemma,
    read_gemma2,
    read_gemma3,
    read_glm,
    read_granite,
    read_llama,
    read_mistral,
    read_mixtral,
    read_olmo,
    read_olmo2,
    read_phi3,
    read_qwen2,
    read_qwen2_moe,
    read_qwen3,
    read_qwen3_moe,
    read_smollm3,
    read_stablelm,
    read_starcoder2,
    rotary_dim,
)
from shardwise.trainer.spec.model.shape import Linear, ModelShape, Norm, Positions
from shardwise.trainer.spec.model.stored import text_part
from shardwise.trainer.spec.packages import extra_line
from shardwise.trainer.spec.strategy import Attention

ADMITTED_SHARE = 0.02


def supported_model_types() -> tuple[str, ...]:
    """The model types that a shape can be read from, sorted."""
    return tuple(sorted(_READERS))


@cache
def furthest_forms() -> dict[str, float]:
    """The furthest that the peak of each type's closed form is from a dry run, as a share (`make golden`)."""
    table = (FOLDER / "trainer" / "presets" / "closed_forms.json").read_bytes()
    return msgspec.json.decode(table, type=dict[str, float])


def admitted_types() -> tuple[str, ...]:
    """The types whose closed form stands for a dry run; others are traced where torch is installed."""
    return tuple(name for name, furthest in furthest_forms().items() if furthest <= ADMITTED_SHARE)


def config_positions(config: Mapping[str, Any], *, origin: str = "config.json") -> int | None:
    """Positions that the model of a config has; None if it has as many as one likes, or does not say."""
    if _has_reader(config):
        return read_model_shape(config, origin=origin).max_positions
    return _stated(config, "max_position_embeddings")


def config_vocabulary(config: Mapping[str, Any]) -> int | None:
    """Tokens that the model of a config knows; None if it does not say."""
    return read_model_shape(config).vocab_size if _has_reader(config) else _stated(config, "vocab_size")


def _has_reader(config: Mapping[str, Any]) -> bool:
    return text_part(config).get("model_type") in _READERS


def _stated(config: Mapping[str, Any], name: str) -> int | None:
    value = text_part(config).get(name)
    return value if isinstance(value, int) else None


def read_model_shape(config: Mapping[str, Any], *, origin: str = "config.json") -> ModelShape:
    """The shape of a config; raises InputError for an unsupported architecture or field."""
    config = text_part(config)
    model_type = config.get("model_type")
    reader = _READERS.get(str(model_type))
    if reader is None:
        raise InputError(
            f"{origin}: model_type {shown(model_type)} is not supported; supported: "
            f"{', '.join(supported_model_types())}; "
            f"any other model of transformers is traced with torch: {extra_line('train')}"
        )
    refuse_values(config, origin=origin)
    try:
        shape = reader(fields_of(config, str(model_type), origin=origin))
    except KeyError as error:
        raise InputError(f"{origin}: {model_type} needs {error.args[0]}, which is missing") from None
    if shape.num_heads % shape.num_kv_heads:
        raise InputError(
            f"{origin}: num_attention_heads {shape.num_heads} is not a multiple of num_key_value_heads "
            f"{shape.num_kv_heads}"
        )
    return shape


_MPT_EXPANSION = 4  # written into transformers' MptMLP


def read_gpt2(fields: Fields) -> ModelShape:
    """Its layers are transformers' Conv1D, which adapters treat as linear."""
    return _with_learned_positions(fields, block_class="GPT2Block", has_one_kv_head=False)


def read_gpt_bigcode(fields: Fields) -> ModelShape:
    return _with_learned_positions(fields, block_class="GPTBigCodeBlock", has_one_kv_head=fields.is_on("multi_query"))


def read_gpt_neox(fields: Fields) -> ModelShape:
    hidden, num_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    ffn, bias = fields.whole("intermediate_size"), fields.is_on("attention_bias")
    head_dim = fields.equal_share(hidden=hidden, num_heads=num_heads)
    return ModelShape(
        **_sizes(fields, hidden=hidden, ffn=ffn, num_heads=num_heads, num_kv_heads=num_heads),
        block_class="GPTNeoXLayer",
        linears=(
            Linear(name="query_key_value", num_inputs=hidden, num_outputs=3 * hidden, has_bias=bias),
            Linear(name="dense", num_inputs=hidden, num_outputs=hidden, has_bias=bias),
            Linear(name="dense_h_to_4h", num_inputs=hidden, num_outputs=ffn, has_bias=True),
            Linear(name="dense_4h_to_h", num_inputs=ffn, num_outputs=hidden, has_bias=True),
        ),
        **_layer_norms(2, hidden),
        rotary_dim=rotary_dim(fields, head_dim, share=0.25, name="rotary_pct"),
        is_parallel=fields.is_on("use_parallel_residual"),
        activation=fields.text("hidden_act"),
        hidden_dropout=fields.number("hidden_dropout"),
        attention_dropout=fields.number("attention_dropout"),
    )


def read_mpt(fields: Fields) -> ModelShape:
    """ALiBi, LayerNorms without bias, and attention in one form only: all scores at once."""
    if fields.whole("expansion_ratio") != _MPT_EXPANSION:
        raise InputError(
            f"{fields.origin}: expansion_ratio is {fields.values['expansion_ratio']}; transformers builds MPT "
            f"with {_MPT_EXPANSION}, independent of the config"
        )
    hidden, num_heads = fields.whole("d_model"), fields.whole("n_heads")
    ffn = _MPT_EXPANSION * hidden
    dropout = msgspec.structs.replace(fields, values=fields.table("attn_config")).number("attn_pdrop")
    return ModelShape(
        **_sizes(
            fields,
            hidden=hidden,
            ffn=ffn,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            layers="n_layers",
            positions="max_seq_len",
        ),
        block_class="MptBlock",
        linears=(
            Linear(name="Wqkv", num_inputs=hidden, num_outputs=3 * hidden),
            Linear(name="out_proj", num_inputs=hidden, num_outputs=hidden),
            Linear(name="up_proj", num_inputs=hidden, num_outputs=ffn),
            Linear(name="down_proj", num_inputs=ffn, num_outputs=hidden),
        ),
        **_layer_norms(2, hidden, has_bias=False),
        positions=Positions.ALIBI,
        activation="gelu",
        hidden_dropout=dropout,
        attention_dropout=dropout,
        attentions=(Attention.EAGER,),
    )


def read_falcon(fields: Fields) -> ModelShape:
    """7B: one key-value head, one norm for both halves. 40B: groups of heads and two norms. RW: ALiBi, one by one.

    With ALiBi the model refuses flash-attn in its forward, though its class claims to support it.
    """
    hidden, num_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    ffn, bias = fields.whole("ffn_hidden_size", null=4 * hidden), fields.is_on("bias")
    num_kv_heads = _falcon_kv_heads(fields, num_heads)
    head_dim = fields.equal_share(hidden=hidden, num_heads=num_heads)
    has_alibi = fields.is_on("alibi")
    return ModelShape(
        **_sizes(fields, hidden=hidden, ffn=ffn, num_heads=num_heads, num_kv_heads=num_kv_heads),
        block_class="FalconDecoderLayer",
        linears=(
            Linear(
                name="query_key_value",
                num_inputs=hidden,
                num_outputs=(num_heads + 2 * num_kv_heads) * head_dim,
                has_bias=bias,
            ),
            Linear(name="dense", num_inputs=hidden, num_outputs=hidden, has_bias=bias),
            Linear(name="dense_h_to_4h", num_inputs=hidden, num_outputs=ffn, has_bias=bias),
            Linear(name="dense_4h_to_h", num_inputs=ffn, num_outputs=hidden, has_bias=bias),
        ),
        **_layer_norms(_falcon_norms(fields), hidden),
        positions=Positions.ALIBI if has_alibi else Positions.ROTARY,
        attentions=(Attention.SDPA, Attention.EAGER) if has_alibi else tuple(Attention),
        packing_obstacle="its ALiBi rounds the places of a whole row to bf16" if has_alibi else None,
        is_parallel=fields.is_on("new_decoder_architecture") or fields.is_on("parallel_attn"),
        activation=fields.text("activation"),
        hidden_dropout=fields.number("hidden_dropout"),
        attention_dropout=fields.number("attention_dropout"),
    )


_OPT_OFFSET = 2  # rows of its table of positions that no position reads


def read_opt(fields: Fields) -> ModelShape:
    """GPT-2's block with four projections of attention and ReLU. The 350M model, another kind of block, is refused."""
    hidden, ffn, bias = fields.whole("hidden_size"), fields.whole("ffn_dim"), fields.is_on("enable_bias")
    if not fields.is_on("do_layer_norm_before") or fields.whole("word_embed_proj_dim", null=hidden) != hidden:
        raise InputError(
            f"{fields.origin}: OPT with norms after its halves, or with projected embeddings, is not supported; "
            "use another size than 350M"
        )
    num_heads = fields.whole("num_attention_heads")
    *projections, output = attention(fields, qkv_bias=bias, output_bias=bias)
    return ModelShape(
        **_sizes(fields, hidden=hidden, ffn=ffn, num_heads=num_heads, num_kv_heads=num_heads),
        block_class="OPTDecoderLayer",
        linears=(
            *projections,
            Linear(name="out_proj", num_inputs=output.num_inputs, num_outputs=hidden, has_bias=bias),
            Linear(name="fc1", num_inputs=hidden, num_outputs=ffn, has_bias=bias),
            Linear(name="fc2", num_inputs=ffn, num_outputs=hidden, has_bias=bias),
        ),
        **_layer_norms(2, hidden),
        positions=Positions.LEARNED,
        position_parameters=(fields.whole("max_position_embeddings") + _OPT_OFFSET) * hidden,
        activation=fields.text("activation_function"),
        hidden_dropout=fields.number("dropout"),
        attention_dropout=fields.number("attention_dropout"),
    )


def read_phi(fields: Fields) -> ModelShape:
    """Phi-1, 1.5 and 2: one norm feeds both halves; the head has a bias."""
    hidden, num_heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    ffn, num_kv_heads = fields.whole("intermediate_size"), fields.whole("num_key_value_heads", null=num_heads)
    head_dim = fields.head_dim(hidden=hidden, num_heads=num_heads)
    query, key, value, output = attention(fields, qkv_bias=True, output_bias=True)
    norms = _layer_norms(1, hidden)
    has_qk_norm = fields.is_on("qk_layernorm")
    if has_qk_norm:
        norms["norm_parameters_per_block"] += 4 * (hidden // num_heads)
    return ModelShape(
        **_sizes(fields, hidden=hidden, ffn=ffn, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim),
        block_class="PhiDecoderLayer",
        linears=(
            query,
            key,
            value,
            Linear(name="dense", num_inputs=output.num_inputs, num_outputs=hidden, has_bias=True),
            Linear(name="fc1", num_inputs=hidden, num_outputs=ffn, has_bias=True),
            Linear(name="fc2", num_inputs=ffn, num_outputs=hidden, has_bias=True),
        ),
        **norms,
        head_bias_parameters=fields.whole("vocab_size"),
        rotary_dim=rotary_dim(fields, head_dim, share=0.5),
        has_qk_norm=has_qk_norm,
        is_parallel=True,
        activation=fields.text("hidden_act"),
        hidden_dropout=fields.number("resid_pdrop"),
        attention_dropout=fields.number("attention_dropout"),
    )


def _with_learned_positions(fields: Fields, *, block_class: str, has_one_kv_head: bool) -> ModelShape:
    if fields.is_on("add_cross_attention"):
        raise InputError(f"{fields.origin}: add_cross_attention is true; only decoders without an encoder are trained")
    hidden, num_heads = fields.whole("n_embd"), fields.whole("n_head")
    ffn, positions = fields.whole("n_inner", null=4 * hidden), fields.whole("n_positions")
    num_kv_heads = 1 if has_one_kv_head else num_heads
    qkv = hidden + 2 * num_kv_heads * fields.equal_share(hidden=hidden, num_heads=num_heads)
    return ModelShape(
        **_sizes(
            fields,
            hidden=hidden,
            ffn=ffn,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            layers="n_layer",
            positions="n_positions",
        ),
        block_class=block_class,
        linears=(
            Linear(name="c_attn", num_inputs=hidden, num_outputs=qkv, has_bias=True),
            Linear(name="c_proj", num_inputs=hidden, num_outputs=hidden, has_bias=True),
            Linear(name="c_fc", num_inputs=hidden, num_outputs=ffn, has_bias=True),
            Linear(name="c_proj", num_inputs=ffn, num_outputs=hidden, has_bias=True),
        ),
        **_layer_norms(2, hidden),
        positions=Positions.LEARNED,
        position_parameters=positions * hidden,
        activation=fields.text("activation_function"),
        hidden_dropout=fields.number("resid_pdrop"),
        attention_dropout=fields.number("attn_pdrop"),
    )


def _sizes(
    fields: Fields,
    *,
    hidden: int,
    ffn: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int | None = None,
    layers: str = "num_hidden_layers",
    positions: str = "max_position_embeddings",
) -> dict[str, Any]:
    return {
        "model_type": fields.text("model_type"),
        "vocab_size": fields.whole("vocab_size"),
        "hidden_size": hidden,
        "ffn_size": ffn,
        "num_layers": fields.whole(layers, most=MOST_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": fields.equal_share(hidden=hidden, num_heads=num_heads) if head_dim is None else head_dim,
        "max_positions": fields.whole(positions),
        "is_tied": fields.is_on("tie_word_embeddings"),
        "is_gated": False,
    }


def _layer_norms(num_norms: int, hidden: int, *, has_bias: bool = True) -> dict[str, Any]:
    """The norms of a block and the one after the last block: a weight each, and a bias."""
    each = 2 * hidden if has_bias else hidden
    return {
        "norm": Norm.LAYER,
        "num_norms": num_norms,
        "norm_parameters_per_block": num_norms * each,
        "final_norm_parameters": each,
    }


def _falcon_kv_heads(fields: Fields, num_heads: int) -> int:
    if fields.is_on("new_decoder_architecture"):
        return fields.whole("num_kv_heads", null=num_heads)
    return 1 if fields.is_on("multi_query") else num_heads


def _falcon_norms(fields: Fields) -> int:
    """Norms of a block: two if the halves run in sequence; in parallel the config decides (40B: two by default)."""
    if not fields.is_on("parallel_attn"):
        return 2
    default = 2 if fields.is_on("new_decoder_architecture") else 1
    return 2 if fields.whole("num_ln_in_parallel_attn", null=default) == 2 else 1


_READERS: dict[str, Callable[[Fields], ModelShape]] = {
    "cohere": read_cohere,
    "falcon": read_falcon,
    "gemma": read_gemma,
    "gemma2": read_gemma2,
    "gemma3_text": read_gemma3,
    "glm": read_glm,
    "glm4": read_glm,
    "gpt2": read_gpt2,
    "gpt_bigcode": read_gpt_bigcode,
    "gpt_neox": read_gpt_neox,
    "granite": read_granite,
    "llama": read_llama,
    "mistral": read_mistral,
    "mixtral": read_mixtral,
    "mpt": read_mpt,
    "olmo": read_olmo,
    "olmo2": read_olmo2,
    "olmo3": read_olmo2,
    "opt": read_opt,
    "phi": read_phi,
    "phi3": read_phi3,
    "qwen2": read_qwen2,
    "qwen2_moe": read_qwen2_moe,
    "qwen3": read_qwen3,
    "qwen3_moe": read_qwen3_moe,
    "smollm3": read_smollm3,
    "stablelm": read_stablelm,
    "starcoder2": read_starcoder2,
}
