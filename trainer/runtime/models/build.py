"""The model of a plan: from its config with a seed, or from a folder of weights; and what was installed on it.

A rank builds the whole model in host memory, or, for an engine that shards weights, one without weights that is filled
shard by shard (`sharded_loading`). The weights are the same under every engine, as the seed is set just before
initialization. Nothing pickled is read: weights come from safetensors files. A frozen base is held in the computing
type of the precision, one of qlora in 4 bit from the moment it is read (`quantisation`).

`Installed` is one typed value, made as the model is built and held by the session. Modules keep their own forwards; it
has the objects behind them, from which verification and the report read what is active.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from shardwise.trainer.runtime.attention import choose_attention_kernels
from shardwise.trainer.runtime.attention.choice import attention_name, check_attention
from shardwise.trainer.runtime.loss import DEFAULT_CHUNK_TOKENS, LossForward, install_loss_head
from shardwise.trainer.runtime.memory.activation_offload import ActivationOffload, offload_activations
from shardwise.trainer.runtime.memory.compilation import Compilation, FusedKernels, compile_blocks, fuse_kernels
from shardwise.trainer.runtime.memory.compiled_head import CompiledSlices
from shardwise.trainer.runtime.memory.host_embedding import embedding_facts, keep_embedding_on_host
from shardwise.trainer.runtime.memory.recomputation import (
    Recomputation,
    apply_checkpointing,
    blocks_of,
    recomputation_facts,
)
from shardwise.trainer.runtime.models.configs import config_of
from shardwise.trainer.runtime.models.fused_adapters import fuse_adapters, fused_adapter_facts
from shardwise.trainer.runtime.models.meta_model import (
    MetaModel,
    StoredModel,
    causal_model,
    fill,
    meta_model_from_config,
    meta_model_from_folder,
)
from shardwise.trainer.runtime.models.methods import apply_method, base_type
from shardwise.trainer.runtime.models.model_code import load_model_code
from shardwise.trainer.runtime.models.quantisation import initialize_quantised, packing_of
from shardwise.trainer.runtime.run.extension import Hooks
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.model.stored import format_settings, refuse_format, weight_format
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Attention, Checkpointing, Fp8Recipe, LossHead, Method


class Fp8(NamedTuple):
    """The layers that multiply in FP8."""

    recipe: Fp8Recipe
    package: str
    recipe_class: str  # of the library
    layers: dict[str, nn.Module]
    skipped: str  # the layers that stay in 16 bit, by reason

    @property
    def num_products(self) -> int:
        """Forward products in FP8 so far, recomputations included."""
        return sum(int(getattr(layer, "num_products", 0)) for layer in self.layers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Everything that was put into a model in addition to its weights; None for what was not."""

    loss: LossForward
    recomputations: tuple[Recomputation, ...] = ()  # one for each block that recomputes something
    offload: ActivationOffload | None = None
    compilation: Compilation | None = None
    head: CompiledSlices | None = None
    fused: FusedKernels | None = None
    autocast: torch.dtype | None = None  # around the model's forward, by us
    fp8: Fp8 | None = None

    def activation_facts(self, model: nn.Module) -> dict[str, str]:
        """Text of the recomputation, offload and compilation that have been observed so far."""
        is_compiled = self.compilation is not None
        facts = recomputation_facts(self.recomputations, num_blocks=len(blocks_of(model)), is_compiled=is_compiled)
        facts |= {} if self.offload is None else self.offload.facts()
        facts |= embedding_facts(plain_model(model)) | fused_adapter_facts(model)
        in_head = 0 if self.head is None else self.head.num_graphs
        facts |= {} if self.compilation is None else self.compilation.facts(model, in_head=in_head)
        facts |= {} if self.head is None else self.head.facts()
        return facts | ({} if self.fused is None else self.fused.facts(model))


CPU = torch.device("cpu")


def build_model(plan: Plan) -> PreTrainedModel:
    """The model of `build_trainable`, without what was installed on it."""
    return build_trainable(plan)[0]


def build_trainable(plan: Plan, hooks: Hooks | None = None) -> tuple[PreTrainedModel, Installed]:
    """The model of the plan on the CPU, ready for training: loss head, checkpointing and attention as planned.

    With `build_model` among the hooks, that function of the user's makes the base.
    """
    _check_model(plan)
    model = build_base(plan) if hooks is None or not hooks.has(Hook.BUILD_MODEL) else _users_model(plan, hooks)
    return model, _complete(model, plan)


def build_meta_model(plan: Plan) -> tuple[MetaModel, Installed]:
    """The same model without its weights, and where they come from; InputError if the folder lacks one."""
    _check_model(plan)
    chosen, config = plan.chosen, plan.model_config
    dtype = base_type(chosen.method, chosen.strategy.precision)
    if plan.model_path is not None:
        meta_model = _meta_model_from_folder(plan, plan.model_path)
    else:
        build = partial(model_from_config, config, attention=chosen.attention, flash_kernel=chosen.flash_kernel)
        meta_model = meta_model_from_config(partial(build, dtype=torch.float32), dtype=dtype, seed=plan.job.train.seed)
    return meta_model, _complete(meta_model.model, plan)


def _check_model(plan: Plan) -> None:
    chosen, shape = plan.chosen, plan.model_shape
    load_model_code(plan.model_code)
    if shape.loss_obstacle is not None:
        raise InputError(f"{shape.model_type} cannot be trained: {shape.loss_obstacle}")
    check_attention(chosen.attention, shape, chosen.flash_kernel)


