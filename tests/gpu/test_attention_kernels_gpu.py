"""On a GPU torch chooses the kernel that was planned, for grouped heads too."""

import pytest
import torch
from torch.nn.attention import SDPBackend
from transformers.integrations.sdpa_attention import repeat_kv

from shardwise.trainer.runtime.attention import choose_attention_kernels, kernel_for, supports_grouped_heads
from shardwise.trainer.runtime.tools.measure import attention_backend
from shardwise.trainer.spec.strategy import AttentionKernel

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, WIDTH = 8, 2, 320  # rows of 64 more than a multiple of 128
NAMES = {
    AttentionKernel.FLASH: SDPBackend.FLASH_ATTENTION,
    AttentionKernel.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_torch_chooses_the_planned_kernel(dtype: torch.dtype, head_dim: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if dtype is torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8.0")
    choose_attention_kernels()
    query, key, value = (
        torch.randn(2, heads, WIDTH, head_dim, device="cuda", dtype=dtype, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    is_grouped = supports_grouped_heads(key)
    if not is_grouped:
        key, value = (repeat_kv(each, HEADS // KV_HEADS) for each in (key, value))
    chosen = torch._fused_sdp_choice(query, key, value, None, 0.0, True, enable_gqa=is_grouped)
    assert SDPBackend(chosen) == NAMES[kernel_for(query)] == attention_backend(query.device, dtype, head_dim)
