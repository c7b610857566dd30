"""The memory figures against allocations of known size: by part, phase, module, over time, and out of memory."""

import errno
import resource
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardwise.trainer.__main__ import error_line
from shardwise.trainer.runtime.loop import memory_profile as memory
from shardwise.trainer.runtime.run.clock import Clock, Span
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.units import GIB

SIZE = 512
WEIGHT_BYTES = 4 * SIZE * SIZE
CPU = torch.device("cpu")
CAP = 2**40


def trained_linear() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(SIZE, SIZE, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model(torch.ones(1, SIZE)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.fixture
def capped() -> Iterator[None]:
    """A cap on the data of this process, which it is far from."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (CAP, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def test_what_a_profile_writes_down_is_no_part_of_a_cap(capped):
    """Or a run under a cap would end in the one step that is measured. A thread that cannot start is out of memory."""
    assert memory.is_out_of_memory(RuntimeError("can't start new thread"))
    with memory.MemoryProfile(*trained_linear(), CPU).step():
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        assert soft == hard
    assert CAP <= resource.getrlimit(resource.RLIMIT_DATA)[0] < CAP + 2**30


def test_the_peak_of_each_phase_is_reported_with_that_of_the_step():
    model, optimizer = trained_linear()
    profile, clock = memory.MemoryProfile(model, optimizer, CPU), Clock(CPU)
    with clock.measure("data"):
        torch.empty(10_000_000)  # before the step, and no part of it
    with profile.step(clock):
        with clock.measure("forward"):
            loss = model(torch.ones(8, SIZE)).sum()
            scratch = torch.empty(1_000_000)
            del scratch
        with clock.measure("backward"):
            loss.backward()
        with clock.measure("optimizer"):
            later = torch.empty(2_000_000)
            del later
    figures = profile.figures()
    steady = 3 * WEIGHT_BYTES + 4
    assert not model.weight._post_accumulate_grad_hooks
    assert figures.steady_allocated_bytes == steady
    assert figures.parts[memory.GRADIENTS] == figures.parts[memory.WEIGHTS] == WEIGHT_BYTES
    assert figures.parts[memory.OPTIMIZER_STATE] == 2 * WEIGHT_BYTES + 4
    assert 8_000_000 <= figures.parts[memory.ACTIVATIONS] < 8_000_000 + 64 * 1024
    assert figures.peak_allocated_bytes == sum(figures.parts.values())
    assert figures.peak_reserved_bytes is None and figures.device_bytes is None
    assert list(figures.peaks) == ["forward", "backward", "optimizer"]
    assert steady + 4_000_000 <= figures.peaks["forward"] < steady + 4_000_000 + WEIGHT_BYTES
    assert steady + WEIGHT_BYTES <= figures.peaks["backward"] < steady + 2 * WEIGHT_BYTES + 64 * 1024
    assert figures.peaks["optimizer"] == max(figures.peaks.values()) == figures.peak_allocated_bytes
    assert max(point.allocated_bytes for point in figures.timeline) == figures.peak_allocated_bytes
    assert {point.phase for point in figures.timeline} - {""} == {"forward", "backward", "optimizer"}


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("a worker said: out of memory."), False),
        (RuntimeError("Connection closed by peer"), False),
        (ValueError("can't allocate memory"), False),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("CUDA driver error: unknown error"), False),
        (RuntimeError("NCCL error ... Last error:\nCuda failure 2 'out of memory'"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("can't start new thread"), False),
        (None, False),
    ],
)
def test_only_a_failed_allocation_counts_as_out_of_memory(error, is_memory):
    """So does an error that was made of one."""
    assert memory.is_out_of_memory(error) is is_memory
    for with_cause in (True, False):
        raised = InputError("extensions: loss raised it")
        raised.__cause__, raised.__context__ = (error, None) if with_cause else (None, error)
        raised.__suppress_context__ = with_cause
        assert memory.is_out_of_memory(raised) is is_memory


@pytest.mark.parametrize(("setting", "is_hinted"), [("expandable_segments:True", True), ("", False)])
def test_a_driver_that_cannot_map_memory_ends_with_the_setting_that_mends_it(monkeypatch, setting, is_hinted):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
    line = error_line(RuntimeError("CUDA driver error: unknown error\nException raised from ..."))
    assert ("PYTORCH_ALLOC_CONF=expandable_segments:False" in line) is is_hinted and "\n" not in line
    assert "PYTORCH_ALLOC_CONF" not in error_line(RuntimeError("CUDA error: invalid argument"))


def test_a_capped_card_holds_bytes_outside_the_allocator_too(monkeypatch):
    shares = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share))
    for cap, outside in ((8 * GIB, 2 * GIB), (90 * GIB, GIB), (GIB, 2 * GIB)):
        memory.cap_memory(DeviceKind.CUDA, torch.device("cuda:0"), cap, outside_bytes=outside)
    assert shares == [6 / 80, 1.0, 0.0]


SPANS = (Span("forward", 100, 200), Span("backward", 210, 300), Span("optimizer", 310, 400))
EVENTS = [(110, 50), (150, -20), (205, 5), (220, 100), (290, -130), (320, 7), (330, -7)]


def test_a_phase_peaks_at_the_most_that_was_held_in_it():
    assert memory.Curve(EVENTS, 1000, SPANS).peaks() == {"forward": 1050, "backward": 1135, "optimizer": 1012}
    assert memory.Curve([(110, 50)], 1000, SPANS).peaks() == {"forward": 1050, "backward": 1050, "optimizer": 1050}
    assert memory.Curve([], 1000, SPANS).peaks() == {"forward": 1000, "backward": 1000, "optimizer": 1000}
    twice = (Span("forward", 0, 10), Span("backward", 10, 20), Span("forward", 20, 30), Span("backward", 30, 40))
    assert memory.Curve([(5, 10), (12, 90), (19, -95), (25, 30)], 0, twice).peaks() == {"forward": 35, "backward": 100}
    spans = (Span("forward", 100, 200, 10, 50, 40), Span("backward", 200, 300, 40, 90, 20))
    points = memory.timeline_of_spans(spans)
    assert [(round(point.at_s * 1e9), point.allocated_bytes, point.phase) for point in points] == [
        (0, 10, "forward"), (50, 50, "forward"), (100, 40, "forward"), (100, 40, "backward"), (150, 90, "backward"),
        (200, 20, "backward"),
    ]  # fmt: skip
    assert memory.timeline_of_spans(()) == ()
