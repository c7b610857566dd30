"""The shape of a model without a reader, derived from the model that transformers builds on `meta`.

Exact are the sums: all parameters, those of each block, the linear layers with their sizes, the tables of embeddings.
What the modules do not show is read from the config under its usual names (heads, windows, dropout), and what neither
shows (whether the halves of a block run side by side) stays at its default: the dry run, which runs the model, is what
counts its memory. Blocks of more than two kinds are counted as the two most common ones, and the difference is in
`other_parameters`.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from msgspec.structs import asdict, replace
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.trainer.runtime.attention.packed import FLASH
from shardwise.trainer.runtime.models.build import make_trainable
from shardwise.trainer.runtime.models.methods import rank_factors
from shardwise.trainer.runtime.models.router_loss import router_loss_problem
from shardwise.trainer.runtime.models.targets import component_of, experts_in, read_past_forward, routers_of
from shardwise.trainer.simulation.build import base_on_meta, blocks_of
from shardwise.trainer.simulation.documents import measure_rows
from shardwise.trainer.simulation.forked import in_fork
from shardwise.trainer.simulation.trace import traced_blocks
from shardwise.trainer.spec.errors import InputError, close_matches
from shardwise.trainer.spec.messages.worker_requests import TraceRequest
from shardwise.trainer.spec.model.blocks import Mode
from shardwise.trainer.spec.model.config_values import EXPERTS_PER_TOKEN, NUM_EXPERTS
from shardwise.trainer.spec.model.shape import DescriptionRequest, Linear, ModelShape, Norm, Positions
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead
from shardwise.trainer.spec.value import Value

Linears = tuple[Linear, ...]
_HIDDEN_DROPOUT = ("hidden_dropout", "resid_pdrop", "residual_dropout", "dropout")
_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")
_MAX_POSITIONS = ("max_position_embeddings", "max_seq_len")
_QK_NORMS = ("q_", "k_", "query_", "key_")


def describe(request: DescriptionRequest) -> ModelShape:
    """The shape of a model; InputError where transformers cannot build it, or code of its own would have to."""
    model = _built(request)
    shape = _shape_of(model)
    return replace(shape, other_parameters=_size(model) - shape.num_parameters, **asdict(_obstacles(model)))


def describe_traced(request: TraceRequest, *, may_fork: bool = False) -> ModelShape:
    """The shape of a model with the traces of its blocks; without them if it is not trained or not followed.

    `may_fork` as of `in_fork`.
    """
    if not request.modes:
        return describe(request.description)
    model = _built(request.description)
    waiting = in_fork(partial(_obstacles, model), _Obstacles, may_fork=may_fork)
    shape, config, reach = _shape_of(model), _Config(model.config.get_text_config()), _Reach(model)
    shape = replace(shape, other_parameters=_size(model) - shape.num_parameters)
    obstacles = waiting()
    shape = replace(shape, **asdict(obstacles))
    if obstacles.loss_obstacle is not None:
        return shape
    request = replace(
        request,
        modes=tuple(dict.fromkeys(_offered(mode, shape) for mode in request.modes)),
        is_packed=request.is_packed and obstacles.packing_obstacle is None,
    )
    try:
        traced = traced_blocks(model, request, lambda block: linears_of(block, config, reach), may_fork=may_fork)
    except InputError:
        return shape
    return replace(shape, traced=traced)


def _offered(mode: Mode, shape: ModelShape) -> Mode:
    """The mode with attention that the model has."""
    return mode if mode.attention in shape.attentions else replace(mode, attention=Attention.EAGER)


class _Obstacles(Value, frozen=True, kw_only=True):
    """Fields of a model's shape: the reasons for which our loss heads or packed rows cannot be used."""

    loss_obstacle: str | None
    loss_heads: tuple[LossHead, ...]
    logit_softcap: float | None
    packing_obstacle: str | None
    is_packing_measured: bool


def _obstacles(model: PreTrainedModel) -> _Obstacles:
    copied = copy.deepcopy(model)
    installed = make_trainable(copied, Checkpointing.NONE, LossHead.EAGER, loss_chunk_tokens=None)
    rows, rule = measure_rows(model), installed.loss.rule
    return _Obstacles(
        loss_obstacle=rows.loss_fault or (None if rows.is_measured or rule is not None else _NOT_COMPARED),
        loss_heads=(LossHead.EAGER,) if rule is None else tuple(LossHead),
        logit_softcap=None if rule is None else rule.softcap,
        packing_obstacle=rows.packing_obstacle,
        is_packing_measured=rows.is_measured,
    )


