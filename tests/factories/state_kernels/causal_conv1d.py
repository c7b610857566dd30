"""Stand-in of the package `causal-conv1d` on a CPU: the numbers of documents keep them apart, as in its kernel."""

import torch
from documents_of_rows import by_numbers
from torch import Tensor
from torch.nn import functional


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """x [B, C, S], weight [C, K]: each channel under its own weights, from the last K tokens of the document."""
    if seq_idx is not None:
        return by_numbers(lambda part: causal_conv1d_fn(part, weight, bias, activation=activation), seq_idx, x, dim=2)
    out = functional.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=x.shape[1])[..., : x.shape[2]]
    return out if activation is None else functional.silu(out)


def causal_conv1d_update(x: Tensor, conv_state: Tensor, weight: Tensor) -> Tensor:
    """One token after others; no forward of training calls it."""
    raise AssertionError((x.shape, conv_state.shape, weight.shape, torch.__version__))
