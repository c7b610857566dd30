"""Adapters merged into the weights of their layers, layer by layer and in fp32, so that a plain model remains.

    W' = W + s B A                                   LoRA; s = alpha / rank, or alpha / sqrt(rank) for rsLoRA
    W' = m (W + s B A) / |W + s B A|_row             DoRA (arXiv:2402.09353); m: the trained length of each row

W is the base's own weight for LoRA. For QLoRA it is the 4-bit weight dequantised: the adapters were trained with that
weight, not with the original one. Layers of a 4-bit base without an adapter are dequantised as well. Experts that a
model holds in one tensor get their adapters by PEFT's own product. The sum is computed in fp32 and rounded once, to the
requested type.
"""

import math
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.trainer.runtime.checkpoint import canonical_name
from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.runtime.models.methods import ADAPTER, is_adapted, quantised_layers


def merge_adapters(model: PreTrainedModel, dtype: torch.dtype, *, plain: PreTrainedModel) -> None:
    """Makes a model with adapters or 4-bit layers the plain one that it is, in `dtype`, in place.

    `plain` is the same model without weights (on `meta`): it shows which layers keep their weights transposed.
    Memory: the model in `dtype` and one layer in fp32.
    """
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    for name in adapted:
        if "base_layer" in name.split("."):
            continue  # merged with what stands around it
        layer: Any = model.get_submodule(name)
        if _wraps_tensor(layer):
            whole = _merged_tensors(layer, dtype)
        else:
            base = layer.base_layer
            whole = _layer(merged_weight(_weight(base), layer), base.bias, plain.get_submodule(name), dtype)
        model.set_submodule(name, whole)
    packed = quantised_layers(model)
    for name, module in list[tuple[str, Any]](model.named_modules()):
        if any(module is layer for layer in packed):
            model.set_submodule(name, _layer(_weight(module), module.bias, plain.get_submodule(name), dtype))
    round_weights(model, dtype)
    model.requires_grad_(requires_grad=True)
    seam: Any = model
    for mark in ("peft_config", "is_loaded_in_4bit"):
        if hasattr(seam, mark):
            delattr(seam, mark)


def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Rounds every parameter to `dtype`, one at a time; not buffers, of which rotary frequencies would be others."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    seam: Any = model.config
    seam.dtype = dtype


def merged_weight(base: Tensor, layer: Any) -> Tensor:  # noqa: ANN401  # PEFT's layer
    """The weight [out, in] in fp32 of a base weight [out, in] with a layer's adapter in it."""
    a, b = (getattr(layer, name)[ADAPTER].weight.detach().float() for name in ("lora_A", "lora_B"))
    merged = torch.addmm(base.float(), b, a, alpha=layer.scaling[ADAPTER])
    magnitudes = getattr(layer, "lora_magnitude_vector", None)
    if magnitudes is not None and ADAPTER in magnitudes:
        lengths = magnitudes[ADAPTER].weight.detach().float()
        merged *= (lengths / torch.linalg.vector_norm(merged, dim=1)).unsqueeze(1)
    return merged


def _wraps_tensor(layer: nn.Module) -> bool:
    """True if an adapter belongs to a tensor of a module that is not a linear layer: experts, a router."""
    return hasattr(layer, "parameter_name")


def _merged_tensors(layer: Any, dtype: torch.dtype) -> nn.Module:  # noqa: ANN401  # PEFT's wrapper, or one around another
    """The module inside of PEFT's wrappers, each adapter added to its tensor [experts, in, out]."""
    while _wraps_tensor(layer):
        for each in (layer.lora_A, layer.lora_B):
            each.float()
        parameter = layer.get_param()
        parameter.data = parameter.data.float()
        parameter.data = (parameter.data + layer.get_delta_weight(ADAPTER)).to(dtype)
        layer = layer.base_layer
    assert isinstance(layer, nn.Module)
    return layer


def _weight(layer: Any) -> Tensor:  # noqa: ANN401  # a linear layer of any kind
    """The weight of a layer as [out, in]; of a 4-bit one decoded to fp32."""
    if isinstance(layer, Conv1D):
        return layer.weight.detach().t()
    state = getattr(layer.weight, "quant_state", None)
    if state is None:
        weight: Tensor = layer.weight.detach()
        return weight
    from bitsandbytes.functional import dequantize_4bit  # takes seconds

    values = layer.weight.data.view(torch.uint8).reshape(-1, 1)[: math.ceil(state.shape.numel() / 2)]
    decoded = copy(state)
    decoded.dtype = torch.float32  # else of the computing type, rounded
    made: Tensor = dequantize_4bit(values, quant_state=decoded)
    return made.reshape(state.shape)


def _layer(weight: Tensor, bias: Tensor | None, plain: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A layer of the plain model's kind with this weight [out, in]."""
    outputs, inputs = weight.shape
    with torch.device("meta"):
        made = Conv1D(outputs, inputs) if isinstance(plain, Conv1D) else nn.Linear(inputs, outputs, bias is not None)
    whole = weight.t() if isinstance(plain, Conv1D) else weight
    made.weight = nn.Parameter(whole.to(dtype).contiguous())
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().to(dtype))
    return made


def gathered_weights(accelerator: Accelerator, model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Weights that a run exports, at least on rank 0: adapters if there are any, else the whole model.

    Collective under a sharding engine, which gathers no more than is returned.
    """
    plain, engine = plain_model(model), running_engine(model)
    trained = [(name, parameter) for name, parameter in plain.named_parameters() if parameter.requires_grad]
    if is_adapted(name for name, _ in trained):
        with torch.no_grad():
            return {canonical_name(name): engine.gathered(parameter) for name, parameter in trained}
    return engine.whole_weights(accelerator, model)
