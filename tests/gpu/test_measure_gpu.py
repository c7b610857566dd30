"""The figures that only a GPU has, and what joins several of them."""

from collections.abc import Iterator

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


@pytest.fixture
def card() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    yield torch.device("cuda", 0)
    torch.cuda.empty_cache()


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


def test_fp8_products_are_faster_than_16_bit_ones(card: torch.device) -> None:
    if torch.cuda.get_device_capability(card) < (8, 9):
        pytest.skip("needs compute capability 8.9")
    *_, last = measure(card, budget_s=BUDGET_S)
    assert fp8_flops_per_s(card, 8192, BUDGET_S) > (last.rates.matmul_flops_per_s or 0)


def test_attention_takes_the_flash_kernel(card: torch.device) -> None:
    if torch.cuda.get_device_capability(card) < (8, 0):
        pytest.skip("needs compute capability 8.0")
    assert attention_flops_per_s(card, torch.bfloat16, (1, 16, 2048, 128), BUDGET_S) > 10**12


@pytest.mark.parametrize("to_device", [True, False])
def test_host_copies_are_slower_than_copies_on_the_card(card: torch.device, to_device: bool) -> None:
    *_, last = measure(card, budget_s=BUDGET_S)
    assert host_copy_bytes_per_s(card, 2**28, BUDGET_S, to_device=to_device) < (last.rates.memory_bytes_per_s or 0)


def test_every_pair_of_gpus_delivers_what_was_sent(card: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA GPUs")
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    *_, last = peer_copies(devices, budget_s=BUDGET_S)
    assert all(copy.is_correct for copy in last)
