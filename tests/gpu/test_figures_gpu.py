"""What a real card tells of each step, and a profile of one: peaks by phase, counters, operators and allocations."""

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_factory import GpuCase, GpuRun, gpu_plan, run_on_gpu, write_full_rows
from msgspec.structs import replace
from workplace_factory import read_metrics

from shardwise.launch.probe.machine import read_hardware
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import FIGURES_FILE, PROFILE_FOLDER, ProfileFigures, ProfileRequest

pytestmark = pytest.mark.gpu


@pytest.fixture
def run_in(card: object, tmp_path: Path) -> Callable[..., tuple[GpuRun, Path]]:
    def run(name: str, **changes: Any) -> tuple[GpuRun, Path]:
        place = tmp_path / name
        write_full_rows(place / "rows")
        hardware = read_hardware()
        plan = gpu_plan(GpuCase(name), place / "rows", replace(hardware, gpus=hardware.gpus[:1]))
        return run_on_gpu(replace(plan, **changes), place / "run"), place / "run"

    return run


def test_a_step_has_the_peaks_of_its_phases_a_timeline_and_the_state_of_the_card(run_in):
    run, run_dir = run_in("metrics")
    rows = read_metrics(run_dir).values()
    for row in rows:
        phases = [row[f"memory_peak_{phase}_bytes"] for phase in ("forward", "backward", "optimizer")]
        assert row["memory_peak_bytes"] >= max(phases) > 0
        assert row["memory_allocated_bytes"] <= row["memory_peak_bytes"] <= row["memory_reserved_bytes"]
    memory = run.report.measured.memory
    assert max(memory.peaks.values()) <= memory.peak_allocated_bytes
    assert [point.phase for point in memory.timeline][::3] == ["forward", "backward", "optimizer"]
    assert min(point.allocated_bytes for point in memory.timeline) >= memory.steady_allocated_bytes
    *_, last = [row for row in rows if "memory_device_bytes" in row]  # the thread has asked the driver by then
    assert last["memory_device_bytes"] >= last["memory_allocated_bytes"]
    assert 0 <= last["gpu_utilization"] <= 1 and 0 < last["gpu_temperature_c"] < 120


def test_a_profile_has_what_the_viewers_take_and_the_time_of_operators_on_the_device(run_in):
    profile = run_in("profile", profile=ProfileRequest())[1] / PROFILE_FOLDER
    snapshot = pickle.loads((profile / "memory-snapshot.pickle").read_bytes())  # written a moment ago
    assert snapshot["segments"] and any(snapshot["device_traces"])
    with gzip.open(profile / "trace.json.gz") as stream:
        events = json.load(stream)["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert "Allocated memory" in (profile / "memory-summary.txt").read_text()
    figures = codec.read(profile / FIGURES_FILE, ProfileFigures)
    assert set(figures.files) == {"trace.json.gz", "memory-snapshot.pickle", "memory-summary.txt"}
    assert figures.operators and 0 < sum(each.seconds for each in figures.operators) < figures.step_s
