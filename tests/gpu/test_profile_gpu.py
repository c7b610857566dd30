"""A profile on a real card: the device's operators and allocations, and files for both viewers."""

import gzip
import json
import pickle
from pathlib import Path

import pytest
import torch
from gpu_factory import GpuCase, gpu_plan, run_on_gpu, write_full_rows
from msgspec.structs import replace

from shardwise.launch.probe.machine import read_hardware
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import FIGURES_FILE, PROFILE_FOLDER, ProfileFigures, ProfileRequest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    place = tmp_path_factory.mktemp("profile")
    write_full_rows(place / "rows")
    hardware = read_hardware()
    plan = gpu_plan(GpuCase("profile"), place / "rows", replace(hardware, gpus=hardware.gpus[:1]))
    run_on_gpu(replace(plan, profile=ProfileRequest()), place / "run")
    return place / "run" / PROFILE_FOLDER


def test_the_snapshot_and_the_trace_are_what_the_viewers_take(folder: Path):
    snapshot = pickle.loads((folder / "memory-snapshot.pickle").read_bytes())  # written a moment ago
    assert snapshot["segments"] and any(snapshot["device_traces"])
    with gzip.open(folder / "trace.json.gz") as stream:
        events = json.load(stream)["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert "Allocated memory" in (folder / "memory-summary.txt").read_text()


def test_operators_have_the_time_of_the_device_and_modules_what_they_keep(folder: Path):
    figures = codec.read(folder / FIGURES_FILE, ProfileFigures)
    assert set(figures.files) == {"trace.json.gz", "memory-snapshot.pickle", "memory-summary.txt"}
    assert figures.operators and 0 < sum(each.seconds for each in figures.operators) < figures.step_s
    assert any(each.place.startswith("transformer block ") for each in figures.retained)
