"""A cancelled run does not go on by itself, and goes on when a person starts it again."""

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from launch.rundir.cancel_flag import clear_mark, is_cancelled, mark_cancelled, must_end_at_start, own_job, read_mark
from trainer.spec.errors import EnvironmentFaultError

NOON = datetime(2030, 1, 2, 12, 0, 0, tzinfo=UTC)


def test_the_mark_says_when_and_by_whom(tmp_path: Path):
    assert not is_cancelled(tmp_path) and read_mark(tmp_path) is None
    mark_cancelled(tmp_path, now=NOON, job_ids=("12",))
    assert is_cancelled(tmp_path)
    assert read_mark(tmp_path).startswith("cancelled 2030-01-02T12:00:00Z by ")
    assert read_mark(tmp_path).endswith(f"@{os.uname().nodename}")
    clear_mark(tmp_path)
    clear_mark(tmp_path)
    assert not is_cancelled(tmp_path)


@pytest.mark.parametrize(
    "environment",
    [{"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "13"}],
    ids=["queued again", "the next of its chain"],
)
def test_a_job_that_was_cancelled_ends_when_it_starts(tmp_path: Path, environment):
    mark_cancelled(tmp_path, now=NOON, job_ids=("12", "13"))
    assert must_end_at_start(tmp_path, environment)
    assert is_cancelled(tmp_path), "and so would the next"


@pytest.mark.parametrize("environment", [{"SLURM_JOB_ID": "14"}, {}], ids=["sbatch by hand", "train --resume"])
def test_a_start_by_a_person_takes_the_mark_away(tmp_path: Path, environment):
    mark_cancelled(tmp_path, now=NOON, job_ids=("12", "13"))
    assert not must_end_at_start(tmp_path, environment)
    assert not is_cancelled(tmp_path)


def test_points_of_an_array_are_told_apart(tmp_path: Path):
    mark_cancelled(tmp_path, now=NOON, job_ids=("12_3",))
    array = {"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12"}
    assert own_job(array | {"SLURM_ARRAY_TASK_ID": "3"}) == "12_3"
    assert must_end_at_start(tmp_path, array | {"SLURM_ARRAY_TASK_ID": "3"})
    assert not must_end_at_start(tmp_path, array | {"SLURM_ARRAY_TASK_ID": "4"})


def test_a_run_that_was_not_cancelled_starts(tmp_path: Path):
    assert not must_end_at_start(tmp_path, {"SLURM_JOB_ID": "12"})


def test_a_mark_that_cannot_be_left_is_said():
    with pytest.raises(EnvironmentFaultError, match="/proc"):
        mark_cancelled(Path("/proc"), now=NOON)
