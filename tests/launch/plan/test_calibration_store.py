"""What earlier runs measured is kept for the same device, driver and torch only, with what the formulas alone said."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from engine_plan_factory import engine_plan
from msgspec.structs import replace
from report_factory import calibration_of, make_report, record_of

from shardwise.launch.plan import calibration_store as store
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.hardware import Gpu, Hardware, Host, MeasuredRates
from shardwise.trainer.spec.plan import CalibrationRecord, Plan, RatesSource, RecordSource
from shardwise.trainer.spec.report import Ending
from shardwise.trainer.spec.strategy import Precision

NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)
CPU = Hardware(gpus=(), host=Host(cpu_name="A CPU", num_cores=2, ram_bytes=2**34, ram_available_bytes=2**34))
GPU = Hardware(
    gpus=(Gpu(index=0, name="NVIDIA H200", spec_name="H200", memory_bytes=2**37, driver="580.1"),), host=CPU.host
)
MIB = 2**20


def plan_on(hardware: Hardware, *, torch: str = "2.13.0", **facts: object) -> Plan:
    plan = engine_plan(Sharding.NONE, hardware=hardware)
    return replace(plan, versions={"torch": torch, "shardwise": "0.2"}, **facts)


def retained(plan: Plan, **facts: Any) -> CalibrationRecord:
    record = store.record_of_run(make_report(), plan, now=NOON, **facts)
    assert record is not None
    return record


def test_a_finished_run_is_found_again_under_its_key_with_what_it_may_be_compared_with(tmp_path: Path):
    for hardware, torch in ((CPU, "2.13.0"), (GPU, "2.13.0"), (GPU, "2.11.0")):
        store.append_calibration(tmp_path / "state", retained(plan_on(hardware, torch=torch)), on_line=print)
    (found,) = store.read_calibration(tmp_path / "state", GPU, torch="2.11.0").records
    assert (found.device, found.driver, found.torch) == ("H200", "580.1", "2.11.0")
    assert (found.measured_peak_bytes, found.measured_step_s) == (25 * MIB, 0.8)
    assert found.finished_at == "2030-01-02T12:00:00+00:00"
    (found,) = store.read_calibration(tmp_path / "state", CPU, torch="2.13.0").records
    assert (found.shardwise, found.source, found.rates) == ("0.2", RecordSource.RUN, RatesSource.DATASHEET)
    assert (found.sharding, found.precision, found.num_ranks) == (Sharding.NONE, Precision.FP32, 1)
    assert (found.model_type, found.num_parameters) == ("llama", plan_on(CPU).model_shape.num_parameters)
    tried = retained(plan_on(replace(CPU, rates=MeasuredRates(matmul_flops_per_s=10**11))), source=RecordSource.TRIAL)
    assert (tried.source, tried.rates) == (RecordSource.TRIAL, RatesSource.MEASURED)


def test_what_a_correction_added_is_no_part_of_what_was_predicted():
    """Or the next correction would take it for the formulas' own, and undo it."""
    plain = plan_on(CPU)
    learned = record_of(
        4.0, 1.5, shardwise="0.2", precision=Precision.FP32, sharding=Sharding.NONE,
        num_parameters=plain.model_shape.num_parameters,
    )  # fmt: skip
    corrected = replace(plain, calibration=calibration_of(*[learned] * 9))
    assert context_of(corrected).corrections.of(plain.chosen.strategy, plain.chosen.method).step.value > 3
    before, after = retained(plain), retained(corrected)
    assert after.predicted_step_s == before.predicted_step_s
    assert after.predicted_peak_bytes == before.predicted_peak_bytes
    assert (after.stated_step_s, after.stated_peak_bytes) == (1.0, 30 * MIB)  # what the report shows


def test_a_line_of_an_earlier_version_is_still_read_and_one_that_cannot_be_is_passed_over(tmp_path: Path):
    line = {
        "device": "CPU A CPU", "driver": None, "torch": "2.13.0", "strategy": "none/fp32/adamw",
        "predicted_peak_bytes": 10, "measured_peak_bytes": 11, "predicted_step_s": 1.0, "measured_step_s": 2.0,
        "finished_at": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    damaged = b'{"device": "A CP\n{"other": 1}\n'
    (tmp_path / "calibration.jsonl").write_bytes(json.dumps(line).encode() + b"\n" + damaged)
    store.append_calibration(tmp_path, retained(plan_on(CPU)), on_line=print)
    old, new = store.read_calibration(tmp_path, CPU, torch="2.13.0").records
    assert (old.measured_step_s, old.shardwise, old.sharding) == (2.0, None, None)
    assert new == retained(plan_on(CPU))


def test_only_the_newest_records_are_read(tmp_path: Path):
    for number in range(store.MAX_RECORDS + 3):
        store.append_calibration(
            tmp_path, replace(retained(plan_on(CPU)), measured_peak_bytes=number + 1), on_line=print
        )
    found = store.read_calibration(tmp_path, CPU, torch="2.13.0").records
    assert [found[0].measured_peak_bytes, found[-1].measured_peak_bytes] == [4, store.MAX_RECORDS + 3]


@pytest.mark.parametrize(
    ("ending", "queued", "is_stored"),
    [(ending, None, ending is Ending.FINISHED) for ending in Ending]
    + [(Ending.FINISHED, 0.1, True), (Ending.FINISHED, 0.5, False)],
)
def test_only_a_run_that_finished_on_cores_that_were_free_corrects_plans(tmp_path: Path, ending, queued, is_stored):
    """One that was cut off has measured fewer steps, or what a step took before it failed."""
    report, lines = make_report(ending=ending), list[str]()
    speed = replace(report.measured.speed, queued_share=queued)
    report = replace(report, measured=replace(report.measured, speed=speed))
    store.store_measurements(tmp_path, report, plan_on(CPU), on_line=lines.append)
    records = store.read_calibration(tmp_path, CPU, torch="2.13.0").records
    assert [record.measured_step_s for record in records] == [0.8] * is_stored
    assert [line for line in lines if "50%" in line] == lines and len(lines) == (queued == 0.5)
