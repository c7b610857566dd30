"""A cancelled run does not continue by itself, and continues when a person starts it again."""

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shardwise.launch.rundir.cancel_flag import (
    is_cancelled,
    must_end_at_start,
    read_cancel_flag,
    write_cancel_flag,
)
from shardwise.trainer.spec.errors import EnvironmentFaultError

NOON = datetime(2030, 1, 2, 12, 0, 0, tzinfo=UTC)
ARRAY = {"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12"}


def test_the_flag_names_time_and_user(tmp_path: Path):
    assert not is_cancelled(tmp_path) and read_cancel_flag(tmp_path) is None
    assert not must_end_at_start(tmp_path, {"SLURM_JOB_ID": "12"})
    write_cancel_flag(tmp_path, now=NOON, job_ids=("12",))
    flag = read_cancel_flag(tmp_path)
    assert is_cancelled(tmp_path) and flag is not None
    assert flag.startswith("cancelled 2030-01-02T12:00:00Z by ") and flag.endswith(f"@{os.uname().nodename}")


@pytest.mark.parametrize(
    ("environment", "ends"),
    [
        ({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}, True),  # queued again
        ({"SLURM_JOB_ID": "13"}, True),  # the next of its chain
        (ARRAY | {"SLURM_ARRAY_TASK_ID": "3"}, True),
        (ARRAY | {"SLURM_ARRAY_TASK_ID": "4"}, False),  # another point
        ({"SLURM_JOB_ID": "14"}, False),  # sbatch by hand
        ({}, False),  # train --resume
    ],
)
def test_only_jobs_that_were_cancelled_end_and_any_other_start_removes_the_flag(tmp_path: Path, environment, ends):
    write_cancel_flag(tmp_path, now=NOON, job_ids=("12", "13", "12_3"))
    assert must_end_at_start(tmp_path, environment) is ends
    assert is_cancelled(tmp_path) is ends


def test_a_flag_that_cannot_be_written_is_an_environment_fault():
    with pytest.raises(EnvironmentFaultError, match="/proc"):
        write_cancel_flag(Path("/proc"), now=NOON)
