"""The figures that only a GPU has, and what joins several of them."""

import pytest
import torch

from shardwise.trainer.runtime.tools.measure import (
    attention_flops_per_s,
    fp8_flops_per_s,
    host_copy_bytes_per_s,
    measure,
    peer_copies,
)

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
    assert rates.matmul_flops_per_s is not None
    assert rates.fp32_flops_per_s is not None
    assert rates.matmul_flops_per_s > rates.fp32_flops_per_s
    assert rates.memory_bytes_per_s is not None
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
