"""On a GPU Liger's kernels compute what plain torch does there, and a model runs them."""

import importlib.util
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from shardwise.trainer.runtime.memory.compilation import fuse_kernels

pytestmark = pytest.mark.gpu
CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip


def test_a_model_with_ligers_kernels_has_the_logits_and_gradients_of_plain_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("needs liger-kernel")
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(CONFIG)
    model.to("cuda", torch.bfloat16)
    tokens = torch.randint(CONFIG.vocab_size, (2, 64), device="cuda")

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
