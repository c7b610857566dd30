"""Today's planner beside peaks that were measured before: each line of tests/calibration/ is predicted again.

Nothing runs, and torch is not needed: a line holds the job, the machine and what the run came to
(`benchmarks/gpu.py --write`). A file of a rehearsal is of tiny models on a CPU, where a peak is what a profile adds up;
with avx512_bf16 that has oneDNN's working space in it, 50 to 200 KiB of peaks of 1 to 4 MiB.
"""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    from accuracy import percentile
    from on_gpu.case import Outcome
    from on_gpu.peaks import Peak, plan_again, read_peaks
finally:
    sys.path.remove(str(BENCHMARKS))

FILES = sorted((Path(__file__).parents[2] / "calibration").glob("*.jsonl"))


class Bounds(NamedTuple):
    """Of the absolute errors of a file, as shares."""

    median: float
    p95: float


PEAK_ON_GPU, STEADY_ON_GPU = Bounds(0.03, 0.08), Bounds(0.01, 0.05)
PEAK_IN_REHEARSAL, STEADY_IN_REHEARSAL = Bounds(0.005, 0.05), Bounds(0.002, 0.02)
PEAK_WITH_WORKING_SPACE = Bounds(0.01, 0.08)


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.stem)
def peaks(request: pytest.FixtureRequest) -> tuple[Peak, ...]:
    return read_peaks(request.param)


def errors(peaks: tuple[Peak, ...], counter: str, folder: Path) -> dict[str, float]:
    """prediction / measurement - 1 of each run that ended in order."""
    return {
        peak.name: getattr(plan_again(peak, folder).chosen.memory, counter) / getattr(peak.measured, counter) - 1
        for peak in peaks
        if peak.outcome is Outcome.RAN
    }


def breaches(found: dict[str, float], bounds: Bounds) -> str:
    """What exceeds the bounds, the worst first; empty where nothing does."""
    sizes = [abs(error) for error in found.values()]
    median, p95 = percentile(sizes, 0.5), percentile(sizes, 0.95)
    if median <= bounds.median and p95 <= bounds.p95:
        return ""
    worst = sorted(found, key=lambda name: -abs(found[name]))[:5]
    names = ", ".join(f"{name} {found[name]:+.1%}" for name in worst)
    return f"median {median:.2%} of {bounds.median:.1%}, 95th percentile {p95:.2%} of {bounds.p95:.1%}: {names}"


def peak_bounds(peak: Peak) -> Bounds:
    if not peak.is_rehearsal:
        return PEAK_ON_GPU
    return PEAK_WITH_WORKING_SPACE if "avx512_bf16" in peak.hardware.host.cpu_flags else PEAK_IN_REHEARSAL


def test_peaks_are_predicted_as_they_were_measured(peaks: tuple[Peak, ...], tmp_path: Path):
    assert breaches(errors(peaks, "peak_allocated_bytes", tmp_path), peak_bounds(peaks[0])) == ""


def test_what_stays_between_steps_is_predicted_as_it_was_measured(peaks: tuple[Peak, ...], tmp_path: Path):
    bounds = STEADY_IN_REHEARSAL if peaks[0].is_rehearsal else STEADY_ON_GPU
    assert breaches(errors(peaks, "steady_allocated_bytes", tmp_path), bounds) == ""


def test_nothing_that_ran_out_of_memory_is_said_to_fit(peaks: tuple[Peak, ...], tmp_path: Path):
    out = [peak for peak in peaks if peak.outcome is Outcome.OUT_OF_MEMORY]
    assert [peak.name for peak in out if plan_again(peak, tmp_path).chosen.memory.fits] == []


def test_a_file_is_of_one_device_and_of_enough_runs(peaks: tuple[Peak, ...]):
    assert len({peak.name for peak in peaks}) == len(peaks) >= 15
    assert len({peak.hardware.gpus[0].name if peak.hardware.gpus else "CPU" for peak in peaks}) == 1


def test_measurements_that_are_off_would_be_seen(peaks: tuple[Peak, ...], tmp_path: Path):
    def larger(peak: Peak) -> Peak:
        measured = peak.measured
        assert measured.peak_allocated_bytes is not None
        return replace(
            peak, measured=replace(measured, peak_allocated_bytes=round(1.1 * measured.peak_allocated_bytes))
        )

    ran = tuple(larger(peak) for peak in peaks if peak.outcome is Outcome.RAN)
    assert "median" in breaches(errors(ran, "peak_allocated_bytes", tmp_path), PEAK_ON_GPU)


def test_there_is_something_to_predict():
    assert FILES


def test_predicting_again_loads_no_torch():
    words = "import sys; import on_gpu.peaks; sys.exit('torch' in sys.modules)"
    path = f"{BENCHMARKS}:{BENCHMARKS.parent}"
    done = subprocess.run([sys.executable, "-c", words], env={"PYTHONPATH": path}, check=False)
    assert done.returncode == 0
