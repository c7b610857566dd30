"""FlashAttention for rows of several documents in plain torch, as the operators of torch that `varlen_attn` calls."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_LIBRARIES: list[torch.library.Library] = []  # registrations last as long as they are referred to


def register() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CUDA")
    library.impl("_flash_attention_backward", _backward, "CUDA")
    _LIBRARIES.append(library)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, _bounds_of_keys: Tensor, _longest: int,
    _longest_of_keys: int, _dropout: float, is_causal: bool, _return_debug_mask: bool = False, *,
    scale: float | None = None, window_size_left: int | None = None, **_settings: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if bounds.device != query.device:
        raise RuntimeError(f"cu_seq_q must be on {query.device}, not on {bounds.device}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = torch.empty_like(query)
    log_sums = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    for places in _documents(bounds):
        scores, values = _scores(query[places], key[places], scale, window_size_left), _heads(value[places], query)
        log_sums[:, places] = scores.logsumexp(-1)
        out[places] = (scores.softmax(-1) @ values).transpose(0, 1).to(out.dtype)
    seeds = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return out, log_sums, seeds, seeds[:0], query.new_empty(0)


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor, bounds: Tensor,
    _bounds_of_keys: Tensor, _longest: int, _longest_of_keys: int, _dropout: float, is_causal: bool, _seed: Tensor,
    _offset: Tensor, *, scale: float | None = None, window_size_left: int | None = None, **_settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grads = tuple(torch.empty_like(each) for each in (query, key, value))
    for places in _documents(bounds):
        queries, keys, values = (_heads(each[places], query) for each in (query, key, value))
        weights = (_scores(query[places], key[places], scale, window_size_left) - log_sums[:, places, None]).exp()
        grad, answer = _heads(grad_out[places], query), _heads(out[places], query)
        grad_scores = weights * (grad @ values.mT - (grad * answer).sum(-1, keepdim=True)) * scale
        parts = (grad_scores @ keys, grad_scores.mT @ queries, weights.mT @ grad)
        for total, part in zip(grads, parts, strict=True):
            grouped = part.unflatten(0, (total.shape[1], -1)).sum(1)
            total[places] = grouped.transpose(0, 1).to(total.dtype)
    return grads


def _documents(bounds: Tensor) -> Iterator[slice]:
    return (slice(start, end) for start, end in pairwise(bounds.tolist()))


def _heads(states: Tensor, query: Tensor) -> Tensor:
    """[heads of the query, tokens, head size] in float32."""
    return states.transpose(0, 1).float().repeat_interleave(query.shape[1] // states.shape[1], dim=0)


def _scores(query: Tensor, key: Tensor, scale: float, window: int | None) -> Tensor:
    """[heads, tokens, tokens]: causal, and within the window where it has one."""
    scores = _heads(query, query) @ _heads(key, query).mT * scale
    seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril()
    if window is not None and window >= 0:
        seen = seen.triu(-window)
    return scores.masked_fill(~seen, float("-inf"))
