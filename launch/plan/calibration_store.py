"""Predictions and measurements of earlier runs: append-only JSON lines under the state folder, locked while written.

A line that cannot be read (written by another version, or cut off by a crash) is skipped: the store improves the
next plan and is no condition of it.
"""

import fcntl
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardwise.trainer.planning.calibrate import NO_CORRECTIONS, NO_TIMES, LearnedTimes, rates_source
from shardwise.trainer.planning.candidates import candidate_of, configuration_of
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.schedule import longest_row_decides
from shardwise.trainer.planning.speed.files import export_volume
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.messages.rank_files import saving_choice
from shardwise.trainer.spec.plan import Calibration, CalibrationRecord, Candidate, Plan, RecordSource
from shardwise.trainer.spec.strategy import Checkpointing

if TYPE_CHECKING:
    from shardwise.trainer.spec.report import Report

FILE_NAME = "calibration.jsonl"
MAX_RECORDS = 100  # of one device; every plan.json contains them


def device_key(hardware: Hardware) -> tuple[str, str | None]:
    """(device, driver), the key of a record."""
    if hardware.gpus:
        return hardware.gpus[0].spec_name or hardware.gpus[0].name, hardware.gpus[0].driver
    return f"CPU {hardware.host.cpu_name or 'unknown'}", None


def read_calibration(state_home: Path, hardware: Hardware, *, torch: str) -> Calibration:
    """The newest records of this device, driver and torch, oldest first."""
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
    return Calibration(records=tuple(records[-MAX_RECORDS:]))


def store_measurements(
    state_home: Path,
    report: "Report",
    plan: Plan,
    *,
    on_line: Callable[[str], None],
    source: RecordSource = RecordSource.RUN,
) -> None:
    """Stores what a finished run or trial measured, unless its ranks waited for cores that others used.

    `on_line` gets the reason for which a measurement is not stored.
    """
    from shardwise.trainer.spec.report import Ending, busy_cores  # a plan only reads the store

    if report.ending is not Ending.FINISHED:
        return
    busy = busy_cores(report)
    if busy is not None:
        on_line(f"{busy}: the measurements are not stored for later plans")
        return
    record = record_of_run(report, plan, now=datetime.now(UTC), source=source)
    if record is not None:
        append_calibration(state_home, record, on_line=on_line)


def record_of_run(
    report: "Report", plan: Plan, *, now: datetime, source: RecordSource = RecordSource.RUN
) -> CalibrationRecord | None:
    """Calibration record of a run or a trial of `report.plan`; None if a figure was not measured."""
    measured, stated = report.measured, report.predicted
    peak_bytes, step_s = measured.memory.peak_allocated_bytes, measured.speed.step_s
    if peak_bytes is None or step_s is None:
        return None
    ran, not_compiled = report.plan, None if report.verified is None else report.verified.not_compiled
    is_compiled = ran.compile and not_compiled is None
    predicted = _uncorrected(plan, msgspec.structs.replace(ran, compile=is_compiled))
    times = _measured_times(report, plan) if source is RecordSource.RUN else NO_TIMES
    device, driver = device_key(plan.hardware)
    return CalibrationRecord(
        device=device,
        driver=driver,
        torch=plan.versions.get("torch", "none"),
        strategy=ran.strategy.name,
        predicted_peak_bytes=predicted.memory.peak_allocated_bytes,
        measured_peak_bytes=peak_bytes,
        predicted_step_s=predicted.speed.step_s,
        measured_step_s=step_s,
        finished_at=now.astimezone(UTC).isoformat(timespec="seconds"),
        shardwise=plan.versions.get("shardwise"),
        source=source,
        rates=rates_source(plan.hardware),
        host=os.uname().nodename or None,
        method=ran.method,
        sharding=ran.strategy.sharding,
        offload=ran.strategy.offload,
        precision=ran.strategy.precision,
        num_ranks=ran.num_ranks,
        is_padded=longest_row_decides(plan.data),
        micro_batch=ran.micro_batch,
        seq_len=ran.seq_len,
        tokens_per_step=plan.schedule.tokens_per_step,
        model_type=plan.model_shape.model_type,
        num_parameters=plan.model_shape.num_parameters,
        peak_event=predicted.memory.peak_event,
        predicted_reserved_bytes=predicted.memory.peak_reserved_bytes,
        measured_reserved_bytes=measured.memory.peak_reserved_bytes,
        predicted_device_bytes=predicted.memory.device_bytes,
        measured_device_bytes=measured.memory.device_bytes,
        stated_peak_bytes=stated.memory.peak_allocated_bytes,
        stated_step_s=stated.speed.step_s,
        transformers=plan.versions.get("transformers"),
        is_compiled=is_compiled if ran.compile else None,
        not_compiled=not_compiled,
        moves_activations=ran.activation_offload and ran.checkpointing is Checkpointing.NONE,
        start_up_s=times.start_up_s,
        saved_bytes_per_s=times.saved_bytes_per_s,
        exported_bytes_per_s=times.exported_bytes_per_s,
    )


def _measured_times(report: "Report", plan: Plan) -> LearnedTimes:
    """Start-up and rates of the files of a run; None for what it did not have, or where it was not one attempt."""
    from shardwise.trainer.spec.report import TimePart  # a plan only reads the store

    parts = report.parts_s
    if not parts or report.attempts > 1 or report.resumed_from_step is not None:
        return NO_TIMES
    saving_s, export_s = parts.get(TimePart.SAVING, 0.0), parts.get(TimePart.EXPORT, 0.0)
    waits = not saving_choice(plan.job, plan.hardware, report.plan).is_background
    exported = export_volume(context_of(plan), configuration_of(context_of(plan), report.plan))
    return LearnedTimes(
        start_up_s=parts[TimePart.START_UP],
        saved_bytes_per_s=report.saved_bytes / saving_s if waits and saving_s and report.saved_bytes else None,
        exported_bytes_per_s=(exported.written + exported.read) / export_s if export_s and report.export else None,
        num_runs=1,
    )


def _uncorrected(plan: Plan, candidate: Candidate) -> Candidate:
    """The candidate as the formulas alone predict it: a correction must not be learned from its own results."""
    context = msgspec.structs.replace(context_of(plan), corrections=NO_CORRECTIONS)
    return candidate_of(context, configuration_of(context, candidate))


def append_calibration(state_home: Path, record: CalibrationRecord, *, on_line: Callable[[str], None]) -> None:
    """Adds one line; `on_line` gets the reason if it cannot be written, which is no error of the run."""
    path = state_home / FILE_NAME
    try:
        state_home.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            stream.write(msgspec.json.encode(record) + b"\n")
    except OSError as error:
        on_line(f"{path}: the measurements of this run cannot be stored for later plans: {error.strerror}")
