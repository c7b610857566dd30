"""Stand-in of the package `mamba-ssm` on a CPU: transformers' own operations, a document at a time."""

import inspect
from typing import Any

from causal_conv1d import causal_conv1d_fn
from documents_of_rows import by_numbers
from torch import Tensor
from torch.nn import functional


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int,
    D: Tensor | None = None, dt_bias: Tensor | None = None,  # noqa: N803  # as the package has it
    seq_idx: Tensor | None = None, dt_softplus: bool = False,
) -> Tensor:  # fmt: skip
    """The scan of Mamba 2: x [B, S, H, P] to the same shape."""
    from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

    def scan(*parts: Tensor) -> Any:
        inputs = (parts[0], parts[1], a, *parts[2:], chunk_size)
        return inspect.unwrap(mamba2_chunk_scan)(*inputs, D=D, dt_bias=dt_bias, dt_softplus=dt_softplus)

    values = (x, dt, b, c)
    found: Tensor = scan(*values) if seq_idx is None else by_numbers(scan, seq_idx, *values, dim=1)
    return found


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor, dt_bias: Tensor, a: Tensor,
    D: Tensor, chunk_size: int,  # noqa: N803  # as the package has it
    seq_idx: Tensor | None = None, activation: str = "silu", rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6, outproj_weight: Tensor | None = None, outproj_bias: Tensor | None = None,
    headdim: int | None = None, ngroups: int = 1,
) -> Tensor:  # fmt: skip
    """A mixer of Mamba 2 in one: what runs in training only."""
    assert headdim is not None and outproj_weight is not None and rmsnorm_weight is not None
    heads = a.shape[0]
    size = heads * headdim
    gate, mixed, dt = zxbcdt.split([size, zxbcdt.shape[-1] - size - heads, heads], dim=-1)
    mixed = causal_conv1d_fn(mixed.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation).transpose(1, 2)
    state = (mixed.shape[-1] - size) // 2
    x, b, c = mixed.split([size, state, state], dim=-1)
    x, b, c = (each.unflatten(-1, (parts, -1)) for each, parts in ((x, heads), (b, ngroups), (c, ngroups)))
    out = mamba_chunk_scan_combined(
        x, dt, a, b, c, chunk_size, D=D, dt_bias=dt_bias, seq_idx=seq_idx, dt_softplus=True
    ).flatten(2)
    out = functional.rms_norm(out * functional.silu(gate), (size,), rmsnorm_weight, rmsnorm_eps)
    return functional.linear(out, outproj_weight, outproj_bias)
