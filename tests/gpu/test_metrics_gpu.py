"""What a real card tells of each step: peaks by phase, its own counters, and no more than it costs."""

from pathlib import Path

import pytest
import torch
from gpu_factory import GpuCase, GpuRun, gpu_plan, run_on_gpu, write_full_rows
from msgspec.structs import replace
from workplace_factory import read_metrics

from shardwise.launch.probe.machine import read_hardware

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[GpuRun, Path]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    folder = tmp_path_factory.mktemp("metrics")
    write_full_rows(folder / "rows")
    hardware = read_hardware()
    plan = gpu_plan(GpuCase("metrics"), folder / "rows", replace(hardware, gpus=hardware.gpus[:1]))
    return run_on_gpu(plan, folder / "run"), folder / "run"


def test_the_peak_of_a_step_is_the_highest_of_its_phases(run: tuple[GpuRun, Path]):
    for row in read_metrics(run[1]).values():
        phases = [row[f"memory_peak_{phase}_bytes"] for phase in ("forward", "backward", "optimizer")]
        assert row["memory_peak_bytes"] >= max(phases) > 0
        assert row["memory_allocated_bytes"] <= row["memory_peak_bytes"] <= row["memory_reserved_bytes"]


def test_the_profiled_step_has_a_timeline(run: tuple[GpuRun, Path]):
    memory = run[0].report.measured.memory
    assert memory.peak_allocated_bytes is not None and memory.steady_allocated_bytes is not None
    assert max(memory.peaks.values()) <= memory.peak_allocated_bytes
    assert [point.phase for point in memory.timeline][::3] == ["forward", "backward", "optimizer"]
    assert min(point.allocated_bytes for point in memory.timeline) >= memory.steady_allocated_bytes


def test_the_card_tells_how_it_is(run: tuple[GpuRun, Path]):
    rows = [row for row in read_metrics(run[1]).values() if "memory_device_bytes" in row]
    assert rows, "the thread has asked the driver by the end of the run"
    assert rows[-1]["memory_device_bytes"] >= rows[-1]["memory_allocated_bytes"]
    assert 0 <= rows[-1]["gpu_utilization"] <= 1 and 0 < rows[-1]["gpu_temperature_c"] < 120
