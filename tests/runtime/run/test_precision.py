"""What each precision is to the libraries, and what is refused before anything is built for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.trainer.runtime.precision.fp8 import check_precision
from shardwise.trainer.runtime.run.types import accelerate_precision, compute_type, weight_type
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.strategy import Precision

TIMEOUT_S = 120


@pytest.mark.parametrize(
    ("precision", "to_accelerate", "weights", "computes"),
    [
        (Precision.FP32, "no", torch.float32, torch.float32),
        (Precision.FP16_MIXED, "no", torch.float32, torch.float16),
        (Precision.BF16_MIXED, "bf16", torch.float32, torch.bfloat16),
        (Precision.BF16, "no", torch.bfloat16, torch.bfloat16),
        (Precision.FP8, "bf16", torch.float32, torch.bfloat16),
    ],
)
def test_what_a_precision_is_to_each_library(precision, to_accelerate, weights, computes):
    assert accelerate_precision(precision) == to_accelerate
    assert (weight_type(precision), compute_type(precision)) == (weights, computes)


def test_fp8_without_a_library_is_refused_before_a_model_is_loaded(monkeypatch):
    for package in ("transformer_engine", "torchao"):
        monkeypatch.setitem(sys.modules, package, None)  # Python's way to say that it is not there
    with pytest.raises(InputError, match="Transformer Engine or torchao"):
        check_precision(Precision.FP8)
    for precision in set(Precision) - {Precision.FP8}:
        check_precision(precision)


# oneDNN reads its limit at the first call, so each child of one process has its own limit.
FP16_PROGRAM = """
import os
import deepspeed.accelerator
from engine_plan_factory import engine_plan
from shardwise.trainer.runtime.precision.mixed_precision import install_precision
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.strategy import Precision
plan = engine_plan(Sharding.ZERO2, precision=Precision.FP16_MIXED, num_ranks=2)
for limit in ("AVX2", "DEFAULT"):
    if pid := os.fork():
        os.waitpid(pid, 0)
        continue
    os.environ["ONEDNN_MAX_CPU_ISA"] = limit
    try:
        install_precision(None, None, plan.chosen, plan.device_kind)
        print(limit, "no error", flush=True)
    except Exception as error:
        print(limit, type(error).__name__, error, flush=True)
    os._exit(0)
"""


def test_deepspeed_needs_fp16_units_on_a_cpu():
    """The limit hides the units that this CPU may have."""
    folders = [Path(__file__).parents[3], Path(__file__).parents[2] / "factories"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = subprocess.run(
        [sys.executable, "-c", FP16_PROGRAM], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=True,
    )  # fmt: skip
    limited, plain = (line for line in done.stdout.splitlines() if line.startswith(("AVX2", "DEFAULT")))
    assert limited.startswith("AVX2 InputError pin.precision") and "avx512_fp16" in limited
    has_units = torch.ops.mkldnn._is_mkldnn_fp16_supported()
    assert plain.startswith("DEFAULT no error" if has_units else "DEFAULT InputError pin.precision")
