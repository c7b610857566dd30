"""The configuration, the conversion and the layer."""

import torch
from torch import nn

EMULATES = False  # as torchao where it is told to: no product is FP8 then


class Float8LinearConfig:
    def __init__(self, recipe_name):
        self.recipe_name = recipe_name

    @staticmethod
    def from_recipe_name(recipe_name):
        assert recipe_name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
        return Float8LinearConfig(recipe_name)


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inp, weight):
        ctx.save_for_backward(inp, weight)
        flat = inp.flatten(0, -2)
        if EMULATES:
            return (flat @ weight.t().to(flat.dtype)).unflatten(0, inp.shape[:-1])
        scales = [tensor.abs().max().float() / 448 for tensor in (flat, weight)]
        eighths = [
            (tensor / scale).to(torch.float8_e4m3fn) for tensor, scale in zip((flat, weight), scales, strict=True)
        ]
        out = torch._scaled_mm(
            eighths[0], eighths[1].t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16
        )
        return out.to(inp.dtype).unflatten(0, inp.shape[:-1])

    @staticmethod
    def backward(ctx, grad):
        inp, weight = ctx.saved_tensors
        return grad @ weight.to(grad.dtype), (grad.flatten(0, -2).t() @ inp.flatten(0, -2)).to(weight.dtype)


class Float8Linear(nn.Linear):
    def forward(self, inp):
        out = _Float8Product.apply(inp, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)


def convert_to_float8_training(module, *, module_filter_fn=None, config=None):
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) and (module_filter_fn is None or module_filter_fn(child, name)):
            made = Float8Linear(child.in_features, child.out_features, bias=False, device="meta")
            made.weight, made.bias, made.config = child.weight, child.bias, config
            setattr(module, name, made)
        else:
            convert_to_float8_training(child, module_filter_fn=module_filter_fn, config=config)
    return module
