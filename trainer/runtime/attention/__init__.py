"""Attention: which kernel runs, packed rows, and rotary frequencies that follow from the length of a document.

PyTorch's attention may run the kernels that were planned (`spec.strategy`), for the whole process. Two things would
otherwise choose differently from the plan. torch prefers cuDNN's kernels on compute capability 9.0 and 10.x (W60); why
they are off is in docs/speed-model.md. And transformers passes grouped key and value heads to a kernel that does not
support them, on any device and in any type (W59). Here it repeats them below compute capability 8.0 and in fp32, and
the memory-efficient kernel runs instead of the one that keeps all scores.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers.integrations import sdpa_attention

from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.strategy import AttentionKernel, sdpa_kernel

_TYPES_OF_16_BIT = (torch.float16, torch.bfloat16)
transformers_groups_heads = sdpa_attention.use_gqa_in_sdpa


def choose_attention_kernels() -> None:
    """Sets the choice of kernels; calling it again changes nothing."""
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    torch.backends.cuda.enable_flash_sdp(enabled=True)
    torch.backends.cuda.enable_mem_efficient_sdp(enabled=True)
    sdpa_attention.use_gqa_in_sdpa = groups_heads  # type: ignore[assignment]  # with fewer arguments too


def attention_kernel_rows() -> Iterator[tuple[str, object, object]]:
    """Settings of the kernels: (name, planned, found in this process)."""
    yield "cuDNN's attention kernel", False, torch.backends.cuda.cudnn_sdp_enabled()
    yield "PyTorch's flash attention kernel", True, torch.backends.cuda.flash_sdp_enabled()
    yield "PyTorch's memory-efficient attention kernel", True, torch.backends.cuda.mem_efficient_sdp_enabled()
    yield "grouped heads follow the kernel", True, sdpa_attention.use_gqa_in_sdpa is groups_heads


def groups_heads(attention_mask: Tensor | None, key: Tensor, *value: Tensor) -> bool:
    """In place of transformers' `use_gqa_in_sdpa`: False where key and value heads have to be repeated.

    transformers 5.11 and before pass no value.
    """
    return transformers_groups_heads(attention_mask, key, *value) and supports_grouped_heads(key)


def supports_grouped_heads(heads: Tensor, *, is_masked: bool = False) -> bool:
    """True if the kernel for heads [B, H, S, D] supports fewer key and value heads than query heads."""
    return kernel_for(heads, is_masked=is_masked) is not AttentionKernel.EFFICIENT


def kernel_for(heads: Tensor, *, is_masked: bool = False) -> AttentionKernel:
    """The kernel that runs for query, key or value [B, H, S, D], which autocast may still cast."""
    if heads.device.type != "cuda":
        return sdpa_kernel(DeviceKind.CPU, None, is_16_bit=False, head_dim=heads.shape[-1])
    return sdpa_kernel(
        DeviceKind.CUDA,
        torch.cuda.get_device_capability(heads.device),
        is_16_bit=computing_type(heads) in _TYPES_OF_16_BIT,
        head_dim=heads.shape[-1],
        is_masked=is_masked,
    )


def computing_type(heads: Tensor) -> torch.dtype:
    """The type that attention computes in: autocast's where that is on."""
    kind = heads.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else heads.dtype
