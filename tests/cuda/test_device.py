"""The stand-in itself, and the trial of `trainer.runtime.tools.torch_check` on its cards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_stand_in import RTX_4060, Machine, machine_environment, needs_no_cuda
from gpu_machines import GPU_MACHINES, machine_with

from shardwise.launch.worker import ask
from shardwise.trainer.spec.messages.worker_requests import TorchFacts

pytestmark = needs_no_cuda
TENSORS = """
import torch

card, other, host = torch.ones(3, device="cuda"), torch.ones(3, device="cuda:1"), torch.ones(3)
print(card.device, (card @ card).device, card[1:].device, card.cpu().device, (card * torch.tensor(2.0)).device)
for mixed in (lambda: card + host, lambda: host.add_(card), lambda: card + other, lambda: torch.cat([card, host]),
              lambda: torch.embedding(card[:, None], torch.tensor([1]))):
    try:
        print(mixed())
    except RuntimeError as error:
        print("refused" if "same device" in str(error) else error)
weight = torch.ones(2, 2, device="cuda", requires_grad=True)
(weight @ weight).sum().backward()
print(weight.grad.device, weight.grad.tolist())

del card
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
block = torch.empty(2**20, device="cuda")
view = block[1:]
print(torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before)
free, total = torch.cuda.mem_get_info()
print(free + before, total)
block.untyped_storage().resize_(0)
print(torch.cuda.memory_allocated() - before, view.untyped_storage().nbytes())
torch.cuda.set_per_process_memory_fraction(0.001)
try:
    torch.empty(2**22, device="cuda")
except torch.OutOfMemoryError:
    print("out of memory")
"""


def test_a_tensor_knows_its_device_mixing_raises_and_memory_is_counted_returned_and_limited(tmp_path: Path):
    total = (RTX_4060.memory - RTX_4060.reserved) * 2**20
    done = subprocess.run(
        [sys.executable, "-c", TENSORS],
        env=os.environ | machine_environment(Machine(cards=(RTX_4060, RTX_4060)), tmp_path), capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "cuda:0 cuda:0 cuda:0 cpu cuda:0",
        *["refused"] * 5,
        "cuda:0 [[4.0, 4.0], [4.0, 4.0]]",
        f"{2**22} {2**22}",
        f"{RTX_4060.free * 2**20 - 2**22} {total}",
        "0 0",
        "out of memory",
    ]


EXPANDABLE = "expandable_segments:True"


def trial(name: str, folder: Path, setting: str = EXPANDABLE) -> TorchFacts:
    environment = {**os.environ, **machine_environment(GPU_MACHINES[name], folder), "PYTORCH_ALLOC_CONF": setting}
    module = "shardwise.trainer.runtime.tools.torch_check"
    return ask(module, None, TorchFacts, subject="the check", inherited=environment)


@pytest.mark.parametrize(
    ("name", "setting", "problem"),
    [
        ("t4", EXPANDABLE, "None"),
        ("v100", EXPANDABLE, "no kernel image"),  # at the product: there is no code for it
        ("vgpu", EXPANDABLE, "CUDA driver error"),  # which cannot map memory
        ("vgpu", "", "None"),
    ],
)
def test_a_card_works_or_has_its_problem(name, setting, problem, tmp_path):
    facts = trial(name, tmp_path, setting)
    assert problem in str(facts.devices[0].problem)
    assert facts.cuda == "13.0" and (facts.architectures == machine_with().architectures or name != "t4")


def test_a_driver_that_is_too_old_is_told_in_torch_s_words(tmp_path):
    facts = trial("old_driver", tmp_path)
    assert facts.devices == () and facts.problem
