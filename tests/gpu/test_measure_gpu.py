"""The figures that only a GPU has, what joins several of them, what FP8 gains, and expandable segments on WSL."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from planning_factory import LLAMA_3_8B

from shardwise.launch.plan.fp8 import time_fp8
from shardwise.launch.probe.host import is_wsl
from shardwise.launch.probe.machine import read_hardware
from shardwise.trainer.runtime.tools.measure import (
    attention_flops_per_s,
    fp8_flops_per_s,
    host_copy_bytes_per_s,
    measure,
    peer_copies,
)
from shardwise.trainer.spec.messages.worker_requests import Fp8GainRequest
from shardwise.trainer.spec.plan import Fp8Gain
from shardwise.trainer.spec.strategy import Fp8Recipe

pytestmark = pytest.mark.gpu
BUDGET_S = 0.2


def test_a_gpu_has_every_figure_of_its_generation(card: torch.device) -> None:
    *_, last = measure(card, budget_s=BUDGET_S)
    rates, capability = last.rates, torch.cuda.get_device_capability(card)
    assert last.notes == ()
    assert rates.matmul_precision == ("bf16" if capability >= (8, 0) else "fp16")
    assert (rates.fp8_flops_per_s is not None) == (capability >= (8, 9))
    assert (rates.attention_flops_per_s is not None) == (capability >= (8, 0))
    assert None not in (rates.memory_bytes_per_s, rates.host_to_device_bytes_per_s, rates.device_to_host_bytes_per_s)
    assert rates.fp32_flops_per_s is not None
    assert rates.matmul_flops_per_s > rates.fp32_flops_per_s
    for to_device in (True, False):  # slower than copies on the card
        assert host_copy_bytes_per_s(card, 2**28, BUDGET_S, to_device=to_device) < rates.memory_bytes_per_s
    if capability >= (8, 0):  # by the flash kernel
        assert attention_flops_per_s(card, torch.bfloat16, (1, 16, 2048, 128), BUDGET_S) > 10**12
    if capability >= (8, 9):
        assert fp8_flops_per_s(card, 8192, BUDGET_S) > rates.matmul_flops_per_s


def test_every_pair_of_gpus_delivers_what_was_sent(card: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    *_, last = peer_copies(devices, budget_s=BUDGET_S)
    assert all(copy.is_correct for copy in last)


@pytest.mark.skipif(not is_wsl(Path("/proc/version").read_text()), reason="is about the Windows Subsystem for Linux")
def test_w61_an_expandable_segment_fails_under_wsl():
    done = subprocess.run(
        [sys.executable, "-c", "import torch; torch.ones(1, device='cuda')"],
        env={**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode and "CUDA driver error" in done.stderr


@pytest.fixture
def needs_fp8() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("needs torchao")


def gain_of(config: dict[str, Any], tokens: int) -> Fp8Gain:
    recipes = (Fp8Recipe.TORCHAO_TENSORWISE,)
    request = Fp8GainRequest(model_config=config, tokens=tokens, seq_len=tokens, recipes=recipes)
    return time_fp8(request, read_hardware().gpus)


@pytest.mark.usefixtures("needs_fp8")
def test_blocks_of_8b_gain_and_blocks_of_64_do_not() -> None:
    gain, small = gain_of(LLAMA_3_8B, 8192), gain_of(TINY_LLAMA, 512)
    assert (gain.problem, small.problem) == (None, None)
    assert gain.compile and gain.library is not None and gain.library.startswith("torchao ")
    assert [block.count for block in gain.blocks] == [32]
    assert gain.speedup is not None and 1.15 <= gain.speedup < 2, "no more than the chip's peaks allow"
    assert small.speedup is not None and not small.pays
