"""Linear layers in NF4 on a device that is not there.

They are as those of bitsandbytes, without its kernels. Each weight is two to a byte, with one scale for 64
weights; double quantisation keeps the scales in 8 bit, with one scale for 256 of them (QLoRA, arXiv:2305.14314).
Forward and backward both make the weight whole in the computing type for one matrix product, and the scales in fp32 on
the way (bitsandbytes 0.50, functional.py `dequantize_4bit`, _functions.py `MatMul4Bit`; its fused kernel for a few
hundred tokens is not modelled). The layer is a `Linear4bit` to PEFT, so that the adapter layer is the real one.
Embeddings, head and norms stay in the computing type.
"""

from typing import Any

import bitsandbytes
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from shardwise.trainer.runtime.models.quantisation import is_quantisable
from shardwise.trainer.spec.strategy import Quant

WEIGHTS_PER_SCALE = 64
SCALES_PER_SCALE = 256
_NUM_LEVELS, _NUM_SCALE_LEVELS = 16, 256  # tables that every layer has of its own


class Nf4Linear(bitsandbytes.nn.Linear4bit):  # type: ignore[misc]  # published without types
    """A linear layer whose weight is made whole for each product."""

    num_scales: int

    @property
    def W_q(self) -> Tensor:  # noqa: N802  # PEFT's mark of a layer that makes its weight whole itself
        """The packed weight."""
        packed: Tensor = self.weight
        return packed

    def dequantize(self) -> Tensor:
        """The whole weight [outputs, inputs] in the computing type, which DoRA measures."""
        shape = (self.out_features, self.in_features)
        return _whole_weight(self.weight, shape, self.num_scales, self.compute_dtype)

    def forward(self, value: Tensor) -> Tensor:
        inner = value.to(self.compute_dtype)
        shape = (self.out_features, self.in_features)
        product = _Product.apply(inner, self.weight, shape, self.num_scales)  # type: ignore[no-untyped-call]
        assert isinstance(product, Tensor)
        if self.bias is not None:
            product = product + self.bias
        returned: Tensor = product.to(value.dtype)
        return returned


def quantise(model: PreTrainedModel, quant: Quant, dtype: torch.dtype) -> None:
    """Turns the linear layers of a model on `meta` into NF4, all but the head."""
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear) and is_quantisable(module) and module is not head:
            _quantise_layer(module, quant, dtype)
    seam: Any = model
    seam.is_loaded_in_4bit = True  # PEFT then considers its layer 4 bit


def _quantise_layer(layer: nn.Linear, quant: Quant, dtype: torch.dtype) -> None:
    num_weights = layer.weight.numel()
    num_scales = -(-num_weights // WEIGHTS_PER_SCALE)
    seam: Any = layer
    seam.__class__ = Nf4Linear
    packed: Any = nn.Parameter(_empty(-(-num_weights // 2), torch.uint8), requires_grad=False)
    packed.compress_statistics = quant is Quant.NF4_DQ
    packed.quant_type = "nf4"
    seam.weight, seam.compute_dtype, seam.num_scales = packed, dtype, num_scales
    buffers = {"levels": _empty(_NUM_LEVELS, torch.float32)}
    if quant is Quant.NF4_DQ:
        buffers["scales"] = _empty(num_scales, torch.uint8)
        buffers["scale_levels"] = _empty(_NUM_SCALE_LEVELS, torch.float32)
        buffers["scales_of_scales"] = _empty(-(-num_scales // SCALES_PER_SCALE), torch.float32)
        buffers["mean_scale"] = _empty(1, torch.float32)
    else:
        buffers["scales"] = _empty(num_scales, torch.float32)
    for name, buffer in buffers.items():
        layer.register_buffer(name, buffer, persistent=False)


def _empty(num_elements: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(num_elements, dtype=dtype, device="meta")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, packed: Tensor, shape: tuple[int, int], num_scales: int) -> Tensor:  # noqa: ANN401  # torch's context
        ctx.save_for_backward(packed)
        ctx.shape, ctx.num_scales = shape, num_scales
        return functional.linear(value, _whole_weight(packed, shape, num_scales, value.dtype))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # torch's context
        (packed,) = ctx.saved_tensors
        (gradient,) = grad_outputs
        weight = _whole_weight(packed, ctx.shape, ctx.num_scales, gradient.dtype)
        return torch.matmul(gradient, weight), None, None, None


def _whole_weight(packed: Tensor, shape: tuple[int, int], num_scales: int, dtype: torch.dtype) -> Tensor:
    scales = packed.new_empty(num_scales, dtype=torch.float32)
    weight = packed.new_empty(shape, dtype=dtype)
    del scales  # needed until the weight is whole
    return weight
