"""What earlier runs measured is kept for the same device, driver and torch only."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from report_factory import make_report

from launch.calibration_store import append_calibration, read_calibration, record_of_run
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.hardware import Gpu, Hardware, Host
from trainer.spec.report import Figures

NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)
CPU = Hardware(gpus=(), host=Host(cpu_name="A CPU", num_cores=2, ram_bytes=2**30, ram_available_bytes=2**30))
GPU = Hardware(
    gpus=(Gpu(index=0, name="NVIDIA H200", spec_name="H200", memory_bytes=2**37, driver="580.1"),), host=CPU.host
)


def test_a_finished_run_is_found_again_under_its_key(tmp_path: Path):
    for hardware, torch in ((CPU, "2.13.0"), (GPU, "2.13.0"), (GPU, "2.11.0")):
        record = record_of_run(make_report(), hardware, torch=torch, now=NOON)
        assert record is not None
        append_calibration(tmp_path / "state", record)
    (found,) = read_calibration(tmp_path / "state", GPU, torch="2.11.0").records
    assert (found.device, found.driver, found.torch) == ("H200", "580.1", "2.11.0")
    assert (found.predicted_peak_bytes, found.measured_peak_bytes) == (30 * 2**20, 25 * 2**20)
    assert found.finished_at == "2030-01-02T12:00:00+00:00"
    assert len(read_calibration(tmp_path / "state", CPU, torch="2.13.0").records) == 1


def test_a_line_that_cannot_be_read_is_passed_over(tmp_path: Path):
    record = record_of_run(make_report(), CPU, torch="2.13.0", now=NOON)
    assert record is not None
    append_calibration(tmp_path, record)
    with (tmp_path / "calibration.jsonl").open("ab") as stream:
        stream.write(b'{"device": "A CP\n{"other": 1}\n')
    append_calibration(tmp_path, record)
    assert len(read_calibration(tmp_path, CPU, torch="2.13.0").records) == 2


def test_a_run_without_a_measurement_teaches_nothing():
    assert record_of_run(make_report(measured=Figures()), CPU, torch="2.13.0", now=NOON) is None


def test_no_store_is_no_record(tmp_path: Path):
    assert read_calibration(tmp_path / "none", CPU, torch="2.13.0").records == ()


def test_a_state_folder_that_cannot_be_made_is_an_environment_fault():
    record = record_of_run(make_report(), CPU, torch="2.13.0", now=NOON)
    assert record is not None and msgspec.json.encode(record)
    with pytest.raises(EnvironmentFaultError, match="cannot be kept"):
        append_calibration(Path("/proc/nowhere"), record)
