"""A forward reads nothing about its rows from the device, and has the same result."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from shardwise.trainer.runtime.attention.packed import known_rows

READS = "aten::is_nonzero"  # a tensor as a condition of Python: on a GPU, a wait
IDS = torch.arange(2 * 12).view(2, 12) % 32


def tiny(model_type: str = "llama", **fields: Any) -> torch.nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, vocab_size=32, num_key_value_heads=1, head_dim=8, **sizes, **fields)
    return AutoModelForCausalLM.from_config(config)


def forward(
    model: torch.nn.Module, around: AbstractContextManager[None], **inputs: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """The logits of a forward, and how often a tensor was read as a condition."""
    with around, profile(activities=[ProfilerActivity.CPU]) as profiler:
        logits = model(input_ids=IDS, use_cache=False, **inputs).logits
    return logits, sum(each.count for each in profiler.key_averages() if each.key == READS)


def test_w57_transformers_reads_from_the_device_whether_rows_are_packed():
    assert forward(tiny(), nullcontext())[1] > 0


@pytest.mark.parametrize("fields", [{}, {"model_type": "mistral", "sliding_window": 4}])
def test_whole_rows_are_not_looked_at_and_have_the_same_logits(fields: dict[str, Any]):
    model = tiny(**fields)
    (plain, _), (spared, reads) = forward(model, nullcontext()), forward(model, known_rows(are_packed=False))
    assert reads == 0
    assert torch.equal(plain, spared)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_rows_are_not_looked_at_and_have_the_same_logits(implementation: str):
    model = tiny("mistral", sliding_window=4, attn_implementation=implementation)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).repeat(2, 1)
    (plain, reads_before), (spared, reads) = (
        forward(model, around, position_ids=positions) for around in (nullcontext(), known_rows(are_packed=True))
    )
    assert (reads_before > 0, reads) == (True, 0)
    assert torch.equal(plain, spared)


def test_the_look_is_back_afterwards_whatever_happened_meanwhile():
    look = masking_utils.find_packed_sequence_indices
    with pytest.raises(ValueError, match="in the forward"), known_rows(are_packed=False):
        raise ValueError("in the forward")
    assert masking_utils.find_packed_sequence_indices is look
