"""The kernels that a real device would run where fake tensors would silently run others.

A fake tensor is computed on torch's meta device. Wherever meta has no kernel of its own, an operation falls apart into
others that no GPU runs, and their temporaries would be counted. That concerns

    scaled_dot_product_attention   runs the path that builds the sequence x sequence matrix. Here the kernel that torch
                                   picks on the device is called: flash, memory-efficient, or that same path
    silu, mish                     their backward is several operations on meta and one on a device; no other operation
                                   of torch 2.13 has both a kernel of its own and a decomposition

Both kernels' backward allocates inside itself what no dispatch mode sees (torch's flash_api.cpp, kernel_backward.h): an
fp32 accumulator of the query gradient, a row sum for each query, and under flash key and value gradients for every
query head where heads are grouped. They are allocated here by hand. So are those of `varlen_attn`, which runs packed
rows: its accumulator and row sums have 128 rows more for each document.

Liger's kernels are written in Triton, which runs on no fake device: `LigerLoss` allocates what its loss allocates.

Kernels of other packages (mamba-ssm, causal-conv1d, flash-linear-attention) run on no fake device either: transformers
uses its own operations instead, as it does for an export.

`grouped_mm`, which runs the experts of a mixture, supports bf16 alone on meta; a device multiplies other types group by
group into the same outputs. It does so here.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import varlen
from transformers.integrations import hub_kernels

from shardwise.trainer.runtime.attention import packed as packed_attention
from shardwise.trainer.simulation.fake_device import replaced
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.strategy import AttentionKernel, sdpa_kernel

_16_BIT = (torch.bfloat16, torch.float16)
_aten: Any = torch.ops.aten
_WITHOUT_PACKAGES = {
    name: lambda: True for name in ("is_torchdynamo_exporting",) if hasattr(hub_kernels, name)
}  # before transformers 5.23 each model looks for packages itself


class Kernels:
    """The kernels of one device, and how often each kind of attention was called."""

    def __init__(self, device: str, compute_capability: tuple[int, int]) -> None:
        self._device = device
        self._compute_capability = compute_capability
        self._decomposed = functional.scaled_dot_product_attention
        self._documents = packed_attention.documents_on_cpu
        self.attention: Counter[AttentionKernel] = Counter()
        self.num_masked = 0
        self.num_narrow = 0  # calls whose values have other heads than their queries

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Runs the block with these kernels."""
        with (
            replaced(
                functional,
                silu=_one_kernel(torch.ops.aten.silu),
                mish=_one_kernel(torch.ops.aten.mish),
                scaled_dot_product_attention=self._attention,
                grouped_mm=_grouped_product,
            ),
            replaced(varlen, varlen_attn=self._packed_attention),
            replaced(hub_kernels, **_WITHOUT_PACKAGES),
            replaced(packed_attention, documents_on_cpu=self._documents_on_cpu),
        ):
            yield

    def choose(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> AttentionKernel:
        """The kernel for tensors [batch, heads, sequence, head_dim], with what it refuses left to the one after it."""
        kernel = sdpa_kernel(
            DeviceKind(self._device),
            self._compute_capability,
            is_16_bit=query.dtype in _16_BIT,
            head_dim=query.shape[-1],
            is_masked=mask is not None,
        )
        if query.shape[-1] != value.shape[-1]:  # flash supports one size
            self.num_narrow += 1
            kernel = AttentionKernel.MATH if self._device == "cpu" else AttentionKernel.EFFICIENT
        is_grouped = key.shape[1] != query.shape[1]
        return AttentionKernel.MATH if is_grouped and kernel is AttentionKernel.EFFICIENT else kernel

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002  # torch's signature
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002
    ) -> Tensor:
        query, key, value = (_autocast(tensor) for tensor in (query, key, value))
        mask = None if attn_mask is None else _autocast(attn_mask)
        kernel = self.choose(query, key, value, mask)
        self.attention[kernel] += 1
        self.num_masked += mask is not None
        if kernel is AttentionKernel.MATH:
            return self._decomposed(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if self._device == "cpu":
            added = _added_mask(mask, query)
            return _first(
                _aten._scaled_dot_product_flash_attention_for_cpu(
                    query, key, value, dropout_p, is_causal, attn_mask=added, scale=scale
                )
            )
        if kernel is AttentionKernel.FLASH:
            return _first(_Flash.apply(query, key, value, dropout_p, is_causal, scale))  # type: ignore[no-untyped-call]
        added = _added_mask(mask, query)
        if added is not None:
            added = added.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        return _first(_Efficient.apply(query, key, value, added, dropout_p, is_causal, scale))  # type: ignore[no-untyped-call]

    def _documents_on_cpu(self, *arguments: Any) -> Tensor:  # noqa: ANN401  # as they were passed
        self.attention[AttentionKernel.FLASH] += 1
        out: Tensor = self._documents(*arguments)
        return out

    def _packed_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        _bounds_k: Tensor,
        longest: int,
        _longest_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> Tensor:
        self.attention[AttentionKernel.FLASH] += 1
        return _first(_Varlen.apply(query, key, value, bounds, longest, scale, window_size, enable_gqa))  # type: ignore[no-untyped-call]


class _Flash(torch.autograd.Function):
    """FlashAttention-2 as torch has it, with what its backward allocates."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:  # noqa: ANN401  # torch's context
        dropout_p, is_causal, scale = options
        out, log_sums, _, _, longest_q, longest_k, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale
        )
        ctx.save_for_backward(query, key, value, out, log_sums, seed, offset)
        ctx.options = (longest_q, longest_k, dropout_p, is_causal)
        ctx.scale = scale
        assert isinstance(out, Tensor)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # torch's context
        query, key, value, out, log_sums, seed, offset = ctx.saved_tensors
        longest_q, longest_k, dropout_p, is_causal = ctx.options
        held = _flash_backward_temporaries(query, key)
        grads = _aten._scaled_dot_product_flash_attention_backward(
            *(grad_outputs[0], query, key, value, out, log_sums, None, None, longest_q, longest_k),
            *(dropout_p, is_causal, seed, offset),
            scale=ctx.scale,
        )
        del held
        return grads[0], grads[1], grads[2], None, None, None


class _Varlen(torch.autograd.Function):
    """torch's flash attention over rows [tokens, heads, head_dim] of documents, with what its backward allocates."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *options: Any) -> Tensor:  # noqa: ANN401  # torch's context
        longest, scale, window, is_grouped = options
        of_rows = (bounds, bounds, longest, longest)
        is_causal = window == (-1, 0)
        out, log_sums, seed = torch.ops.torch_attn._varlen_attn(
            query, key, value, *of_rows, is_causal, scale, list(window), is_grouped
        )
        ctx.save_for_backward(query, key, value, bounds, out, log_sums, seed)
        ctx.options = (longest, scale, window, is_causal)
        assert isinstance(out, Tensor)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # torch's context
        query, key, value, bounds, out, log_sums, seed = ctx.saved_tensors
        longest, scale, window, is_causal = ctx.options
        held = _varlen_backward_temporaries(query, key, num_documents=bounds.numel() - 1)
        of_rows = (bounds, bounds, longest, longest)
        grads = torch.ops.torch_attn._varlen_attn_backward(
            *(grad_outputs[0], query, key, value, out, log_sums), *of_rows, is_causal, seed, scale, list(window)
        )
        del held
        return grads[0], grads[1], grads[2], None, None, None, None, None


class _Efficient(torch.autograd.Function):
    """Memory-efficient attention as torch has it, with what its backward allocates."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, *options: Any) -> Tensor:  # noqa: ANN401  # torch's context
        dropout_p, is_causal, scale = options
        out, log_sums, seed, offset = _aten._scaled_dot_product_efficient_attention(
            query, key, value, added, compute_log_sumexp=True, dropout_p=dropout_p, is_causal=is_causal, scale=scale
        )
        ctx.save_for_backward(query, key, value, added, out, log_sums, seed, offset)
        ctx.options = (dropout_p, is_causal, scale)
        assert isinstance(out, Tensor)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # torch's context
        query, key, value, added, out, log_sums, seed, offset = ctx.saved_tensors
        dropout_p, is_causal, scale = ctx.options
        held = _accumulators(query)
        grads = _aten._scaled_dot_product_efficient_attention_backward(
            *(grad_outputs[0], query, key, value, added, out, log_sums, seed, offset, dropout_p),
            *((True, True, True, False), is_causal),
            scale=scale,
        )
        del held
        return grads[0], grads[1], grads[2], None, None, None, None


def _accumulators(query: Tensor) -> list[Tensor]:
    """The query gradient in fp32, in tiles of 128 rows and 32 columns, and a row sum for each query."""
    batch, heads, length, head_dim = query.shape
    padded_length, padded_dim = -(-length // 128) * 128, -(-head_dim // 32) * 32
    return [
        query.new_empty(batch, padded_length, heads, padded_dim, dtype=torch.float32),
        query.new_empty(batch, heads, padded_length, dtype=torch.float32),
    ]


def _flash_backward_temporaries(query: Tensor, key: Tensor) -> list[Tensor]:
    batch, heads, _, head_dim = query.shape
    held = _accumulators(query)
    if key.shape[1] != heads:
        held += [query.new_empty(batch, key.shape[2], heads, head_dim) for _ in range(2)]
    return held


def _varlen_backward_temporaries(query: Tensor, key: Tensor, *, num_documents: int) -> list[Tensor]:
    num_tokens, heads, head_dim = query.shape
    padded_tokens, padded_dim = num_tokens + 128 * num_documents, -(-head_dim // 32) * 32
    held = [
        query.new_empty(padded_tokens, heads, padded_dim, dtype=torch.float32),
        query.new_empty(heads, padded_tokens, dtype=torch.float32),
    ]
    if key.shape[1] != heads:
        held += [query.new_empty(key.shape[0], heads, head_dim) for _ in range(2)]
    return held


class _GroupedProduct(torch.autograd.Function):
    """Rows [S, K] in groups by weights [experts, K, N]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:  # noqa: ANN401  # torch's context
        ctx.save_for_backward(rows, weights)
        return rows.new_empty(rows.shape[0], weights.shape[2])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:  # noqa: ANN401  # torch's context
        rows, weights = ctx.saved_tensors
        needs_rows, needs_weights = ctx.needs_input_grad
        return (
            torch.empty_like(rows) if needs_rows else None,
            torch.empty_like(weights) if needs_weights else None,
        )


_grouped_mm = functional.grouped_mm


def _grouped_product(rows: Tensor, weights: Tensor, *, offs: Tensor | None = None, **options: Any) -> Tensor:  # noqa: ANN401  # torch's signature
    if rows.dtype == torch.bfloat16:
        return _grouped_mm(rows, weights, offs=offs, **options)
    return _first(_GroupedProduct.apply(rows, weights))  # type: ignore[no-untyped-call]


class LigerLoss(nn.Module):
    """The loss of liger-kernel 0.8.5 as far as memory goes (ops/fused_linear_cross_entropy.py)."""

    def forward(self, weight: Tensor, hidden: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:
        return _first(_LigerLoss.apply(hidden, weight, targets, bias))  # type: ignore[no-untyped-call]


class _LigerLoss(torch.autograd.Function):
    """A slice of logits, whose gradient replaces them, and sums of gradients, those of the weight in fp32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ANN401  # torch's context
        grad_hidden = torch.zeros_like(hidden)
        is_learned = ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if is_learned else None
        losses = torch.zeros(targets.shape, dtype=torch.float32, device=hidden.device)
        (num_tokens, width), vocab = hidden.shape, weight.shape[0]
        in_slice = min(num_tokens, 1 << (-(-num_tokens // -(-vocab // width)) - 1).bit_length())
        logits = hidden.new_empty(in_slice, vocab)
        del logits
        total = losses.sum()
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # torch's context
        return (*ctx.saved_tensors, None, None)


def _one_kernel(operation: Any) -> Any:  # noqa: ANN401  # torch's operations have no type
    """`operation` (input) with a backward that makes one tensor."""

    class OneKernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: ANN401  # torch's context
            ctx.save_for_backward(value)
            result = operation(value)
            assert isinstance(result, Tensor)
            return result

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:  # noqa: ANN401  # torch's context
            (value,) = ctx.saved_tensors
            return torch.empty_like(value)

    def run(input: Tensor, inplace: bool = False) -> Tensor:  # noqa: A002, FBT001, FBT002  # torch's signature
        result = OneKernel.apply(input)  # type: ignore[no-untyped-call]
        assert isinstance(result, Tensor)
        return result

    return run


def _autocast(tensor: Tensor) -> Tensor:
    """The tensor in autocast's type; attention's dispatcher, which does that, is passed by here."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _added_mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A boolean mask as what is added to the scores, in the type of the query."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _first(results: Any) -> Tensor:  # noqa: ANN401  # a tensor or a tuple that begins with one
    first = results if isinstance(results, Tensor) else results[0]
    assert isinstance(first, Tensor)
    return first
