"""Stand-in of the package `flash-linear-attention` on a CPU: transformers' own operations, a document at a time."""

import inspect
from collections.abc import Callable
from typing import Any

from documents_of_rows import by_bounds
from torch import Tensor


def _apart(
    own: Callable[..., Any], bounds: Tensor | None, inputs: tuple[Tensor, ...], *, normed: bool
) -> tuple[Any, None]:
    def compute(*parts: Tensor) -> Any:
        return inspect.unwrap(own)(*parts, use_qk_l2norm_in_kernel=normed)[0]

    return compute(*inputs) if bounds is None else by_bounds(compute, bounds, *inputs), None


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Gated DeltaNet."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as own

    return _apart(own, cu_seqlens, (query, key, value, g, beta), normed=use_qk_l2norm_in_kernel)


def chunk_kda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Kimi Delta Attention."""
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention as own

    return _apart(own, cu_seqlens, (query, key, value, g, beta), normed=use_qk_l2norm_in_kernel)
