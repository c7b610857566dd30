"""The linear layer and the autocast, with counts of what they were used for.

`FAKE_TE_LACKS` names the kinds of scaling that the device is said not to have, `FAKE_TE_DEVICE` where layers are made.
"""

import os
from collections import Counter

import torch
from torch import nn
from torch.nn import functional

from transformer_engine.common.recipe import MXFP8BlockScaling, NVFP4BlockScaling

COUNTS: Counter[str] = Counter()
_OPEN: list[object] = []  # recipes of the autocasts that are open


class autocast:  # noqa: N801  # the real one's name
    def __init__(self, enabled=True, calibrating=False, recipe=None, amax_reduction_group=None, _graph=False):
        assert enabled and recipe is not None
        self.recipe = recipe

    def __enter__(self):
        COUNTS["autocast"] += 1
        COUNTS[f"recipe {type(self.recipe).__name__}"] += 1
        _OPEN.append(self.recipe)

    def __exit__(self, *_error):
        _OPEN.pop()


class Linear(nn.Module):
    """Weights in high precision; FP8 inside an autocast."""

    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device=None):
        super().__init__()
        device = device or os.environ.get("FAKE_TE_DEVICE", "cuda")
        self.in_features, self.out_features = in_features, out_features
        empty = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
        self.weight = nn.Parameter(empty)
        self.use_bias = bias
        empty = torch.empty(out_features if bias else 0, dtype=params_dtype, device=device)
        self.bias = nn.Parameter(empty) if bias else empty  # as the real one has it
        if str(device) != "meta":
            nn.init.normal_(self.weight, std=0.023)
        self.fp8 = False
        self.fp8_meta = {}

    def get_extra_state(self):
        return torch.zeros(8, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass

    def forward(self, inp, is_first_microbatch=None):
        is_autocast = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if is_autocast else inp.dtype
        assert is_autocast or self.weight.dtype == inp.dtype, "the real one refuses to cast without autocast"
        self.fp8 = bool(_OPEN)
        if self.fp8:
            recipe = _OPEN[-1]
            multiple = 32 if isinstance(recipe, MXFP8BlockScaling | NVFP4BlockScaling) else 16
            assert inp.shape[:-1].numel() % 8 == 0 and inp.shape[-1] % multiple == 0, "dimensions"
            assert self.out_features % multiple == 0, "dimensions"
            self.fp8_meta["recipe"] = recipe
        mode = "with gradients" if torch.is_grad_enabled() else "without"
        COUNTS[f"{'fp8' if self.fp8 else '16 bit'} products {mode}"] += 1
        bias = self.bias.to(dtype) if self.use_bias else None
        with torch.autocast("cpu", enabled=False):
            return functional.linear(inp.to(dtype), self.weight.to(dtype), bias)


class LayerNormLinear(nn.Module): ...  # only its name is used: PEFT asks whether a layer is one


class LayerNormMLP(nn.Module): ...


def _available(_name):
    def answer(return_reason=False):
        missing = os.environ.get("FAKE_TE_LACKS", "").split(",")
        reason = f"{_name} needs a newer device" if _name in missing else ""
        return (not reason, reason) if return_reason else not reason

    return answer


is_fp8_available = _available("fp8")
is_fp8_block_scaling_available = _available("block")
is_mxfp8_available = _available("mxfp8")
is_nvfp4_available = _available("nvfp4")
