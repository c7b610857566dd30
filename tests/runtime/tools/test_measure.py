"""The measurement of a device and of copies between devices, on this machine's CPU."""

from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
import torch

from shardwise.trainer.runtime.tools.measure import (
    attention_flops_per_s,
    host_adam_bytes_per_s,
    measure,
    memory_bytes_per_s,
    peer_copies,
)
from shardwise.trainer.runtime.tools.torch_check import _expands_segments
from shardwise.trainer.spec.hardware import PeerCopy

CPU = torch.device("cpu")


def test_a_cpu_has_its_rates_one_figure_after_the_other():
    measurements = list(measure(CPU, budget_s=0.02))
    rates = measurements[-1].rates
    assert measurements[-1].notes == ()
    assert (rates.matmul_flops_per_s or 0) > 10**9  # any core of the last ten years does more
    assert rates.matmul_precision in ("fp32", "bf16")
    for figure in (rates.attention_flops_per_s, rates.memory_bytes_per_s, rates.host_adam_bytes_per_s):
        assert figure is not None and figure > 10**8
    assert rates.host_to_device_bytes_per_s is None
    figures = [msgspec.structs.asdict(step.rates).values() for step in measurements]
    known = [sum(value not in (None, ()) for value in each) for each in figures]
    assert all(before < after for before, after in pairwise(known))


def test_a_figure_that_cannot_be_had_is_a_line_and_the_others_follow_but_an_error_of_the_gpu_is_the_end(monkeypatch):
    def fails(message: str) -> Callable[..., object]:
        def call(*_: object, **__: object) -> object:
            raise RuntimeError(message)

        return call

    no_kernel = fails("No available kernel. Aborting execution.\nmore")
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", no_kernel)
    last = list(measure(CPU, budget_s=0.01))[-1]
    assert last.notes == ("attention: not measured, No available kernel. Aborting execution.",)
    assert last.rates.attention_flops_per_s is None
    assert last.rates.memory_bytes_per_s is not None
    monkeypatch.setattr("torch.mm", fails("CUDA error: an illegal memory access was encountered"))
    (last,) = measure(CPU, budget_s=0.01)
    assert last.notes == ("matrix products: not measured, CUDA error: an illegal memory access was encountered",)


def test_work_is_counted_as_it_is_done(monkeypatch):
    monkeypatch.setattr("shardwise.trainer.runtime.tools.measure.best_seconds", lambda work, device, budget_s: 2.0)
    assert memory_bytes_per_s(CPU, 4000, 1.0) == 4000  # read and written
    assert host_adam_bytes_per_s(1000, 1.0) == 28 * 1000 // 2
    # two products of 2 flops an element, half of the scores masked
    assert attention_flops_per_s(CPU, torch.float32, (1, 2, 8, 4), 1.0) == 2 * 2 * 2 * 8 * 8 * 4 // 2 // 2


def test_every_pair_is_tried_both_ways_and_entered_before_it_starts():
    steps = list(peer_copies([CPU, CPU], budget_s=0.0))
    assert [[(copy.a, copy.b, copy.is_correct) for copy in step] for step in steps] == [
        [(0, 1, False)], [(0, 1, True)], [(0, 1, True), (1, 0, False)], [(0, 1, True), (1, 0, True)],
    ]  # fmt: skip
    assert steps[0][0] == PeerCopy(a=0, b=1)
    assert all(copy.bytes_per_s is not None for copy in steps[-1])


@pytest.mark.parametrize(
    ("kinds", "expands"), [([], None), ([True, True], True), ([True, False], False), ([True, None], None)]
)
def test_the_allocator_expands_segments_where_every_segment_is_an_expandable_one(kinds, expands, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"is_expandable": kind} for kind in kinds])
    assert _expands_segments() is expands


def test_a_copy_that_delivers_other_values_is_found(monkeypatch):
    def corrupting(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        target[:] = source
        target[-1] += 1
        return target

    monkeypatch.setattr(torch.Tensor, "copy_", corrupting)
    *_, last = peer_copies([CPU, CPU], budget_s=0.0)
    assert [copy.is_correct for copy in last] == [False, False]
