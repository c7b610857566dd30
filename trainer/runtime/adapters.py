"""Low-rank adapters (LoRA, arXiv:2106.09685) on the linear layers of a model, by PEFT.

The base is frozen, in the computing type of the precision; the adapters are trained in fp32, or in the precision's
own type where that has no fp32 copy (bf16). PEFT's layers are put into the model in place: it stays the
transformers model that it was, so the loss head, the engines and checkpoints find it unchanged.
"""

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import PreTrainedModel

from trainer.runtime.precision import compute_type, weight_type
from trainer.spec.errors import InputError
from trainer.spec.job import LoraJob
from trainer.spec.strategy import Method, Precision

ALL_LINEAR = "all-linear"


def base_type(method: Method, precision: Precision) -> torch.dtype:
    """The type in which a method holds the weights of the model itself."""
    return compute_type(precision) if method.freezes_base else weight_type(precision)


def add_adapters(model: PreTrainedModel, lora: LoraJob, precision: Precision) -> None:
    """Freezes the model and puts trainable adapters beside the linear layers that `lora` names."""
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets),
        use_dora=lora.dora,
        use_rslora=lora.rslora,
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:  # PEFT found no module of that name
        raise InputError(f"lora.targets: {', '.join(lora.targets)}: {str(error).splitlines()[0]}") from error
    for parameter in trained_parameters(model):
        parameter.data = parameter.data.to(weight_type(precision))


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that the optimizer updates."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
