"""The owner of a lock is the process that holds the file, not the name in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_factory import write_holder

from shardwise.launch.rundir.lock import LockOwner, local_owner, locked, parse_owner, recorded_owner
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
        assert local_owner(tmp_path) == LockOwner(holder.pid, HOST)
        with pytest.raises(EnvironmentFaultError, match=f"process {holder.pid}"), locked(tmp_path):
            pass
    assert local_owner(tmp_path) is None and recorded_owner(tmp_path) == LockOwner(holder.pid, HOST)


def test_reading_the_owner_does_not_keep_a_run_from_starting(tmp_path: Path):
    assert recorded_owner(tmp_path) is None and local_owner(tmp_path) is None
    write_holder(tmp_path, os.getpid())  # a process that has the number and not the file
    assert local_owner(tmp_path) is None
    with locked(tmp_path):
        assert local_owner(tmp_path) == LockOwner(os.getpid(), HOST)


def test_an_owner_on_another_machine_is_not_looked_for_here(tmp_path: Path):
    with locked(tmp_path):
        write_holder(tmp_path, os.getpid(), "elsewhere")  # where another process has this number
        assert local_owner(tmp_path) is None
    owner = recorded_owner(tmp_path)
    assert owner == LockOwner(os.getpid(), "elsewhere") and str(owner) == f"process {os.getpid()} on elsewhere"


@pytest.mark.parametrize("content", [b"", b"\n", b"x y\n", b"\xff\xfe"])
def test_content_without_a_pid_names_no_owner(content):
    assert parse_owner(content) is None
