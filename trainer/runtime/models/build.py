"""The model of a plan: from its config with a seed, or from a folder of weights; and what was installed on it.

A rank builds the whole model in host memory, or, for an engine that shards weights, one without weights that is filled
shard by shard (`sharded_loading`). The weights are the same under every engine, as the seed is set just before
initialization. Nothing pickled is read: weights come from safetensors files. A frozen base is held in the computing
type of the precision, one of qlora in 4 bit from the moment it is read (`quantisation`).

`Installed` is one typed value, made as the model is built and held by the session. Modules keep their own forwards; it
has the objects behind them, from which verification and the report read what is active.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.trainer.runtime.attention import choose_attention_kernels
from shardwise.trainer.runtime.attention.choice import attention_name, check_attention
from shardwise.trainer.runtime.loss import LossForward, install_loss_head
from shardwise.trainer.runtime.memory.activation_offload import ActivationOffload, offload_activations
from shardwise.trainer.runtime.memory.compilation import Compilation, FusedKernels, compile_blocks, fuse_kernels
from shardwise.trainer.runtime.memory.recomputation import (
    Recomputation,
    apply_checkpointing,
    blocks_of,
    recomputation_facts,
)
from shardwise.trainer.runtime.models.configs import config_of
from shardwise.trainer.runtime.models.meta_model import MetaModel, meta_model_from_config, meta_model_from_folder
from shardwise.trainer.runtime.models.methods import apply_method, base_type
from shardwise.trainer.runtime.models.model_code import compute_buffers, load_model_code
from shardwise.trainer.runtime.models.quantisation import (
    Packing,
    as_plain_model,
    initialize_quantised,
    packing_of,
    reading_options,
    refuse_quantised,
)
from shardwise.trainer.runtime.run.extension import Hooks
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.messages.extension import Hook
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
    fused: FusedKernels | None = None
    autocast: torch.dtype | None = None  # around the model's forward, by us
    fp8: Fp8 | None = None

    def activation_facts(self, model: nn.Module) -> dict[str, str]:
        """Text of the recomputation, offload and compilation that have been observed so far."""
        is_compiled = self.compilation is not None
        facts = recomputation_facts(self.recomputations, num_blocks=len(blocks_of(model)), is_compiled=is_compiled)
        facts |= {} if self.offload is None else self.offload.facts()
        facts |= {} if self.compilation is None else self.compilation.facts(model)
        return facts | ({} if self.fused is None else self.fused.facts(model))


def build_model(plan: Plan) -> PreTrainedModel:
    """The model of `build_trainable`, without what was installed on it."""
    return build_trainable(plan)[0]


def build_trainable(plan: Plan, hooks: Hooks | None = None) -> tuple[PreTrainedModel, Installed]:
    """The model of the plan on the CPU, ready for training: loss head, checkpointing and attention as planned.

    With `build_model` among the hooks, that function of the user's makes the base.
    """
    _check_model(plan)
    model = _build_base(plan) if hooks is None or not hooks.has(Hook.BUILD_MODEL) else _users_model(plan, hooks)
    return model, _complete(model, plan)


def build_meta_model(plan: Plan) -> tuple[MetaModel, Installed]:
    """The same model without its weights, and where they come from; InputError if the folder lacks one."""
    _check_model(plan)
    chosen, config = plan.chosen, plan.model_config
    dtype = base_type(chosen.method, chosen.strategy.precision)
    if plan.model_path is not None:
        folder = plan.place_of(plan.model_path)
        folder_config, key_mapping = _read_config(folder, model_type=config["model_type"])
        meta_model = meta_model_from_folder(
            folder,
            folder_config,
            dtype=dtype,
            attention=attention_name(chosen.attention, chosen.flash_kernel),
            key_mapping=key_mapping,
            packing=packing_of(plan) if chosen.method is Method.QLORA else None,
        )
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
    installed = make_trainable(
        model,
        chosen.checkpointing,
        chosen.loss,
        loss_chunk_tokens=chosen.loss_chunk_tokens,
        every_n=chosen.checkpoint_every_n,
        activation_offload=chosen.activation_offload,
        is_loss_pinned=plan.job.pin.loss is not None,
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
    built = AutoModelForCausalLM.from_config(
        config_of(config),
        attn_implementation=attention_name(attention, flash_kernel),
        dtype=torch.float32,
    )
    assert isinstance(built, PreTrainedModel)
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
    is_loss_pinned: bool = True,
) -> Installed:
    """Installs checkpointing and the loss head on a model that was built or loaded, and chooses attention's kernels."""
    choose_attention_kernels()
    model.config.use_cache = False
    recomputations = apply_checkpointing(model, checkpointing, every_n=every_n)
    loss_forward = install_loss_head(model, loss, chunk_tokens=loss_chunk_tokens, is_pinned=is_loss_pinned)
    offload = offload_activations(model, checkpointing) if activation_offload else None
    model.train()
    return Installed(loss=loss_forward, recomputations=recomputations, offload=offload)