def _complete(model: PreTrainedModel, plan: Plan) -> Installed:
    """Installs everything that a plan has in addition to the model itself."""
    chosen = plan.chosen
    apply_method(model, plan)
    if chosen.fused_adapters:
        fuse_adapters(model)
    installed = make_trainable(
        model,
        chosen.checkpointing,
        chosen.loss,
        loss_chunk_tokens=chosen.loss_chunk_tokens,
        every_n=chosen.checkpoint_every_n,
        activation_offload=chosen.activation_offload,
        embedding_on_host=chosen.embedding_on_host,
        is_loss_pinned=plan.job.pin.loss is not None,
        compiled_head=chosen.compiled_head,
    )
    if chosen.fused_kernels:
        installed = replace(installed, fused=fuse_kernels(model, is_pinned=bool(plan.job.pin.fused_kernels)))
    if not chosen.compile:
        return installed
    is_pinned = bool(plan.job.pin.compile)
    return replace(installed, compilation=compile_blocks(model, installed.offload, is_pinned=is_pinned))


def model_from_config(
    config: dict[str, Any], *, dtype: torch.dtype, attention: Attention, flash_kernel: str | None = None
) -> PreTrainedModel:
    """A model with new weights on torch's default device; on `meta`, one without any."""
    name = attention_name(attention, flash_kernel)
    built = causal_model(config_of(config), attn_implementation=name, dtype=torch.float32)
    for parameter in built.parameters():
        parameter.data = parameter.data.to(dtype)  # parameters only: in 16 bit, the rotary frequencies would be others
    return built


def make_trainable(
    model: PreTrainedModel,
    checkpointing: Checkpointing,
    loss: LossHead,
    *,
    loss_chunk_tokens: int | None,
    every_n: int | None = None,
    activation_offload: bool = False,
    embedding_on_host: bool = False,
    is_loss_pinned: bool = True,
    compiled_head: bool = False,
) -> Installed:
    """Installs checkpointing and the loss head on a model that was built or loaded, and chooses attention's kernels."""
    if compiled_head and loss is not LossHead.CHUNKED:
        raise InputError(f"pin.compiled_head: loss: {loss} has no slices; set pin.compiled_head=false")
    choose_attention_kernels()
    if embedding_on_host:
        keep_embedding_on_host(model)
    model.config.use_cache = False
    recomputations = apply_checkpointing(model, checkpointing, every_n=every_n)
    head = CompiledSlices(loss_chunk_tokens or DEFAULT_CHUNK_TOKENS) if compiled_head else None
    loss_forward = install_loss_head(model, loss, chunk_tokens=loss_chunk_tokens, is_pinned=is_loss_pinned, body=head)
    offload = offload_activations(model, checkpointing) if activation_offload else None
    model.train()
    return Installed(loss=loss_forward, recomputations=recomputations, offload=offload, head=head)


def plain_model(model: nn.Module) -> PreTrainedModel:
    """The model inside an engine's wrapper; FSDP2 has none, it changes the model's own class.

    Accelerate's `unwrap_model` would import DeepSpeed to find out, which takes seconds.
    """
    inner = model if isinstance(model, PreTrainedModel) else model.module
    assert isinstance(inner, PreTrainedModel)
    return inner


def build_base(plan: Plan) -> PreTrainedModel:
    """The model before anything is put into it, in the type its method holds it in."""
    chosen, config = plan.chosen, plan.model_config
    dtype = base_type(chosen.method, chosen.strategy.precision)
    packing = packing_of(plan) if chosen.method is Method.QLORA else None
    if plan.model_path is not None:
        return fill(_meta_model_from_folder(plan, plan.model_path), CPU if packing is None else packing.lives_on)
    torch.manual_seed(plan.job.train.seed)
    build = partial(model_from_config, config, attention=chosen.attention, flash_kernel=chosen.flash_kernel)
    return build(dtype=dtype) if packing is None else initialize_quantised(lambda: build(dtype=torch.float32), packing)


def _users_model(plan: Plan, hooks: Hooks) -> PreTrainedModel:
    """Result of `build_model(config, dtype)` of the extensions file; InputError for anything but a causal LM."""
    config, dtype = plan.model_config, base_type(plan.chosen.method, plan.chosen.strategy.precision)
    torch.manual_seed(plan.job.train.seed)
    model = hooks.call(Hook.BUILD_MODEL, config_of(config), dtype)
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise InputError(
            f"extensions: build_model returned {type(model).__name__}; expected a causal language model of transformers"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _meta_model_from_folder(plan: Plan, model_path: str) -> MetaModel:
    chosen = plan.chosen
    return meta_model_from_folder(
        stored_model(plan.place_of(model_path), plan.model_config, method=chosen.method),
        dtype=base_type(chosen.method, chosen.strategy.precision),
        attention=attention_name(chosen.attention, chosen.flash_kernel),
        packing=packing_of(plan) if chosen.method is Method.QLORA else None,
    )


def stored_model(folder: str, model_config: Mapping[str, Any], *, method: Method | None) -> StoredModel:
    """The model of a config that is in a folder, as a whole or as the text part of another.

    InputError if the folder has no weights that are read, or none that a method can start from.
    """
    if not any(Path(folder).glob("*.safetensors")):
        raise InputError(f"{folder}: holds no safetensors weights; pickled weights are not read")
    path = Path(folder, "config.json")
    raw: dict[str, Any] = json.loads(path.read_bytes())
    weights = weight_format(raw)
    refuse_format(weights, origin=str(path), method=method, source=None)
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    settings, outer = format_settings(raw), None
    if config.model_type != model_config["model_type"]:
        outer, config = config, config_of(model_config)
        if hasattr(outer, "tie_word_embeddings"):
            config.tie_word_embeddings = outer.tie_word_embeddings
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return StoredModel(folder=folder, config=config, outer=outer, settings=settings, weights=weights)
