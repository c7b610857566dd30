"""The measurement of a device, on this machine's CPU and, where there is one, on its GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.runtime.measure import measure, memory_bytes_per_s, trainable_dtypes
from trainer.spec import codec
from trainer.spec.hardware import MeasuredRates

CPU = torch.device("cpu")


def test_a_cpu_has_its_rates():
    rates = measure(CPU, budget_s=0.05)
    assert rates.matmul_flops_per_s is not None
    assert rates.matmul_flops_per_s > 10**9  # any core of the last ten years does more
    assert rates.matmul_precision in ("fp32", "bf16")
    assert rates.memory_bytes_per_s is not None
    assert rates.memory_bytes_per_s > 10**8
    assert rates.host_to_device_bytes_per_s is None


def test_a_cpu_is_compared_in_both_precisions_that_it_trains_in():
    assert trainable_dtypes(CPU) == (torch.float32, torch.bfloat16)


def test_a_copy_counts_what_is_read_and_what_is_written(monkeypatch):
    monkeypatch.setattr("trainer.runtime.measure._best_s", lambda work, device, budget_s: 2.0)
    assert memory_bytes_per_s(CPU, 4000, 1.0) == 4000


def test_the_module_writes_its_answer(tmp_path: Path):
    answer = tmp_path / "rates.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-m", "trainer.runtime.measure", answer, "cpu", "0.1"], check=True, env=environment)
    assert codec.read(answer, MeasuredRates).matmul_flops_per_s is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_has_its_rates():
    rates = measure(torch.device("cuda"), budget_s=0.5)
    assert rates.matmul_precision in ("fp16", "bf16")
    assert rates.host_to_device_bytes_per_s is not None
