"""Measured peaks for the tests: the inputs of a prediction and the measurement, without paths of a machine.

A line of tests/calibration/ has a job relative to a preset, the probed machine and the measured bytes, so that the
current planner can predict the same run again without running anything. A file is of one device; a newer one of the
same device replaces it, because the allocations of the runtime change.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from on_gpu.case import Outcome
from shardwise.launch.plan.gather import PlanInputs, read_inputs
from shardwise.launch.run.ladder import plan_regardless, without_limits
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.job.sections import DataFormat
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import MemoryFigures
from shardwise.trainer.spec.value import Value

ROWS_NAME = "rows.jsonl"  # replaces the rows, which were random


class Peak(Value, frozen=True, kw_only=True):
    """One run, and all inputs of its prediction."""

    name: str
    outcome: Outcome  # ran, or out of memory
    job: dict[str, str]  # as on the command line, with a preset
    num_rows: int
    model_config: dict[str, Any] | None = None  # if it differs from the preset's own
    hardware: Hardware
    versions: dict[str, str]
    measured: MemoryFigures  # if memory ran out, up to that moment

    @property
    def is_rehearsal(self) -> bool:
        return not self.hardware.gpus


def read_peaks(path: Path) -> tuple[Peak, ...]:
    """The lines of a file of tests/calibration/."""
    return tuple(msgspec.json.decode(line, type=Peak) for line in path.read_bytes().splitlines())


def write_peaks(folder: Path, device: str, date: str, peaks: Sequence[Peak]) -> Path | None:
    """Writes `folder`/DEVICE-DATE.jsonl and removes an older file of this device; None if there are no peaks."""
    if not peaks:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{device}-{date}.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(peak) + b"\n" for peak in peaks))
    for older in folder.glob(f"{device}-????-??-??.jsonl"):
        if older != path:
            older.unlink()
    return path


def plan_again(peak: Peak, folder: Path) -> Plan:
    """The current plan of a measured run; `folder` is any writable one."""
    return plan_stated(peak.job, peak.hardware, folder, num_rows=peak.num_rows, model_config=peak.model_config)


def plan_stated(
    job: Mapping[str, str],
    hardware: Hardware,
    folder: Path,
    *,
    num_rows: int,
    model_config: Mapping[str, Any] | None = None,
    vram_bytes: int | None = None,
) -> Plan:
    """The plan of a job on a given machine, whether it fits or not; nothing is measured or probed here.

    `folder` receives a placeholder file for the rows; records of earlier runs are searched only below it.
    `model_config` is given if it differs from the preset's own.
    """
    rows = folder / ROWS_NAME
    rows.write_text("{}\n")
    overrides = [f"{key}={value}" for key, value in (dict(job) | {"data.train": str(rows)}).items()]
    environment = {"HOME": str(folder)}
    inputs = read_inputs(None, overrides, machines=hardware, vram_cap_bytes=vram_bytes, environment=environment)
    if model_config is not None:
        inputs = _with_model(inputs, model_config)
    stated = inputs.resolved.job
    resolved = replace(inputs.resolved, job=replace(stated, limits=without_limits(stated.limits)))
    data = _full_rows(num_rows, stated.train.seq_len, inputs.shape.vocab_size)
    return plan_regardless(inputs._replace(resolved=resolved), data, environment=environment)


def _with_model(inputs: PlanInputs, config: Mapping[str, Any]) -> PlanInputs:
    return inputs._replace(model=replace(inputs.model, config=dict(config)), shape=read_model_shape(dict(config)))


def _full_rows(num_rows: int, seq_len: int, vocab_size: int) -> DataProfile:
    """Rows of token ids, all of the maximum length."""
    return DataProfile(
        source="prepared",
        num_rows=num_rows,
        num_tokens=num_rows * seq_len,
        longest_row=seq_len,
        is_packed=False,
        fingerprint="random",
        vocab_size=vocab_size,
        format=DataFormat.TOKENS,
    )
