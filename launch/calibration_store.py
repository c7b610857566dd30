"""The machine's memory of earlier predictions: append-only JSON lines under the state folder, locked while written.

A line that cannot be read (written by another version, or cut off by a crash) is passed over: the store is a help to
the next plan, never a condition of it.
"""

import fcntl
import os
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from trainer.spec.calibration import Calibration, CalibrationRecord
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.hardware import Hardware
from trainer.spec.report import Report

FILE_NAME = "calibration.jsonl"


def device_key(hardware: Hardware) -> tuple[str, str | None]:
    """(device, driver) that a record is kept under."""
    if hardware.gpus:
        return hardware.gpus[0].spec_name or hardware.gpus[0].name, hardware.gpus[0].driver
    return f"CPU {hardware.host.cpu_name or 'unknown'}", None


def read_calibration(state_home: Path, hardware: Hardware, *, torch: str) -> Calibration:
    """The records of this device, driver and torch, oldest first."""
    path = state_home / FILE_NAME
    if not path.is_file():
        return Calibration()
    device, driver = device_key(hardware)
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = msgspec.json.decode(line, type=CalibrationRecord)
        except msgspec.DecodeError:
            continue
        if (record.device, record.driver, record.torch) == (device, driver, torch):
            records.append(record)
    return Calibration(records=tuple(records))


def record_of_run(report: Report, hardware: Hardware, *, torch: str, now: datetime) -> CalibrationRecord | None:
    """What a finished run teaches; None where a figure was not measured."""
    predicted, measured = report.predicted, report.measured
    figures = (
        predicted.memory.peak_allocated_bytes,
        measured.memory.peak_allocated_bytes,
        predicted.speed.step_s,
        measured.speed.step_s,
    )
    if figures[0] is None or figures[1] is None or figures[2] is None or figures[3] is None:
        return None
    device, driver = device_key(hardware)
    return CalibrationRecord(
        device=device,
        driver=driver,
        torch=torch,
        strategy=report.plan.strategy.name,
        predicted_peak_bytes=figures[0],
        measured_peak_bytes=figures[1],
        predicted_step_s=figures[2],
        measured_step_s=figures[3],
        finished_at=now.astimezone(UTC).isoformat(timespec="seconds"),
    )


def append_calibration(state_home: Path, record: CalibrationRecord) -> None:
    """Adds one line."""
    path = state_home / FILE_NAME
    try:
        state_home.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise EnvironmentFaultError(f"{path}: the calibration cannot be kept: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, msgspec.json.encode(record) + b"\n")
    finally:
        os.close(descriptor)
