"""The sizes of a model as the formulas use them, summed once for thousands of estimates.

Beside the sizes of its matrices, a model decides how many tensors of a kind one block makes: how many norms there are
and what reads them, whether projections are fused, what the activation function keeps. What transformers' modelling
files do is written down here by model type only where nothing in a config says it.
"""

from functools import lru_cache
from typing import Any

from shardwise.trainer.planning.setting import Setting
from shardwise.trainer.spec.model.shape import Linear, ModelShape, Norm, Positions
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.value import Value


class Dims(Value, frozen=True, kw_only=True):
    """The sizes of a model in elements, summed once for thousands of estimates."""

    vocab: int
    hidden: int
    ffn: int  # of one expert, where there are experts
    layers: int
    heads: int
    kv_heads: int
    query: int
    kv: int
    is_tied: bool
    linear: int  # weights of the linear layers of a block
    block: int
    attention: int  # of those, weights of attention
    block_linears: int  # weights of the linear layers of all blocks
    embedding: int
    head: int  # 0 where tied
    parameters: int
    mask_buffer: int  # bytes of a causal mask that the model itself owns
    root: int  # parameters outside the blocks
    largest_tensor: int
    linears: tuple[tuple[str, int, int], ...]  # name, inputs, outputs
    products: tuple[tuple[str, int], ...]  # name, and outputs of a token: of experts, of those it goes to
    modules: tuple[tuple[str, int, int], ...]  # of those, what an adapter can be put on
    bare_adapter_elements: int  # of a block and a rank of 1: adapters on parameters that are no modules, experts
    bare_adapted_weights: int  # the weights that those change
    matrices: tuple[tuple[int, int, int], ...]  # inputs, outputs, copies; of a block
    # How the block is built:
    norm: Norm
    num_norms: int
    num_norm_inputs: int  # different tensors that norms read
    num_norm_outputs: int  # different tensors that linear layers read from norms
    num_normed_linears: int  # linear layers that read them
    has_fp32_norms: bool  # weights applied in fp32: the normalised input is kept in fp32
    has_qk_norm: bool
    has_rotary: bool
    rotary_dim: int  # elements of a head that are rotated
    is_rotary_joined: bool  # rotated part and rest put together: attention's output is laid out anew for its product
    is_qkv_fused: bool  # one tensor, kept whole by the views of it
    window: int | None  # of `windowed_layers` blocks
    windowed_layers: int
    is_gated: bool
    is_gate_up_fused: bool
    activation: str
    shared_ffn: int  # of the expert that every token passes; 0 where there is none
    experts: int
    experts_per_token: int  # 0 where there are no experts
    broadcasts_heads: bool  # attention is handed fewer key than query heads, which no fused kernel takes
    masks_documents: bool  # told apart in packed rows by a mask of row x row
    caps_scores: bool
    caps_logits: bool
    has_hidden_dropout: bool


@lru_cache(maxsize=64)
def dims_of(shape: ModelShape) -> Dims:
    """The sizes that the formulas use."""
    linears = shape.linears
    num_usual = shape.num_layers - shape.num_dense_layers
    dense = sum(linear.num_copies * linear.num_inputs * linear.num_outputs for linear in shape.dense_linears)
    return Dims(
        vocab=shape.vocab_size,
        hidden=shape.hidden_size,
        ffn=shape.ffn_size,
        layers=shape.num_layers,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        query=shape.query_size,
        kv=shape.kv_size,
        is_tied=shape.is_tied,
        linear=shape.linear_parameters_per_block,
        block=shape.parameters_per_block,
        attention=sum(linear.num_inputs * linear.num_outputs for linear in _attention_linears(shape)),
        block_linears=num_usual * shape.linear_parameters_per_block + shape.num_dense_layers * dense,
        embedding=shape.embedding_parameters,
        head=shape.head_parameters,
        parameters=shape.num_parameters,
        mask_buffer=(shape.max_positions or 0) ** 2 if shape.model_type in _MASK_OWNERS else 0,
        root=shape.num_parameters - shape.block_parameters,
        largest_tensor=max(
            shape.embedding_parameters,
            *(linear.num_copies * linear.num_inputs * linear.num_outputs for linear in linears),
        ),
        linears=tuple((linear.name, linear.num_inputs, linear.num_outputs) for linear in linears),
        products=tuple((linear.name, linear.num_used * linear.num_outputs) for linear in linears),
        modules=tuple(
            (linear.name, linear.num_inputs, linear.num_outputs)
            for linear in linears
            if linear.is_linear_module and linear.adapter_rank_factor
        ),
        **_bare_adapters(shape),
        matrices=tuple((linear.num_inputs, linear.num_outputs, linear.num_copies) for linear in linears),
        **_structure(shape),
    )


