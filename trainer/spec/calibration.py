"""Measurements of earlier runs with their predictions.

One record per finished run or trial, keyed by GPU, driver and torch (a machine's name means nothing to the next one).

`predicted_...` is the result of the formulas, before any correction by earlier runs: a correction is learned from it,
so that it never corrects itself. `stated_...` is what the plan showed, correction included. A prediction is only as
good as the formulas and the ceilings it was made with, so a record names both (`shardwise`, `rates`): a run that was
predicted by another version, or before the machine's own ceilings were measured, teaches nothing about today's
predictions of its speed.
"""

from enum import StrEnum

from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.strategy import Method, Precision
from shardwise.trainer.spec.value import Value


class RecordSource(StrEnum):
    """Source of the measurement."""

    RUN = "run"
    TRIAL = "trial"  # a few steps


class RatesSource(StrEnum):
    """Where the ceilings of a predicted step time came from."""

    DATASHEET = "datasheet"  # or assumed, where there is none
    MEASURED = "measured"  # probe --measure


class CalibrationRecord(Value, frozen=True, kw_only=True):
    """Predicted and measured figures of one run; what lines of earlier versions lack is None."""

    device: str  # GPU catalogue or probe name, or the CPU's
    driver: str | None
    torch: str
    strategy: str
    predicted_peak_bytes: int
    measured_peak_bytes: int
    predicted_step_s: float
    measured_step_s: float
    finished_at: str  # UTC, ISO 8601
    shardwise: str | None = None  # version whose formulas predicted
    source: RecordSource = RecordSource.RUN
    rates: RatesSource | None = None
    host: str | None = None  # for a person who wonders where a line is from
    method: Method | None = None
    sharding: Sharding | None = None
    offload: Offload | None = None
    precision: Precision | None = None
    num_ranks: int | None = None
    is_padded: bool = False  # the measured peak is of one step's rows, the predicted one of the longest
    micro_batch: int | None = None
    seq_len: int | None = None
    tokens_per_step: int | None = None
    model_type: str | None = None
    num_parameters: int | None = None
    peak_event: str | None = None
    predicted_reserved_bytes: int | None = None
    measured_reserved_bytes: int | None = None
    predicted_device_bytes: int | None = None
    measured_device_bytes: int | None = None
    stated_peak_bytes: int | None = None
    stated_step_s: float | None = None


class Calibration(Value, frozen=True, kw_only=True):
    """The records that apply to the machine at hand, oldest first."""

    records: tuple[CalibrationRecord, ...] = ()
