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

from trainer.runtime.activation_memory import apply_checkpointing
from trainer.runtime.loss import install_loss_head
from trainer.runtime.precision import weight_type
from trainer.spec.errors import InputError
from trainer.spec.plan import Plan
from trainer.spec.strategy import Attention

_ATTENTION_NAMES = {
    Attention.SDPA: "sdpa",
    Attention.EAGER: "eager",
    Attention.FLASH: "flash_attention_2",
}


def build_model(plan: Plan) -> PreTrainedModel:
    """The model of the plan on the CPU, ready to be trained: loss head, checkpointing and attention as planned."""
    chosen = plan.chosen
    dtype = weight_type(chosen.strategy.precision)
    attention = _ATTENTION_NAMES[chosen.attention]
    model = (
        _from_scratch(plan.model_config, seed=plan.job.train.seed, dtype=dtype, attention=attention)
        if plan.model_path is None
        else _from_weights(plan.model_path, dtype=dtype, attention=attention)
    )
    model.config.use_cache = False
    apply_checkpointing(model, chosen.checkpointing)
    install_loss_head(model, chosen.loss, chunk_tokens=chosen.loss_chunk_tokens)
    model.train()
    return model


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


def _from_scratch(config: dict[str, Any], *, seed: int, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    fields = {name: value for name, value in config.items() if name not in ("model_type", "dtype", "torch_dtype")}
    torch.manual_seed(seed)
    built = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **fields), attn_implementation=attention, dtype=torch.float32
    )
    assert isinstance(built, PreTrainedModel)
    for parameter in built.parameters():
        parameter.data = parameter.data.to(dtype)  # parameters only: in 16 bit, the rotary frequencies would be others
    return built


def _from_weights(folder: str, *, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    if not any(Path(folder).glob("*.safetensors")):
        raise InputError(f"{folder}: holds no safetensors weights; pickled weights are not read")
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention, use_safetensors=True, local_files_only=True
        )
    except SafetensorError as error:
        raise InputError(f"{folder}: its safetensors weights are damaged: {error}") from error
    assert isinstance(loaded, PreTrainedModel)
    return loaded
