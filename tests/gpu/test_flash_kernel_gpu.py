"""FlashAttention 2 from the hub on a GPU: it computes what PyTorch's attention does, and keeps documents apart.

It runs with whichever commit of a flash-attn2 kernel is in the hub's cache, on a machine that fetched one with
`python -m shardwise.trainer.runtime.attention.flash_kernel OWNER/flash-attn2@COMMIT`. With HF_HUB_OFFLINE=1 it needs no
network.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.import_utils import is_kernels_available

from shardwise.trainer.runtime.attention.choice import attention_facts, attention_of
from shardwise.trainer.runtime.attention.flash_kernel import load_flash_kernel
from shardwise.trainer.runtime.attention.packed import packed_inputs

pytestmark = pytest.mark.gpu
LENGTHS = (40, 7, 81)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
CHANGED = slice(40, 47)
CONFIG: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def kernel() -> str:
    """The kernel of the cache, loaded."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a CUDA GPU of compute capability 8.0")
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


def build(implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **CONFIG)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.bfloat16)
    model.config.use_cache = False
    return model.to("cuda")


def rows(*, seed: int = 1) -> torch.Tensor:
    ids = torch.randint(3, 200, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    other = torch.randint(3, 200, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(seed))
    ids[:, CHANGED] = other[:, CHANGED]
    return ids.to("cuda")


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    out = model(**packed_inputs(model, ids, POSITIONS.to("cuda"))).logits[0].float()
    assert isinstance(out, torch.Tensor)
    return out


def test_the_kernel_of_the_hub_is_the_commit_that_was_named(kernel: str) -> None:
    model = build(kernel)
    assert attention_of(model) == kernel
    assert attention_facts(model)["flash"].startswith("build torch")


def test_another_document_changes_no_logit_of_this_one(kernel: str) -> None:
    model = build(kernel).eval()
    with torch.no_grad():
        before, after = (logits(model, rows(seed=seed)) for seed in (1, 2))
    same = torch.ones(sum(LENGTHS), dtype=torch.bool)
    same[CHANGED] = False
    torch.testing.assert_close(after[same], before[same], rtol=0, atol=1e-6)
    assert (after[CHANGED] - before[CHANGED]).abs().max() > 1e-3


def test_logits_and_gradients_are_those_of_pytorchs_attention(kernel: str) -> None:
    """Within the rounding of bf16, as two kernels differ."""
    found = []
    for implementation in (kernel, "sdpa"):
        model = build(implementation)
        out = logits(model, rows())
        out.square().mean().backward()
        found.append((out.detach(), model.get_input_embeddings().weight.grad.float()))
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 0.02