_NOT_COMPARED = "its logits are no product of its head, and no small copy of it runs whose loss could be compared"


def _built(request: DescriptionRequest) -> PreTrainedModel:
    """The model on `meta`, in fp32."""
    config, code = request.model_config, request.model_code
    model_type = str(config.get("model_type"))
    if code is None and request.offers_code_of is not None and model_type not in CONFIG_MAPPING:
        raise InputError(
            f"{request.origin}: transformers {transformers.__version__} does not know {model_type}, which brings code "
            f"of its own; model.trust_remote_code={request.offers_code_of} runs the code of that repository on this "
            "machine"
        )
    if code is None and model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"{request.origin}: transformers has no causal language model of type {model_type}")
    if code is None and model_type not in CONFIG_MAPPING:
        meant = close_matches(model_type, CONFIG_MAPPING)
        hint = f"; did you mean {meant[0]}?" if meant else ""
        raise InputError(
            f"{request.origin}: transformers {transformers.__version__} does not know model_type {model_type}{hint}"
        )
    model = base_on_meta(config, code, dtype=torch.float32, attention=Attention.EAGER, origin=request.origin)
    if code is not None and model.config.model_type != model_type:
        raise InputError(
            f"{request.origin}: model_type is {model_type}, and {code.config_class} has {model.config.model_type}; "
            "write the same into both"
        )
    return model


