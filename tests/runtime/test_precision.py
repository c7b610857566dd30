"""What each precision is to the libraries, and what is refused before anything is built for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rank_factory import rank_plan

from trainer.planning.setting import fp8_recipe_of
from trainer.runtime.precision import accelerate_precision, check_precision, compute_type, weight_type
from trainer.spec import codec
from trainer.spec.errors import InputError
from trainer.spec.plan import Plan
from trainer.spec.strategy import Fp8Recipe, Precision

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
    with pytest.raises(InputError, match=r"needs Transformer Engine or torchao, and neither is installed"):
        check_precision(Precision.FP8)
    for precision in set(Precision) - {Precision.FP8}:
        check_precision(precision)


@pytest.mark.parametrize(("limit", "words"), [({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "InputError"), ({}, "no error")])
def test_deepspeed_needs_fp16_units_on_a_cpu(limit, words):
    """oneDNN is kept from the units that this CPU may have."""
    if not limit and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        words = "InputError"
    program = (
        "from engine_plan_factory import engine_plan\n"
        "from trainer.runtime.mixed_precision import install_precision\n"
        "from trainer.spec.strategy import Precision, Sharding\n"
        "plan = engine_plan(Sharding.ZERO2, precision=Precision.FP16_MIXED, num_ranks=2)\n"
        "try:\n"
        "    install_precision(None, plan.chosen, plan.device_kind)\n"
        "    print('no error')\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    folders = [Path(__file__).parents[2], Path(__file__).parents[1] / "factories"]
    environment = {
        **os.environ, **limit, "DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join(map(str, folders)),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    assert done.stdout.splitlines()[-1].startswith(words), done.stdout
    assert words == "no error" or "this CPU has no fp16 units (avx512_fp16)" in done.stdout


def test_a_plan_keeps_its_recipe_and_one_without_is_read(tmp_path):
    plan = rank_plan(tmp_path, precision=Precision.FP8, fp8_recipe=Fp8Recipe.BLOCK)
    path = tmp_path / "plan.json"
    codec.write(path, plan)
    assert codec.read(path, Plan).chosen.fp8_recipe is Fp8Recipe.BLOCK
    older = json.loads(path.read_text())
    del older["candidates"][0]["fp8_recipe"]
    path.write_text(json.dumps(older))
    assert codec.read(path, Plan).chosen.fp8_recipe is None


@pytest.mark.parametrize(
    ("precision", "pinned", "recipe"),
    [
        (Precision.FP8, None, Fp8Recipe.CURRENT),
        (Precision.FP8, Fp8Recipe.MXFP8, Fp8Recipe.MXFP8),
        (Precision.BF16_MIXED, None, None),
    ],
)
def test_the_recipe_is_the_pinned_one_or_current_scaling(precision, pinned, recipe):
    assert fp8_recipe_of(precision, pinned) is recipe
