"""The model of a plan: from its config with a seed, or from a folder of weights.

Every rank builds the whole model in host memory, with the same weights for every engine: the seed is set just before,
and ZeRO-3 does not use `deepspeed.zero.Init`, which would draw other random numbers. Loading only a rank's own share
comes with shardwise 0.5. Nothing pickled is read: weights come from safetensors files.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainer.runtime.activation_memory import apply_checkpointing, compile_blocks, offload_activations
from trainer.runtime.loss import install_loss_head
from trainer.runtime.methods import apply_method
from trainer.runtime.precision import weight_type
from trainer.spec.errors import InputError
from trainer.spec.plan import Plan
from trainer.spec.strategy import Attention, Checkpointing, LossHead

_ATTENTION_NAMES = {
    Attention.SDPA: "sdpa",
    Attention.EAGER: "eager",
    Attention.FLASH: "flash_attention_2",
}


def build_model(plan: Plan) -> PreTrainedModel:
    """The model of the plan on the CPU, ready to be trained: loss head, checkpointing and attention as planned."""
    chosen, shape = plan.chosen, plan.model_shape
    if shape.loss_obstacle is not None:
        raise InputError(f"{shape.model_type} cannot be trained: {shape.loss_obstacle}")
    dtype = weight_type(chosen.strategy.precision)
    if plan.model_path is None:
        torch.manual_seed(plan.job.train.seed)
        model = model_from_config(plan.model_config, dtype=dtype, attention=chosen.attention)
    else:
        model = _from_weights(
            plan.model_path,
            model_type=plan.model_config["model_type"],
            dtype=dtype,
            attention=_ATTENTION_NAMES[chosen.attention],
        )
    apply_method(model, plan)
    make_trainable(
        model,
        chosen.checkpointing,
        chosen.loss,
        loss_chunk_tokens=chosen.loss_chunk_tokens,
        every_n=chosen.checkpoint_every_n,
    )
    if chosen.activation_offload:
        offload_activations(model)
    if chosen.compile:
        compile_blocks(model)
    return model


def model_from_config(config: dict[str, Any], *, dtype: torch.dtype, attention: Attention) -> PreTrainedModel:
    """A model with new weights on torch's default device; on `meta`, one without any."""
    fields = {name: value for name, value in config.items() if name not in ("model_type", "dtype", "torch_dtype")}
    built = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **fields),
        attn_implementation=_ATTENTION_NAMES[attention],
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
) -> None:
    """Puts checkpointing and the loss head into a model that was built or loaded."""
    model.config.use_cache = False
    apply_checkpointing(model, checkpointing, every_n=every_n)
    install_loss_head(model, loss, chunk_tokens=loss_chunk_tokens)
    model.train()


def attention_of(model: PreTrainedModel) -> str:
    """transformers' name of the attention implementation that the model uses."""
    return str(model.config._attn_implementation)


def attention_name(attention: Attention) -> str:
    """transformers' name of an attention implementation."""
    return _ATTENTION_NAMES[attention]


def is_deepspeed(model: nn.Module) -> bool:
    """True for DeepSpeed's engine, without importing DeepSpeed where it is not used."""
    return type(model).__name__ == "DeepSpeedEngine"


def plain_model(model: nn.Module) -> PreTrainedModel:
    """The model inside an engine's wrapper; FSDP2 has none, it changes the model's own class.

    Accelerate's `unwrap_model` would import DeepSpeed to find out, which takes seconds.
    """
    inner = model.module if isinstance(model, DistributedDataParallel) or is_deepspeed(model) else model
    assert isinstance(inner, PreTrainedModel)
    return inner


# The text part of a checkpoint with vision: what its tensors are called, and what the model without vision calls them.
_TEXT_PART = {r"^(model\.)?language_model\.(model\.)?": "model."}


def _from_weights(folder: str, *, model_type: str, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The weights of a folder; of one with vision, whose type is another than the plan's, the text part."""
    if not any(Path(folder).glob("*.safetensors")):
        raise InputError(f"{folder}: holds no safetensors weights; pickled weights are not read")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    is_part = config.model_type != model_type
    part = {"config": config.get_text_config(), "key_mapping": _TEXT_PART} if is_part else {}
    try:
        answer: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **part,
        )
    except SafetensorError as error:
        raise InputError(f"{folder}: its safetensors weights are damaged: {error}") from error
    loaded, found = answer
    assert isinstance(loaded, PreTrainedModel)
    missing = sorted(found["missing_keys"] - loaded.all_tied_weights_keys.keys())
    if missing:
        raise InputError(
            f"{folder}: its weights lack {len(missing)} tensors of {type(loaded).__name__}, the first {missing[0]}; "
            "they would start as random numbers"
        )
    return loaded