def _shape_of(model: PreTrainedModel) -> ModelShape:
    blocks, config, reach = blocks_of(model), _Config(model.config.get_text_config()), _Reach(model)
    linears = [linears_of(block, config, reach) for block in blocks]
    usual, others = _kinds(linears)
    block = blocks[linears.index(usual)]
    inputs, head = model.get_input_embeddings(), model.get_output_embeddings()
    hidden = config.whole("hidden_size", default=head.in_features)
    heads = config.whole("num_attention_heads", default=1)
    kv_heads = config.whole("num_key_value_heads", "num_kv_heads", default=heads)
    head_dim = config.whole("head_dim", "v_head_dim", default=max(1, hidden // heads))
    window = config.whole("sliding_window", default=0)
    experts = next((linear.num_copies for linear in usual if _is_expert(linear)), 1)
    down = _down_projection(usual, hidden)
    norms, root_norms = _norms(block), _norms_outside(model, block)
    return ModelShape(
        model_type=str(model.config.model_type),
        block_class=type(block).__name__,
        vocab_size=head.out_features,
        hidden_size=hidden,
        ffn_size=down.num_inputs,
        num_layers=len(blocks),
        num_heads=heads,
        num_kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_dim=head_dim,
        max_positions=config.whole(*_MAX_POSITIONS, default=0) or None,
        is_tied=inputs.weight is head.weight,
        linears=usual,
        num_dense_layers=len(others),
        dense_linears=Counter(others).most_common(1)[0][0] if others else (),
        norm=Norm.LAYER if any(_is_layer_norm(norm) for _, norm in norms) else Norm.RMS,
        norm_parameters_per_block=_size(block) - sum(linear.num_parameters for linear in usual),
        is_gated=_is_gated(usual, down),
        sliding_window=window or None,
        num_sliding_layers=_num_sliding_layers(config, len(blocks)) if window else 0,
        **_positions(model, config, inputs, head_dim),
        final_norm_parameters=_size(root_norms[-1]) if root_norms else 0,
        head_bias_parameters=0 if head.bias is None else head.bias.numel(),
        num_norms=sum(not _is_qk_norm(name) for name, _ in norms),
        has_qk_norm=any(_is_qk_norm(name) for name, _ in norms),
        is_parallel=config.is_true("use_parallel_residual") or config.is_true("parallel_attn"),
        activation=str(config.first(_ACTIVATIONS) or "silu"),
        num_experts=experts,
        experts_per_token=config.whole(*EXPERTS_PER_TOKEN, default=1) if experts > 1 else 1,
        hidden_dropout=float(config.first(_HIDDEN_DROPOUT) or 0.0),
        attention_dropout=float(config.first(_ATTENTION_DROPOUT) or 0.0),
        attention_softcap=config.first(("attn_logit_softcapping",)),
        attentions=_attentions(model, config),
        has_router_loss=experts > 1 and router_loss_problem(model) is None,
        is_described=True,
    )


class _Config:
    """A config whose fields may be missing, or be lists with a value for each block."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401  # of transformers, one class for each model
        self._config = config

    def first(self, names: Sequence[str]) -> Any:  # noqa: ANN401  # any value of JSON
        """The first of these fields that is there and not null."""
        return next((value for name in names if (value := self._field(name)) is not None), None)

    def whole(self, *names: str, default: int) -> int:
        """A whole number; the largest where there is one for each block."""
        value = self.first(names)
        if isinstance(value, list | tuple):
            value = max((item for item in value if isinstance(item, int)), default=None)
        return value if isinstance(value, int) and value > 0 else default

    def is_true(self, name: str) -> bool:
        return self._field(name) is True

    def _field(self, name: str) -> Any:  # noqa: ANN401  # any value
        try:
            return getattr(self._config, name, None)
        except RuntimeError:  # its blocks have values of their own, and the config then refuses to name one
            return None


class _Reach:
    """What adapters and 4-bit storage reach in a model, by module."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._paths = {module: path for path, module in model.named_modules()}
        self._factors, self._past = rank_factors(model), read_past_forward(model)

    def factor(self, module: nn.Module, parameter: str = "") -> int:
        """How many times the rank the adapter on a layer has, or on a tensor of a module; 0 where there is none."""
        path = self._paths[module]
        return self._factors.get(f"{path}.{parameter}" if parameter else path, 0)

    def is_past(self, module: nn.Module) -> bool:
        """True if the weight of a layer is read past its forward."""
        return self._paths[module] in self._past


def linears_of(block: nn.Module, config: _Config, reach: _Reach) -> Linears:
    """The linear layers of a block, experts of a kind counted together, in the order in which modules are made."""
    found: Counter[Linear] = Counter()
    routers, experts = routers_of(block), {each.path for each in experts_in(block)}
    for path, module in block.named_modules():
        component = component_of(path, block, routers=routers, experts=experts)
        if isinstance(module, nn.Linear | Conv1D):
            linear = _linear_module(path, module, factor=reach.factor(module), is_module=not reach.is_past(module))
            found[replace(linear, component=component)] += 1
        else:
            found.update(replace(each, component=component) for each in _bare_linears(path, module, config, reach))
    if not found:
        raise InputError(f"{type(block).__name__} has no linear layers; its shape cannot be described")
    used = config.whole(*EXPERTS_PER_TOKEN, default=1)
    return tuple(linear for one, times in found.items() for linear in _counted(one, times, used))


def _counted(linear: Linear, times: int, used: int) -> Iterator[Linear]:
    """Experts that are modules of their own become one layer of many copies; other layers stay apart."""
    if times == 1 or not _is_expert(linear):
        yield from [linear] * times
        return
    yield replace(linear, num_copies=times, num_used=min(used, times))


def _linear_module(path: str, module: nn.Linear | Conv1D, *, factor: int, is_module: bool) -> Linear:
    parent, _, name = path.rpartition(".")
    is_expert = "experts" in parent.split(".")
    inputs, outputs = (
        (module.nx, module.nf) if isinstance(module, Conv1D) else (module.in_features, module.out_features)
    )
    return Linear(
        name=f"experts.{name}" if is_expert else name,
        num_inputs=inputs,
        num_outputs=outputs,
        has_bias=module.bias is not None,
        is_linear_module=is_module,
        adapter_rank_factor=factor,
    )


def _bare_linears(path: str, module: nn.Module, config: _Config, reach: _Reach) -> Iterator[Linear]:
    """Matrices that are parameters rather than modules: experts in three dimensions, and routers."""
    if isinstance(module, nn.Embedding) or "Conv" in type(module).__name__:
        return
    experts, hidden = config.whole(*NUM_EXPERTS, default=0), config.whole("hidden_size", default=0)
    used = config.whole(*EXPERTS_PER_TOKEN, default=1)
    place = path.rpartition(".")[2]
    for name, weight in module.named_parameters(recurse=False):
        if weight.ndim == 3 and weight.shape[0] > 1:
            outputs, inputs = weight.shape[1:]
            if getattr(module, "is_transposed", False):
                inputs, outputs = outputs, inputs
            copies, factor = weight.shape[0], reach.factor(module, name)
            yield _bare(f"{place}.{name}", inputs, outputs, copies=copies, used=min(used, copies), factor=factor)
        elif weight.ndim == 2 and tuple(weight.shape) == (experts, hidden):
            yield _bare(place if name == "weight" else f"{place}.{name}", hidden, experts, copies=1, used=1)


def _bare(name: str, inputs: int, outputs: int, *, copies: int, used: int, factor: int = 0) -> Linear:
    return Linear(
        name=name,
        num_inputs=inputs,
        num_outputs=outputs,
        num_copies=copies,
        num_used=used,
        is_linear_module=False,
        adapter_rank_factor=factor,
    )


def _is_expert(linear: Linear) -> bool:
    return linear.num_copies > 1 or linear.name.startswith("experts.")


def _kinds(kinds: Sequence[Linears]) -> tuple[Linears, list[Linears]]:
    """The usual kind of block, one with experts where there is one, and the others."""
    with_experts = [kind for kind in kinds if any(_is_expert(linear) for linear in kind)]
    usual = Counter(with_experts or kinds).most_common(1)[0][0]
    return usual, [kind for kind in kinds if kind != usual]


def _down_projection(linears: Linears, hidden: int) -> Linear:
    """The last layer that leads back to the hidden size, an expert's where there are experts."""
    leading = [linear for linear in linears if linear.num_outputs == hidden] or list(linears)
    return next((linear for linear in reversed(leading) if _is_expert(linear)), leading[-1])


def _is_gated(linears: Linears, down: Linear) -> bool:
    widths = [linear.num_outputs for linear in linears if linear is not down and _is_expert(linear) == _is_expert(down)]
    return widths.count(down.num_inputs) >= 2 or 2 * down.num_inputs in widths  # gate and up


def _size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def _norms(block: nn.Module) -> list[tuple[str, nn.Module]]:
    """The norms of a block by the last part of their names."""
    return [
        (path.rpartition(".")[2], module) for path, module in block.named_modules() if "Norm" in type(module).__name__
    ]


def _norms_outside(model: nn.Module, block: nn.Module) -> list[nn.Module]:
    inside = {id(part) for each in model.modules() if type(each) is type(block) for part in each.modules()}
    return [part for part in model.modules() if "Norm" in type(part).__name__ and id(part) not in inside]


def _is_layer_norm(norm: nn.Module) -> bool:
    """True for a norm that is one kernel; one without parameters is (OLMo)."""
    return isinstance(norm, nn.LayerNorm) or not list(norm.parameters())


def _is_qk_norm(name: str) -> bool:
    return name.startswith(_QK_NORMS)


def _positions(model: PreTrainedModel, config: _Config, inputs: nn.Module, head_dim: int) -> Mapping[str, Any]:
    """A learned table where a second one is as long as the context, rotation where there are angles, else a bias."""
    length = config.whole(*_MAX_POSITIONS, default=0)
    tables = [
        table.weight
        for table in model.modules()
        if isinstance(table, nn.Embedding) and table is not inputs and 0 < length <= table.num_embeddings <= length + 8
    ]
    if tables:
        return {"positions": Positions.LEARNED, "position_parameters": sum(table.numel() for table in tables)}
    angles = [2 * buffer.numel() for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    is_rotary = bool(angles) or config.first(("rotary_dim",)) is not None
    if config.is_true("alibi") or not is_rotary:
        return {"positions": Positions.ALIBI}
    rotated = config.whole("rotary_dim", default=angles[0] if angles else head_dim)
    return {"positions": Positions.ROTARY, "rotary_dim": None if rotated == head_dim else rotated}


def _num_sliding_layers(config: _Config, num_layers: int) -> int:
    types = config.first(("layer_types",))
    if isinstance(types, list):
        return types.count("sliding_attention")
    return 0 if config.first(("use_sliding_window",)) is False else num_layers


def _attentions(model: Any, config: _Config) -> tuple[Attention, ...]:  # noqa: ANN401  # transformers' switches
    found = []
    # Where the class lists others, transformers uses one of those for it, from the hub.
    supports_flash = FLASH in (model._compatible_flash_implementations or (FLASH,))
    if model._supports_flash_attn and supports_flash and not config.is_true("alibi"):
        found.append(Attention.FLASH)
    if model._supports_sdpa:
        found.append(Attention.SDPA)
    return (*found, Attention.EAGER)
