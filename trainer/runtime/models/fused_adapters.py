"""Adapted linear layers as one autograd function each: y = x W^T + s (x A^T) B^T and its gradients, added in place.

PEFT's layer is a chain of operators. It casts its input to the type of the adapter and, under autocast, back, so that
each adapted layer saves a copy of its own; it multiplies the adapter's output by s and adds it to the base's in new
tensors, and autograd adds the gradients of the input in new tensors as well. Here

    forward     the base's product, x A^T, and s times its product with B^T added where the base's product is (`addmm`)
    saved       x as it is, which query, key and value share, and gate and up, and x A^T: [T, rank]
    backward    s g B first, [T, rank]; with it the gradients of A, of B and, added to g W in place, of x. No tensor of
                the size of the output is made. Where layers share x, autograd adds their gradients in place

A 4-bit weight is made whole for g W, as in bitsandbytes' own backward. The layer keeps PEFT's class, parameters and
names: without adapters (`adapters_off`) and in export it runs as before. Products have the types of PEFT's; the results
differ by the rounding of s and of the sum.

Adapters of experts in one tensor stay PEFT's; the report has the number of layers that run fused.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise.trainer.runtime.models.methods import ADAPTER
from shardwise.trainer.runtime.models.targets import is_4bit, is_linear
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError


class FusedLayer:
    """The forward of an adapted layer; counts its runs."""

    def __init__(self, layer: Any) -> None:  # noqa: ANN401  # PEFT's layer
        self._layer = layer
        self.num_runs = 0

    def __call__(self, value: Tensor) -> Tensor:
        """The output [..., outputs] of the layer with its adapter, in the type of the product."""
        layer = self._layer
        if layer.disable_adapters or layer.merged:
            plain: Tensor = type(layer).forward(layer, value)
            return plain
        self.num_runs += 1
        down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        if torch.is_autocast_enabled(value.device.type):
            value = value.to(torch.get_autocast_dtype(value.device.type))
        of_type = (each.to(value.dtype) for each in (value, down, up))
        output = _AdaptedProduct.apply(*of_type, layer.base_layer, layer.scaling[ADAPTER])  # type: ignore[no-untyped-call]
        assert isinstance(output, Tensor)
        return output


def fuse_adapters(model: PreTrainedModel) -> None:
    """Runs the adapted linear layers of a model fused; InputError if one has a dropout or a variant, or if none is."""
    adapted = _adapted(model)
    for layer in adapted:
        if is_linear(layer.base_layer):
            if not isinstance(layer.lora_dropout[ADAPTER], nn.Identity) or layer.lora_variant:
                raise _refused("adapters have a dropout or magnitudes")
            layer.forward = FusedLayer(layer)
    if not fused_layers(model):
        raise _refused(f"no adapter of {type(model).__name__} is on a linear layer")


def fused_layers(model: nn.Module) -> list[FusedLayer]:
    """The forwards that run fused, found in the model itself."""
    forwards = (vars(layer).get("forward") for layer in _adapted(model))
    return [forward for forward in forwards if isinstance(forward, FusedLayer)]


def check_fused_ran(model: nn.Module) -> None:
    """EnvironmentFaultError if, after a step, none of the fused layers has run: something else calls them."""
    layers = fused_layers(model)
    if layers and not any(layer.num_runs for layer in layers):
        raise EnvironmentFaultError(
            f"pin.fused_adapters: {len(layers)} layers were fused, and none has run so in the first step; set "
            "pin.fused_adapters=false"
        )


def fused_adapter_facts(model: nn.Module) -> dict[str, str]:
    """Text of the layers that have run fused; empty if none is."""
    layers = fused_layers(model)
    num_run = sum(layer.num_runs > 0 for layer in layers)
    return {"fused adapters": f"{num_run} of {len(_adapted(model))} layers"} if layers else {}


def _adapted(model: nn.Module) -> list[Any]:
    """PEFT's layers in the model, those of experts too."""
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def _refused(why: str) -> InputError:
    return InputError(f"pin.fused_adapters: {why}; set pin.fused_adapters=false")


class _AdaptedProduct(torch.autograd.Function):
    """The product of x [..., inputs] with a frozen layer and its adapter; A is [rank, inputs], B [outputs, rank]."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, down: Tensor, up: Tensor, base: nn.Module, scale: float) -> Tensor:  # noqa: ANN401  # torch's context
        output: Tensor = base(value)
        inner = _rows(value) @ down.t()
        _rows(output).addmm_(inner, up.t(), alpha=scale)
        ctx.save_for_backward(value, down, up, inner)
        ctx.base, ctx.scale = base, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # torch's context
        value, down, up, inner = ctx.saved_tensors
        gradient = _rows(grad_output)
        of_inner = (gradient @ up).mul_(ctx.scale)
        of_down = of_inner.t() @ _rows(value)
        of_up = (gradient.t() @ inner).mul_(ctx.scale)
        of_value = None
        if ctx.needs_input_grad[0]:
            of_value = grad_output @ _whole_weight(ctx.base).to(grad_output.dtype)
            _rows(of_value).addmm_(of_inner, down)
        return of_value, of_down, of_up, None, None


def _rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix, a row for each token."""
    return tensor.flatten(0, -2)


def _whole_weight(base: Any) -> Tensor:  # noqa: ANN401  # a linear layer of torch, transformers or bitsandbytes
    """The weight [outputs, inputs] of a linear layer; a 4-bit one is made whole."""
    if not is_4bit(base):
        return base.weight.t() if isinstance(base, Conv1D) else base.weight
    from bitsandbytes.functional import dequantize_4bit  # takes a second

    is_simulated = hasattr(base, "dequantize")  # the layer of a dry run
    whole: Tensor = base.dequantize() if is_simulated else dequantize_4bit(base.weight.data, base.weight.quant_state)
    return whole