def plain_model(model: nn.Module) -> PreTrainedModel:
    """The model inside an engine's wrapper; FSDP2 has none, it changes the model's own class.

    Accelerate's `unwrap_model` would import DeepSpeed to find out, which takes seconds.
    """
    inner = model if isinstance(model, PreTrainedModel) else model.module
    assert isinstance(inner, PreTrainedModel)
    return inner


# The text part of a checkpoint with vision: what its tensors are called, and what the model without vision calls them.
_TEXT_PART = {r"^(model\.)?language_model\.(model\.)?": "model."}


def _build_base(plan: Plan) -> PreTrainedModel:
    """The model before anything is put into it, in the type its method holds it in."""
    chosen, config = plan.chosen, plan.model_config
    dtype = base_type(chosen.method, chosen.strategy.precision)
    packing = packing_of(plan) if chosen.method is Method.QLORA else None
    if plan.model_path is not None:
        attention = attention_name(chosen.attention, chosen.flash_kernel)
        folder = plan.place_of(plan.model_path)
        return _from_weights(folder, model_type=config["model_type"], dtype=dtype, attention=attention, packing=packing)
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


def _from_weights(
    folder: str, *, model_type: str, dtype: torch.dtype, attention: str, packing: Packing | None = None
) -> PreTrainedModel:
    """The weights of a folder; of one with vision, whose type is another than the plan's, the text part.

    With `packing`, linear layers are quantised one by one as they are read.
    """
    config, key_mapping = _read_config(folder, model_type=model_type)
    part = {} if key_mapping is None else {"config": config, "key_mapping": key_mapping}
    options = {} if packing is None else reading_options(packing)
    try:
        result: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **part,
            **options,
        )
    except SafetensorError as error:
        raise InputError(f"{folder}: its safetensors weights are damaged: {error}") from error
    loaded, found = result
    assert isinstance(loaded, PreTrainedModel)
    missing = sorted(found["missing_keys"] - loaded.all_tied_weights_keys.keys())
    if missing:
        raise InputError(
            f"{folder}: its weights lack {len(missing)} tensors of {type(loaded).__name__}, the first {missing[0]}; "
            "they would start as random numbers"
        )
    if packing is not None:
        as_plain_model(loaded)
    compute_buffers(loaded, dtype, with_persistent=False)
    return loaded


def _read_config(folder: str, *, model_type: str) -> tuple[Any, dict[str, str] | None]:
    """transformers' config of the weights in a folder, and what renames those of the text part of one with vision."""
    if not any(Path(folder).glob("*.safetensors")):
        raise InputError(f"{folder}: holds no safetensors weights; pickled weights are not read")
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    refuse_quantised(config, folder)
    return (config, None) if config.model_type == model_type else (config.get_text_config(), _TEXT_PART)
