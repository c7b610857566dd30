"""Packed rows on a GPU: no document sees another, on every attention path that a GPU has, and results are PyTorch's.

FlashAttention 2 from the hub runs with whichever commit of a flash-attn2 kernel is in the hub's cache
(`python -m shardwise.trainer.runtime.attention.flash_kernel OWNER/flash-attn2@COMMIT` fetches one).
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from torch.nn.attention import SDPBackend
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.models.llama import modeling_llama
from transformers.utils.import_utils import is_kernels_available

from shardwise.trainer.runtime.attention import choose_attention_kernels, kernel_for, supports_grouped_heads
from shardwise.trainer.runtime.attention.choice import attention_facts, attention_of
from shardwise.trainer.runtime.attention.flash_kernel import load_flash_kernel
from shardwise.trainer.runtime.attention.packed import VARLEN, document_kernels, known_rows, packed_inputs
from shardwise.trainer.runtime.loss import install_loss_head
from shardwise.trainer.runtime.memory.compilation import fuse_kernels
from shardwise.trainer.runtime.tools.measure import attention_backend
from shardwise.trainer.spec.strategy import AttentionKernel, LossHead

pytestmark = pytest.mark.gpu
LENGTHS = (40, 7, 81)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
CHANGED = slice(40, 47)
CONFIG: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
HUB_KERNEL = "kernel of the hub"


@pytest.fixture(scope="module")
def kernel(card: torch.device) -> str:
    if torch.cuda.get_device_capability(card) < (8, 0):
        pytest.skip("needs compute capability 8.0")
    if not is_kernels_available():
        pytest.skip("needs the kernels package at a version that transformers takes")
    cache = Path(os.environ.get("KERNELS_CACHE") or constants.HF_HUB_CACHE)
    found = sorted(cache.glob("kernels--*--flash-attn2/snapshots/" + "[0-9a-f]" * 40))
    if not found:
        pytest.skip(f"needs a flash-attn2 kernel in the hub's cache {cache}")
    owner = found[0].parts[-3].split("--")[1]
    name = f"{owner}/flash-attn2@{found[0].name}"
    load_flash_kernel(name)
    return name


def build(implementation: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    if implementation == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("needs flash-attn")
    if dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("needs compute capability 8.0")
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **CONFIG)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype).to(device)
    model.config.use_cache = False
    return model


def rows(device: torch.device, *, seed: int = 1) -> torch.Tensor:
    ids = torch.randint(3, 200, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    other = torch.randint(3, 200, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(seed))
    ids[:, CHANGED] = other[:, CHANGED]
    return ids.to(device)


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    inputs = packed_inputs(model, ids, POSITIONS.to(ids.device))
    with known_rows(inputs["position_ids"]):
        found = model(**inputs).logits[0].float()
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        *((name, dtype) for name in ("sdpa", "eager") for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        ("flash_attention_2", torch.bfloat16), ("flash_attention_2", torch.float16), (HUB_KERNEL, torch.bfloat16),
    ],
    ids=str,
)  # fmt: skip
def test_another_document_changes_no_logit_of_this_one(implementation, dtype, card, request):
    name = request.getfixturevalue("kernel") if implementation == HUB_KERNEL else implementation
    model = build(name, dtype, card).eval()
    with torch.no_grad():
        before, after = (logits(model, rows(card, seed=seed)) for seed in (1, 2))
    same = torch.ones(sum(LENGTHS), dtype=torch.bool)
    same[CHANGED] = False
    torch.testing.assert_close(after[same], before[same], rtol=0, atol=1e-6)
    assert (after[CHANGED] - before[CHANGED]).abs().max() > 1e-3


def test_16_bit_rows_take_one_kernel_of_variable_length(card: torch.device) -> None:
    model = build("sdpa", torch.bfloat16, card)
    install_loss_head(model, LossHead.CHUNKED, chunk_tokens=None)
    ids = rows(card)
    model(input_ids=ids, labels=ids.clone(), position_ids=POSITIONS.to(card)).backward()
    assert document_kernels(model) == (VARLEN,)


def test_the_kernel_of_the_hub_is_the_commit_that_was_named_and_computes_what_pytorchs_attention_does(kernel, card):
    """Within the rounding of bf16, as two kernels differ."""
    found = []
    for implementation in (kernel, "sdpa"):
        model = build(implementation, torch.bfloat16, card)
        assert attention_of(model) == implementation
        out = logits(model, rows(card))
        out.square().mean().backward()
        found.append((out.detach(), model.get_input_embeddings().weight.grad.float()))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 0.02
    assert attention_facts(build(kernel, torch.bfloat16, card))["flash"].startswith("build torch")


HEADS, KV_HEADS, WIDTH = 8, 2, 320  # rows of 64 more than a multiple of 128
NAMES = {AttentionKernel.FLASH: SDPBackend.FLASH_ATTENTION, AttentionKernel.EFFICIENT: SDPBackend.EFFICIENT_ATTENTION}


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


def test_a_model_with_ligers_kernels_has_the_logits_and_gradients_of_plain_torch(card, monkeypatch):
    if importlib.util.find_spec("liger_kernel") is None:
        pytest.skip("needs liger-kernel")
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**CONFIG))
    model.to(card, torch.bfloat16)
    tokens = torch.randint(CONFIG["vocab_size"], (2, 64), device=card)

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