_FUSED_QKV = ("qkv_proj", "query_key_value", "Wqkv", "c_attn")
_FUSED_GATE_UP = "gate_up_proj"
_MASK_OWNERS = ("gpt_bigcode",)
MASKED_DOCUMENTS = ("falcon", "mpt")  # as `runtime/attention/packed.py` has it
_JOINED_ROTARY = ("phi3", "gpt_neox", "stablelm", "phi")


def _attention_linears(shape: ModelShape) -> tuple[Linear, ...]:
    """They come first: one fused product or three, and the output."""
    return shape.linears[: 2 if shape.linears[0].name in _FUSED_QKV else 4]


def _bare_adapters(shape: ModelShape) -> dict[str, Any]:
    bare = [linear for linear in shape.linears if not linear.is_linear_module and linear.adapter_rank_factor]
    return {
        "bare_adapter_elements": sum(
            linear.adapter_rank_factor * linear.num_copies * (linear.num_inputs + linear.num_outputs) for linear in bare
        ),
        "bare_adapted_weights": sum(linear.num_copies * linear.num_inputs * linear.num_outputs for linear in bare),
    }


def _structure(shape: ModelShape) -> dict[str, Any]:
    """How many tensors of a kind one block makes."""
    names = [linear.name for linear in shape.linears]
    is_qkv_fused = names[0] in _FUSED_QKV
    has_experts = shape.num_experts > 1
    shared = [linear for linear in shape.linears if linear.name == "gate_proj"] if has_experts else []
    num_mlp_inputs = 1 if _FUSED_GATE_UP in names or not shape.is_gated else 2
    if has_experts:
        num_mlp_inputs = 3 if shared else 0  # gate, up and the gate of the shared expert
    is_gemma = shape.model_type.startswith("gemma")
    num_inputs = shape.num_norms if not shape.is_parallel else 1
    return {
        "norm": shape.norm,
        "num_norms": shape.num_norms,
        "num_norm_inputs": num_inputs,
        "num_norm_outputs": min(2, shape.num_norms),
        "num_normed_linears": (1 if is_qkv_fused else 3) + num_mlp_inputs,
        "has_fp32_norms": is_gemma,
        "has_qk_norm": shape.has_qk_norm,
        "has_rotary": shape.positions is Positions.ROTARY,
        "rotary_dim": (shape.rotary_dim or shape.head_dim) if shape.positions is Positions.ROTARY else 0,
        "is_qkv_fused": is_qkv_fused,
        "is_gated": shape.is_gated,
        "is_gate_up_fused": _FUSED_GATE_UP in names,
        "activation": shape.activation,
        "window": shape.sliding_window,
        "windowed_layers": shape.num_sliding_layers,
        "is_rotary_joined": shape.rotary_dim is not None or shape.model_type in _JOINED_ROTARY,
        "shared_ffn": shared[0].num_outputs if shared else 0,
        "experts": shape.num_experts,
        "experts_per_token": shape.experts_per_token if has_experts else 0,
        "broadcasts_heads": shape.model_type == "falcon" and shape.num_kv_heads == 1 < shape.num_heads,
        "masks_documents": shape.model_type in MASKED_DOCUMENTS,
        "caps_scores": shape.attention_softcap is not None,
        "caps_logits": shape.logit_softcap is not None,
        "has_hidden_dropout": shape.hidden_dropout > 0,
    }


def adapter_parameters(setting: Setting, dims: Dims) -> int:
    """Elements of the adapters of one block, magnitudes of DoRA included; 0 where the method has none."""
    if setting.method not in (Method.LORA, Method.QLORA):
        return 0
    adapted = adapted_linears(setting, dims)
    elements = sum(i + o for _, i, o in adapted) + (dims.bare_adapter_elements if adapts_all(setting) else 0)
    return setting.lora.rank * elements + (sum(o for _, _, o in adapted) if setting.lora.dora else 0)


def adapts_all(setting: Setting) -> bool:
    return setting.lora.targets == ("all-linear",)


def adapted_linears(setting: Setting, dims: Dims) -> tuple[tuple[str, int, int], ...]:
    """The linear layers of a block that carry an adapter."""
    if adapts_all(setting):
        return dims.modules
    return tuple(linear for linear in dims.modules if linear[0] in setting.lora.targets)
