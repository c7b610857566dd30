"""On a GPU torch chooses the attention kernel that was planned, and Liger's kernels compute what plain torch does."""

import importlib.util
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.models.llama import modeling_llama

from shardwise.trainer.runtime.attention import choose_attention_kernels, kernel_for, supports_grouped_heads
from shardwise.trainer.runtime.memory.compilation import fuse_kernels
from shardwise.trainer.runtime.tools.measure import attention_backend
from shardwise.trainer.spec.strategy import AttentionKernel

pytestmark = pytest.mark.gpu
HEADS, KV_HEADS, WIDTH = 8, 2, 320  # rows of 64 more than a multiple of 128
NAMES = {
    AttentionKernel.FLASH: SDPBackend.FLASH_ATTENTION,
    AttentionKernel.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_torch_chooses_the_planned_kernel(dtype: torch.dtype, head_dim: int) -> None:
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


CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip


def test_a_model_with_ligers_kernels_has_the_logits_and_gradients_of_plain_torch(
    card: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("needs liger-kernel")
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(CONFIG)
    model.to(card, torch.bfloat16)
    tokens = torch.randint(CONFIG.vocab_size, (2, 64), device=card)

    def logits_and_gradients() -> list[torch.Tensor]:
        model.zero_grad()
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        return [output.logits.float(), *(each.grad.float() for each in model.parameters())]

    plain = logits_and_gradients()
    fused = fuse_kernels(model)
    assert (fused.problem, fused.num_norms, fused.num_gates) == (None, 5, 2)
    for mine, theirs in zip(logits_and_gradients(), plain, strict=True):
        assert (mine - theirs).norm() <= 0.03 * theirs.norm()
