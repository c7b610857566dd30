"""What earlier runs measured beside what was predicted for them.

One record per finished run, keyed by GPU, driver and torch (a machine's name means nothing to the next machine).
"""

from trainer.spec.value import Value


class CalibrationRecord(Value, frozen=True, kw_only=True):
    """Predicted and measured figures of one finished run."""

    device: str  # GPU catalogue or probe name, or the CPU's
    driver: str | None
    torch: str
    strategy: str
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_step_s: float
    measured_step_s: float
    finished_at: str  # UTC, ISO 8601


class Calibration(Value, frozen=True, kw_only=True):
    """The records that apply to the machine at hand, oldest first."""

    records: tuple[CalibrationRecord, ...] = ()
