"""Functions of flash-attn 2 with their parameters, each sequence alone and its scores written out."""

import torch
from torch import Tensor
from torch.nn import functional


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """Query, key and value [T, H, D] of sequences end to end; their bounds [sequences + 1]."""
    assert causal and torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max()) and isinstance(max_seqlen_q, int | Tensor)
    outputs = []
    for start, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        query, key, value = (x[start:end].transpose(0, 1) for x in (q, k, v))
        key, value = (x.repeat_interleave(len(query) // len(key), 0) for x in (key, value))
        scores = query @ key.transpose(1, 2) * (softmax_scale or query.shape[-1] ** -0.5)
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        is_seen = torch.ones(end - start, end - start).tril()
        if window_size[0] >= 0:
            is_seen = is_seen.triu(-window_size[0])
        shares = functional.softmax(scores.masked_fill(is_seen == 0, float("-inf")), dim=-1)
        outputs.append((shares @ value).transpose(0, 1))
    return torch.cat(outputs)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """Query, key and value [B, S, H, D], every row one sequence."""
    batch, width = q.shape[:2]
    bounds = torch.arange(0, (batch + 1) * width, width, dtype=torch.int32)
    out = flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), bounds, bounds, width, width, softmax_scale=softmax_scale,
        causal=causal, window_size=window_size, softcap=softcap,
    )  # fmt: skip
    return out.view(batch, width, *out.shape[1:])
