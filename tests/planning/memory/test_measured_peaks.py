"""Today's planner beside peaks that were measured before: each line of tests/calibration/ is predicted again.

A file of a rehearsal is of tiny models on a CPU; with avx512_bf16 its peaks have oneDNN's working space in them.
"""

from pathlib import Path

import pytest
from accuracy import percentile
from on_gpu.case import Outcome
from on_gpu.peaks import Peak, plan_again, read_peaks

FILES = sorted((Path(__file__).parents[2] / "calibration").glob("*.jsonl"))
Bounds = tuple[float, float]  # of the absolute errors of a file, as shares: the median and the 95th percentile
# Of the peak, and of what stays between steps.
ON_GPU: tuple[Bounds, Bounds] = (0.03, 0.08), (0.01, 0.05)
IN_REHEARSAL: tuple[Bounds, Bounds] = (0.005, 0.05), (0.002, 0.02)
WITH_WORKING_SPACE: tuple[Bounds, Bounds] = (0.01, 0.08), (0.002, 0.02)


def bounds_of(peak: Peak) -> tuple[Bounds, Bounds]:
    if not peak.is_rehearsal:
        return ON_GPU
    return WITH_WORKING_SPACE if "avx512_bf16" in peak.hardware.host.cpu_flags else IN_REHEARSAL


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_peaks_and_what_stays_are_predicted_as_they_were_measured(path: Path, tmp_path: Path):
    """And nothing that ran out of memory is said to fit. A file is of one device and of enough runs."""
    peaks = read_peaks(path)
    assert len({peak.name for peak in peaks}) == len(peaks) >= 15
    assert len({peak.hardware.gpus[0].name if peak.hardware.gpus else "CPU" for peak in peaks}) == 1
    predicted = {peak.name: plan_again(peak, tmp_path).chosen.memory for peak in peaks}
    assert not any(predicted[peak.name].fits for peak in peaks if peak.outcome is Outcome.OUT_OF_MEMORY)
    for counter, bounds in zip(("peak_allocated_bytes", "steady_allocated_bytes"), bounds_of(peaks[0]), strict=True):
        errors = {
            peak.name: abs(getattr(predicted[peak.name], counter) / getattr(peak.measured, counter) - 1)
            for peak in peaks
            if peak.outcome is Outcome.RAN
        }
        worst = sorted(errors, key=lambda name: -errors[name])[:5]
        for share, bound in zip((0.5, 0.95), bounds, strict=True):
            assert percentile(list(errors.values()), share) <= bound, f"{counter}: {worst}"
