"""The owner of a lock is the process that holds the file; a cancelled run continues only when a person starts it."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from run_factory import write_holder

from shardwise.launch.rundir import lock
from shardwise.trainer.spec.errors import EnvironmentFaultError

HOLD = """
import sys
from pathlib import Path
from shardwise.launch.rundir.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
HOST = os.uname().nodename


@pytest.mark.cold
def test_the_owner_is_found_while_it_lives_and_refuses_others(tmp_path: Path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert lock.local_owner(tmp_path) == lock.LockOwner(holder.pid, HOST)
        with pytest.raises(EnvironmentFaultError, match=f"process {holder.pid}"), lock.locked(tmp_path):
            pass
    assert lock.local_owner(tmp_path) is None and lock.recorded_owner(tmp_path) == lock.LockOwner(holder.pid, HOST)


def test_the_owner_holds_the_file_here_and_its_number_alone_is_nobody(tmp_path: Path):
    assert lock.recorded_owner(tmp_path) is None and lock.local_owner(tmp_path) is None
    write_holder(tmp_path, os.getpid())  # a process that has the number and not the file
    assert lock.local_owner(tmp_path) is None
    with lock.locked(tmp_path):  # reading the owner does not keep a run from starting
        assert lock.local_owner(tmp_path) == lock.LockOwner(os.getpid(), HOST)
        write_holder(tmp_path, os.getpid(), "elsewhere")  # where another process has this number
        assert lock.local_owner(tmp_path) is None
    owner = lock.recorded_owner(tmp_path)
    assert owner == lock.LockOwner(os.getpid(), "elsewhere") and str(owner) == f"process {os.getpid()} on elsewhere"


NOON = datetime(2030, 1, 2, 12, 0, 0, tzinfo=UTC)
ARRAY = {"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12"}


def test_the_flag_names_time_and_user_and_one_that_cannot_be_written_is_an_environment_fault(tmp_path: Path):
    assert not lock.is_cancelled(tmp_path) and lock.read_cancel_flag(tmp_path) is None
    assert not lock.must_end_at_start(tmp_path, {"SLURM_JOB_ID": "12"})
    lock.write_cancel_flag(tmp_path, now=NOON, job_ids=("12",))
    flag = lock.read_cancel_flag(tmp_path)
    assert lock.is_cancelled(tmp_path) and flag is not None
    assert flag.startswith("cancelled 2030-01-02T12:00:00Z by ") and flag.endswith(f"@{HOST}")
    with pytest.raises(EnvironmentFaultError, match="/proc"):
        lock.write_cancel_flag(Path("/proc"), now=NOON)


@pytest.mark.parametrize(
    ("environment", "ends"),
    [
        ({"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}, True),  # queued again
        ({"SLURM_JOB_ID": "13"}, True),  # the next of its chain
        (ARRAY | {"SLURM_ARRAY_TASK_ID": "3"}, True),
        (ARRAY | {"SLURM_ARRAY_TASK_ID": "4"}, False),  # another point
        ({"SLURM_JOB_ID": "14"}, False),  # sbatch by hand
        ({"SLURM_JOB_ID": "2"}, False),  # of which another number has the digits
        ({}, False),  # train --resume
    ],
)
def test_only_jobs_that_were_cancelled_end_and_any_other_start_removes_the_flag(tmp_path: Path, environment, ends):
    lock.write_cancel_flag(tmp_path, now=NOON, job_ids=("12", "13", "12_3"))
    assert lock.must_end_at_start(tmp_path, environment) is ends
    assert lock.is_cancelled(tmp_path) is ends


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "runs" / "bot").mkdir(parents=True)
    return tmp_path / "runs" / "bot"


def test_a_folder_that_is_moved_is_followed_by_links_at_all_its_old_paths(run: Path):
    first, second = run.with_name("first place"), run.with_name("second")
    with lock.HeldFolder(run) as folder:
        assert folder.follow() is None
        run.rename(first)
        sentence = folder.follow()
        assert sentence is not None and str(run) in sentence and str(first) in sentence
        assert folder.follow() is None
        first.rename(second)
        assert folder.follow() is not None and folder.follow() is None
    for path in (run, first):
        (path / "written").touch()
        (second / "written").unlink()


@pytest.mark.parametrize("fault", ["deleted", "another is there", "moved with the folder above it"])
def test_a_folder_that_cannot_be_followed_is_an_error_with_its_new_place(run: Path, fault: str):
    place = run.with_name("new place")
    with lock.HeldFolder(run) as folder:
        if fault == "deleted":
            run.rmdir()
        elif fault == "another is there":
            run.rename(place)
            run.mkdir()
        else:
            run.parent.rename(run.parent.with_name("old runs"))
            place = run.parent.with_name("old runs") / run.name
        with pytest.raises(EnvironmentFaultError, match=fault if fault == "deleted" else f"--run-dir '{place}'"):
            folder.follow()
