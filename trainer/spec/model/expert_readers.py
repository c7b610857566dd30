"""Shapes of mixture-of-experts models: a router sends each token to a few of many gated MLPs.

transformers keeps the experts of a block in two tensors of three dimensions, and the router as a bare weight: none of
them is a linear module. Asked for adapters on "all-linear", peft 0.21 adapts them all the same in Mixtral and
Qwen3-MoE, gate and up with twice the rank since they are two layers in one, and then passes by the MLPs of blocks
without experts, whose names it takes for those of experts; in Qwen2-MoE it adapts linear modules only. Tests count its
adapters. The auxiliary loss that balances the experts is not added by this project's loss head.
"""

from msgspec.structs import replace

from trainer.spec.model.architecture import Linear, ModelShape
from trainer.spec.model.config_fields import Fields
from trainer.spec.model.llama_readers import (
    attention,
    gated_mlp,
    gated_shape,
    with_qk_norm,
    with_window,
    with_window_everywhere,
)


def read_mixtral(fields: Fields) -> ModelShape:
    shape = gated_shape(fields, "MixtralDecoderLayer")
    experts = _experts(fields, count="num_local_experts", size="intermediate_size", has_adapters=True)
    return with_window_everywhere(_with_experts(shape, (*attention(fields), *experts)), fields)


def read_qwen2_moe(fields: Fields) -> ModelShape:
    """Every token passes a shared expert as well, weighted by a gate of its own."""
    projections = attention(fields, qkv_bias=fields.says("qkv_bias"), output_bias=False)
    gate = Linear(name="shared_expert_gate", num_inputs=fields.whole("hidden_size"), num_outputs=1)
    shared = (*gated_mlp(fields, size="shared_expert_intermediate_size"), gate)
    experts = _experts(fields, count="num_experts", size="moe_intermediate_size", has_adapters=False)
    shape = _with_experts(
        gated_shape(fields, "Qwen2MoeDecoderLayer"),
        (*projections, *shared, *experts),
        num_dense=_num_dense_layers(fields),
        dense=(*projections, *gated_mlp(fields)),
    )
    if not fields.says("use_sliding_window"):
        return shape
    num_first = min(shape.num_layers, fields.whole("max_window_layers", least=0))
    return with_window(shape, fields, num_layers=(num_first + 1) // 2)


def read_qwen3_moe(fields: Fields) -> ModelShape:
    bias = fields.says("attention_bias")
    projections = attention(fields, qkv_bias=bias, output_bias=bias)
    experts = _experts(fields, count="num_experts", size="moe_intermediate_size", has_adapters=True)
    mlp = (replace(linear, adapter_rank_factor=0) for linear in gated_mlp(fields))
    shape = _with_experts(
        with_qk_norm(gated_shape(fields, "Qwen3MoeDecoderLayer")),
        (*projections, *experts),
        num_dense=_num_dense_layers(fields),
        dense=(*projections, *mlp),
    )
    return with_window_everywhere(shape, fields) if fields.says("use_sliding_window") else shape


def _experts(fields: Fields, *, count: str, size: str, has_adapters: bool) -> tuple[Linear, ...]:
    """The router and the experts it chooses from."""
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
    """The shape with experts in the blocks that have them; an ordinary one where none has."""
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
