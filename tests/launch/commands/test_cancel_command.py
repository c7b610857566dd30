"""`shardwise cancel` without Slurm: the supervisor of this machine is interrupted, one elsewhere is named."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_factory import write_attempt, write_holder, write_report, write_submission

from shardwise.launch.commands.follow import run_cancel
from shardwise.launch.options import CancelOptions
from shardwise.launch.rundir.lock import is_cancelled, must_end_at_start
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode
from shardwise.trainer.spec.report import Ending

NO_SLURM = {"PATH": "/nonexistent"}
SUPERVISOR = """
import sys, time
from pathlib import Path
from shardwise.launch.rundir.lock import locked
from shardwise.launch.attempt.supervisor import StopRequest
stop = StopRequest()
with locked(Path(sys.argv[1])), stop.listening():
    print("runs", flush=True)
    while stop.num_interrupts < int(sys.argv[2]):
        time.sleep(0.01)
    print(stop.kind, flush=True)
"""


def cancel(run_dir: Path, *, now: bool = False) -> str:
    out = io.StringIO()
    assert run_cancel(CancelOptions(str(run_dir), now), Console(out), environment=NO_SLURM) is ExitCode.DONE
    return out.getvalue()


@contextmanager
def supervised(run_dir: Path, *, num_interrupts: int = 1) -> Iterator["subprocess.Popen[str]"]:
    """By a process that waits for so many interrupts, as `train` hears them."""
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, run_dir, str(num_interrupts)], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == "runs\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.cold
@pytest.mark.parametrize("now", [False, True])
def test_the_supervisor_of_this_machine_is_interrupted_and_for_now_twice(tmp_path: Path, now: bool):
    write_attempt(tmp_path, steps=[1])
    with supervised(tmp_path, num_interrupts=1 + now) as process:
        text = cancel(tmp_path, now=now)
        assert process.stdout is not None and process.stdout.readline() == "interrupt\n"
    assert f"process {process.pid}" in text and is_cancelled(tmp_path)


def test_a_supervisor_of_another_machine_is_named_with_what_to_do_there(tmp_path: Path):
    write_attempt(tmp_path, steps=[1])
    write_holder(tmp_path, os.getpid(), "n3")
    with pytest.raises(EnvironmentFaultError, match=f"n3.*kill -INT {os.getpid()}"):
        cancel(tmp_path)
    assert is_cancelled(tmp_path)


def test_a_run_that_ended_has_nothing_to_cancel_and_gets_no_mark(tmp_path: Path):
    write_attempt(tmp_path, steps=[1])
    write_report(tmp_path, Ending.FAILED)
    assert "nothing to cancel" in cancel(tmp_path) and not is_cancelled(tmp_path)


def test_jobs_that_cannot_be_reached_stay_and_end_when_they_start(tmp_path: Path):
    write_submission(tmp_path, "12", "13")
    with pytest.raises(EnvironmentFaultError, match="no Slurm"):
        cancel(tmp_path)
    assert must_end_at_start(tmp_path, {"SLURM_JOB_ID": "13"})
