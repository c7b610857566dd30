"""The kernel behind PyTorch's attention is the planned one: for the plan, a dry run, a measurement and the ranks."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from estimate_factory import LLAMA_8B, configuration, gpu
from torch.nn.attention import SDPBackend
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import sdpa_attention

from shardwise.trainer.planning.memory.precision_policy import attention_kernel, dims_of
from shardwise.trainer.runtime.attention import (
    attention_kernel_rows,
    choose_attention_kernels,
    groups_heads,
    kernel_for,
    transformers_groups_heads,
)
from shardwise.trainer.runtime.attention.packed import ONE_BY_ONE, VARLEN
from shardwise.trainer.runtime.models.build import make_trainable
from shardwise.trainer.runtime.run.types import compute_type
from shardwise.trainer.runtime.tools.measure import attention_backend
from shardwise.trainer.simulation.fake_device import FakeDeviceMode, as_if_available
from shardwise.trainer.simulation.kernels import Kernels
from shardwise.trainer.spec.strategy import AttentionKernel, Checkpointing, LossHead, Precision

FLASH, EFFICIENT = AttentionKernel.FLASH, AttentionKernel.EFFICIENT
HEAD_DIM = 64
TURING = (7, 5)
CALLS = {"Turing fp16": EFFICIENT, "Hopper fp32": EFFICIENT, "Hopper bf16": FLASH, "Hopper bf16 by autocast": FLASH}


def heads(dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.empty(2, each, 64, HEAD_DIM, dtype=dtype, device="cuda") for each in (8, 2, 2)]


@pytest.fixture
def unchosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which torch and transformers choose by themselves."""
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", transformers_groups_heads)
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)


def test_a_model_made_trainable_leaves_torch_the_planned_kernels(unchosen):
    config = AutoConfig.for_model(
        "llama", vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    make_trainable(AutoModelForCausalLM.from_config(config), Checkpointing.NONE, LossHead.EAGER, loss_chunk_tokens=None)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert sdpa_attention.use_gqa_in_sdpa is groups_heads


def test_a_choice_that_was_undone_is_seen(unchosen):
    choose_attention_kernels()
    assert all(planned == found for _, planned, found in attention_kernel_rows())
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    sdpa_attention.use_gqa_in_sdpa = transformers_groups_heads
    assert sum(planned != found for _, planned, found in attention_kernel_rows()) == 2


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16_MIXED, Precision.BF16])
@pytest.mark.parametrize(
    "spec", ["1xV100-32GB", "1xT4", "1xA100-SXM4-80GB", "1xRTX-4090", "1xH100-SXM5-80GB", "1xB200", "1xRTX-5090"]
)
def test_plan_dry_run_measurement_and_ranks_name_one_kernel(spec, precision):
    device, dtype = gpu(spec), compute_type(precision)
    planned = attention_kernel(configuration(precision=precision), device, dims_of(LLAMA_8B))
    assert planned is (FLASH if device.compute_capability >= (8, 0) and precision is not Precision.FP32 else EFFICIENT)
    with as_if_available(device.compute_capability), FakeDeviceMode():
        query, *_ = heads(dtype)
        assert kernel_for(query) is planned
        assert Kernels("cuda", device.compute_capability).choose(query, query, query, None) is planned
        measured = attention_backend(torch.device("cuda", 0), dtype, HEAD_DIM)
    assert measured is {FLASH: SDPBackend.FLASH_ATTENTION, EFFICIENT: SDPBackend.EFFICIENT_ATTENTION}[planned]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    script = Path(__file__).parents[2] / "factories" / "fused_calls.py"
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize(("case", "kernel"), CALLS.items())
def test_grouped_heads_take_a_fused_kernel_on_every_chip(case, kernel, seen):
    assert seen["calls"][case] == [{kernel: 1}, None]


@pytest.mark.parametrize(("case", "kernel"), CALLS.items())
@pytest.mark.parametrize("way", [", packed", ", packed in a window"])
def test_packed_rows_take_a_fused_kernel_on_every_chip(case, kernel, way, seen):
    """One kernel for all documents, or one for each; a window shorter than a document is a mask for the latter."""
    assert seen["calls"][case + way] == ([{FLASH: 1}, VARLEN] if kernel is FLASH else [{EFFICIENT: 3}, ONE_BY_ONE])


def test_a_forward_of_packed_rows_asks_the_device_nothing(seen):
    """By one kernel or document by document, with a window and without: a fake tensor cannot be read."""
    assert len(seen["questions"]) == 4
    assert set(seen["questions"].values()) == {None}


def test_w59_transformers_groups_heads_for_any_chip_and_type():
    """A canary: where it looks at them, `groups_heads` is not needed."""
    with as_if_available(TURING), FakeDeviceMode():
        _, key, value = heads(torch.float32)
        assert transformers_groups_heads(None, key, value)
        assert not groups_heads(None, key, value)


def test_w60_torch_does_not_disable_cudnns_attention(seen):
    """A canary, of a process that chose nothing: where torch has it off, `choose_attention_kernels` need not."""
    assert seen["has_cudnn"]
