"""Packed rows on a GPU: no document sees another, on every attention path that a GPU has."""

import importlib.util
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.trainer.runtime.attention.packed import VARLEN, document_kernels, isolate_documents, packed_inputs
from shardwise.trainer.runtime.loss import install_loss_head
from shardwise.trainer.spec.strategy import LossHead

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


@pytest.fixture
def card() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return torch.device("cuda", 0)


def build(implementation: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    if implementation == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        pytest.skip("needs flash-attn")
    if dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("needs compute capability 8.0")
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **CONFIG)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=dtype).to(device)
    model.config.use_cache = False
    isolate_documents(model)
    return model


def rows(device: torch.device, *, seed: int = 1) -> torch.Tensor:
    ids = torch.randint(3, 200, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    other = torch.randint(3, 200, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(seed))
    ids[:, CHANGED] = other[:, CHANGED]
    return ids.to(device)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        *((name, dtype) for name in ("sdpa", "eager") for dtype in (torch.bfloat16, torch.float16, torch.float32)),
        ("flash_attention_2", torch.bfloat16),
        ("flash_attention_2", torch.float16),
    ],
    ids=str,
)
def test_another_document_changes_no_logit_of_this_one(
    implementation: str, dtype: torch.dtype, card: torch.device
) -> None:
    model = build(implementation, dtype, card).eval()
    with torch.no_grad():
        before, after = (
            model(**packed_inputs(model, rows(card, seed=seed), POSITIONS.to(card))).logits[0].float()
            for seed in (1, 2)
        )
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
