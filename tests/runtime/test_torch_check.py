"""A GPU that torch cannot use stops with the exact remedy."""

import subprocess
import sys

import pytest

from trainer.runtime.torch_check import VisibleGpu, find_fault, parse_gpus, runs_on

CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
H100 = VisibleGpu("NVIDIA H100 80GB HBM3", "580.95.05", (9, 0))


def fault(gpu: VisibleGpu, **changes) -> str:
    facts = {"torch_version": "2.13.0+cu130", "cuda": "13.0", "architectures": CUDA_13, "is_available": True}
    return "\n".join(find_fault([gpu], **{**facts, **changes}))


def test_a_fitting_torch_has_no_fault():
    assert fault(H100) == ""
    assert find_fault([], torch_version="2.13.0+cpu", cuda=None, architectures=[], is_available=False) == []


@pytest.mark.parametrize(
    ("gpu", "changes", "expected"),
    [
        (H100, {"cuda": None, "torch_version": "2.13.0+cpu"}, "was built without CUDA"),
        (H100._replace(driver="550.54.15"), {}, "needs driver 580.65.06 or newer"),
        (VisibleGpu("Tesla V100-SXM2-32GB", "580.95.05", (7, 0)), {}, "newest CUDA 12"),
        (H100, {"is_available": False}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_each_fault_names_its_remedy(gpu, changes, expected):
    text = fault(gpu, **changes)
    assert expected in text and "remedy: " in text and gpu.name in text


def test_a_driver_of_cuda_12_runs_any_cuda_12():
    assert fault(H100._replace(driver="535.104.05"), cuda="12.8", architectures=["sm_90"]) == ""


@pytest.mark.parametrize(
    ("capability", "architectures", "expected"),
    [
        ((8, 9), ["sm_86"], True),
        ((8, 0), ["sm_86"], False),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 1), ["compute_120"], True),
        ((9, 0), ["sm_90a"], True),
        ((9, 0), ["gfx90a"], False),
    ],
)
def test_code_runs_on_the_same_major_or_from_older_ptx(capability, architectures, expected):
    assert runs_on(capability, architectures) is expected


def test_the_driver_s_lines_are_read_and_noise_is_passed_over():
    text = "NVIDIA GeForce RTX 4090, 550.54.15, 8.9\nNo devices were found\nGRID, 1, [N/A]\n"
    assert parse_gpus(text) == [VisibleGpu("NVIDIA GeForce RTX 4090", "550.54.15", (8, 9))]


def test_this_machine_has_no_fault_or_says_which():
    answer = subprocess.run(
        [sys.executable, "-P", "-m", "trainer.runtime.torch_check"], capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stderr == "") in ((0, True), (4, False))
