"""Who supervises a run is told from the process that holds its directory, and never from a name alone."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from run_factory import write_holder

from launch.rundir.lock import Holder, holder_here, last_holder, locked, parse_holder
from trainer.spec.errors import EnvironmentFaultError

HOLD = """
import sys
from pathlib import Path
from launch.rundir.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(run_dir: Path) -> Iterator[int]:
    """By another process of this machine."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, run_dir], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        yield holder.pid


@pytest.mark.cold
def test_the_process_that_holds_the_directory_is_found_and_named(tmp_path: Path):
    with held(tmp_path) as pid:
        assert holder_here(tmp_path) == Holder(pid, os.uname().nodename)
        with pytest.raises(EnvironmentFaultError, match=f"process {pid}"), locked(tmp_path):
            pass
    assert holder_here(tmp_path) is None, "it is gone, though its name stays"
    assert last_holder(tmp_path) == Holder(pid, os.uname().nodename)


def test_a_process_that_only_has_the_number_holds_nothing(tmp_path: Path):
    write_holder(tmp_path, os.getpid())
    assert holder_here(tmp_path) is None


def test_a_holder_of_another_machine_is_named_with_it(tmp_path: Path):
    with locked(tmp_path):
        write_holder(tmp_path, os.getpid(), "elsewhere")  # where another process has this number
        assert holder_here(tmp_path) is None
    assert last_holder(tmp_path) == Holder(os.getpid(), "elsewhere")


def test_a_directory_that_nobody_ever_held_has_no_holder(tmp_path: Path):
    assert last_holder(tmp_path) is None and holder_here(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"\n", b"x y\n", b"\xff\xfe"])
def test_what_names_nobody_is_nobody(content):
    assert parse_holder(content) is None


def test_looking_does_not_keep_a_run_from_starting(tmp_path: Path):
    write_holder(tmp_path, 1)
    holder_here(tmp_path)
    with locked(tmp_path):
        assert holder_here(tmp_path) == Holder(os.getpid(), os.uname().nodename)
