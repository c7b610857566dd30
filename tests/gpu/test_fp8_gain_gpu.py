"""What FP8 gains is timed on a real GPU, as `shardwise train` has it timed: large layers gain, small ones lose."""

import importlib.util

import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from planning_factory import LLAMA_3_8B

from shardwise.launch.plan.fp8 import time_fp8
from shardwise.launch.probe.machine import read_hardware
from shardwise.trainer.spec.messages.worker_requests import Fp8GainRequest

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_fp8() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9")
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs transformer-engine")


def test_layers_of_8b_gain() -> None:
    gain = time_fp8(Fp8GainRequest(model_config=LLAMA_3_8B, tokens=8192), read_hardware().gpus)
    assert gain.problem is None
    assert gain.library is not None and gain.library.startswith("transformer-engine ")
    assert {(each.in_features, each.out_features): each.count for each in gain.shapes} == {
        (4096, 4096): 64, (4096, 1024): 64, (4096, 14336): 64, (14336, 4096): 32,
    }  # fmt: skip
    assert gain.pays
    assert gain.speedup is not None and gain.speedup < 2.2, "no more than the chip's peaks allow"


def test_layers_of_64_do_not() -> None:
    gain = time_fp8(Fp8GainRequest(model_config=TINY_LLAMA, tokens=512), read_hardware().gpus)
    assert gain.problem is None
    assert gain.speedup is not None and not gain.pays
