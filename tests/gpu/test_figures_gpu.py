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


@pytest.fixture(scope="module")
def run_in(card: object, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[GpuRun, Path]]:
    """Runs a small job on the card, with changes of its plan: the run and its folder."""

    def run(name: str, **changes: Any) -> tuple[GpuRun, Path]:
        place = tmp_path_factory.mktemp(name)
        write_full_rows(place / "rows")
        hardware = read_hardware()
        plan = gpu_plan(GpuCase(name), place / "rows", replace(hardware, gpus=hardware.gpus[:1]))
        return run_on_gpu(replace(plan, **changes), place / "run"), place / "run"

    return run


@pytest.fixture(scope="module")
def run(run_in: Callable[..., tuple[GpuRun, Path]]) -> tuple[GpuRun, Path]:
    return run_in("metrics")


@pytest.fixture(scope="module")
def profile(run_in: Callable[..., tuple[GpuRun, Path]]) -> Path:
    return run_in("profile", profile=ProfileRequest())[1] / PROFILE_FOLDER


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


def test_the_snapshot_and_the_trace_are_what_the_viewers_take(profile: Path):
    snapshot = pickle.loads((profile / "memory-snapshot.pickle").read_bytes())  # written a moment ago
    assert snapshot["segments"] and any(snapshot["device_traces"])
    with gzip.open(profile / "trace.json.gz") as stream:
        events = json.load(stream)["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert "Allocated memory" in (profile / "memory-summary.txt").read_text()


def test_operators_have_the_time_of_the_device_and_modules_what_they_keep(profile: Path):
    figures = codec.read(profile / FIGURES_FILE, ProfileFigures)
    assert set(figures.files) == {"trace.json.gz", "memory-snapshot.pickle", "memory-summary.txt"}
    assert figures.operators and 0 < sum(each.seconds for each in figures.operators) < figures.step_s
    assert any(each.place.startswith("transformer block ") for each in figures.retained)
