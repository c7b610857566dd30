"""The stand-in itself: a tensor knows where it is, mixing raises, and memory is counted and limited."""

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from cuda_stand_in import GTX_1050_TI, RTX_4060, RTX_4090, Machine, machine_environment, needs_no_cuda

pytestmark = needs_no_cuda


def answer_of(machine: Machine, folder: Path, program: str, **environment: str) -> str:
    """What a Python program prints on a machine."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **machine_environment(machine, folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_tensor_knows_its_device_and_mixing_raises(tmp_path: Path):
    answer = answer_of(
        Machine(cards=(RTX_4060, RTX_4060)),
        tmp_path,
        """
        import torch

        card, other, host = torch.ones(3, device="cuda"), torch.ones(3, device="cuda:1"), torch.ones(3)
        print(card.device, (card @ card).device, card[1:].device, card.cpu().device, (card * torch.tensor(2.0)).device)
        for mixed in (lambda: card + host, lambda: card.add_(host), lambda: host.add_(card), lambda: card @ host,
                      lambda: card + other, lambda: torch.cat([card, host]), lambda: torch.addmm(
                          card[:1, None], host[:1, None], card[:1, None]),
                      lambda: torch.embedding(card[:, None], torch.tensor([1]))):
            try:
                print(mixed())
            except RuntimeError as error:
                print("refused" if "same device" in str(error) else error)
        weight = torch.ones(2, 2, device="cuda", requires_grad=True)
        (weight @ weight).sum().backward()
        print(weight.grad.device, weight.grad.tolist())
        """,
    )
    assert answer.splitlines() == [
        "cuda:0 cuda:0 cuda:0 cpu cuda:0",
        *["refused"] * 8,
        "cuda:0 [[4.0, 4.0], [4.0, 4.0]]",
    ]


def test_memory_is_counted_returned_and_limited(tmp_path: Path):
    answer = answer_of(
        Machine(cards=(RTX_4060,)),
        tmp_path,
        """
        import torch

        torch.cuda.reset_peak_memory_stats()
        block = torch.empty(2**20, device="cuda")
        view = block[1:]
        print(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), *torch.cuda.mem_get_info())
        block.untyped_storage().resize_(0)
        print(torch.cuda.memory_allocated(), view.untyped_storage().nbytes())
        torch.cuda.set_per_process_memory_fraction(0.001)
        try:
            torch.empty(2**22, device="cuda")
        except torch.OutOfMemoryError:
            print("out of memory")
        """,
    )
    free, total = (RTX_4060.free * 2**20, (RTX_4060.memory - RTX_4060.reserved) * 2**20)
    assert answer.splitlines() == [f"{2**22} {2**22} {free - 2**22} {total}", "0 0", "out of memory"]


def test_cards_that_are_hidden_are_not_there(tmp_path: Path):
    machine, program = Machine(cards=(RTX_4060, RTX_4090)), "import torch; print(torch.cuda.get_device_name(0))"
    assert "4060" in answer_of(machine, tmp_path / "all", program)
    assert "4090" in answer_of(machine, tmp_path / "one", program, CUDA_VISIBLE_DEVICES="1")
    count = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())"
    assert answer_of(machine, tmp_path / "none", count, CUDA_VISIBLE_DEVICES="").split() == ["False", "0"]


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (Machine(cards=(GTX_1050_TI,)), "no kernel image"),
        (Machine(cards=(RTX_4060,), is_usable=False), "too old"),
        (Machine(cards=(RTX_4060,), has_expandable_segments=False), "CUDA driver error"),
        (Machine(cards=(RTX_4060,)), "worked"),
    ],
)
def test_a_driver_that_fails_fails_where_a_real_one_does(tmp_path: Path, machine: Machine, message: str):
    program = """
        import warnings

        import torch

        warnings.simplefilter("ignore")
        try:
            torch.zeros(1, device="cuda")
            print("worked")
        except RuntimeError as error:
            print(error)
        """
    assert message in answer_of(machine, tmp_path, program, PYTORCH_ALLOC_CONF="expandable_segments:True")


def test_a_machine_is_what_its_nvidia_smi_says(tmp_path: Path):
    machine = Machine(cards=(RTX_4060, replace(RTX_4090, held=2000)), driver="580.95.05")
    environment = machine_environment(machine, tmp_path)
    fields = "index,name,memory.total,memory.free,compute_cap,driver_version"
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "0, NVIDIA GeForce RTX 4060, 8188, 7876, 8.9, 580.95.05",
        "1, NVIDIA GeForce RTX 4090, 24564, 22264, 8.9, 580.95.05",
    ]
