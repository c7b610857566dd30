"""Records of earlier runs on one device, in one class of rows unless a test is about another."""

from typing import Any

from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.plan import Calibration, CalibrationRecord, RatesSource
from shardwise.trainer.spec.strategy import Method, Precision

GB = 10**9


def record_of(step: float = 1.0, peak: float = 1.0, **facts: Any) -> CalibrationRecord:
    """A run of an 8B model under FSDP that measured these multiples of what was predicted."""
    return CalibrationRecord(
        **{
            "device": "H100-SXM5-80GB", "driver": None, "torch": "2.13.0", "strategy": "fsdp/bf16-mixed/adamw_fused",
            "predicted_peak_bytes": 50 * GB, "measured_peak_bytes": round(peak * 50 * GB), "predicted_step_s": 2.0,
            "measured_step_s": 2.0 * step, "finished_at": "2026-01-01T00:00:00+00:00", "shardwise": "0",
            "rates": RatesSource.DATASHEET, "method": Method.FULL, "sharding": Sharding.FSDP, "offload": Offload.NONE,
            "precision": Precision.BF16_MIXED, "model_type": "llama", "num_parameters": 8_030_261_248, **facts,
        }
    )  # fmt: skip


def calibration_of(*records: CalibrationRecord) -> Calibration:
    return Calibration(records=records)
