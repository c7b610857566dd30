"""Stand-in of the package `flash-linear-attention` on a CPU: transformers' own operations, a document at a time."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from documents_of_rows import by_bounds
from torch import Tensor


def _apart(
    own: Callable[..., Any], bounds: Tensor | None, inputs: tuple[Tensor, ...], *, normed: bool
) -> tuple[Any, None]:
    def compute(*parts: Tensor) -> Any:
        return inspect.unwrap(own)(*parts, use_qk_l2norm_in_kernel=normed)[0]

    return compute(*inputs) if bounds is None else by_bounds(compute, bounds, *inputs), None


def _kernel(module: str, name: str) -> Callable[..., tuple[Any, None]]:
    """The function of the package, by transformers' own operation of that name."""

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Any, None]:  # fmt: skip
        own = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)
        return _apart(own, cu_seqlens, (query, key, value, g, beta), normed=use_qk_l2norm_in_kernel)

    return kernel


chunk_gated_delta_rule = _kernel("qwen3_next", "torch_chunk_gated_delta_rule")  # Gated DeltaNet
chunk_kda = _kernel("kimi_linear", "chunk_kimi_delta_attention")  # Kimi Delta Attention
