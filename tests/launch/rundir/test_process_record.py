"""Only the recorded process is ever signalled."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.launch.rundir.process_record import ProcessRecord, descendants, read_records, record_of, write_record


def start_sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_recorded_process_is_alive_until_it_ends_collected_or_not():
    sleeper = start_sleeper()
    record = record_of(sleeper.pid)
    assert record is not None and record.is_alive
    assert record.send(signal.SIGKILL)
    sleeper.wait()
    assert not record.is_alive and record_of(sleeper.pid) is None
    sleeper = start_sleeper()
    record = record_of(sleeper.pid)
    assert record is not None
    sleeper.kill()
    deadline = time.monotonic() + 10
    while record.is_alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not record.is_alive  # not waited for: still a zombie
    sleeper.wait()


def test_another_process_under_the_same_pid_is_not_signalled():
    sleeper = start_sleeper()
    try:
        record = record_of(sleeper.pid)
        assert record is not None
        stale = ProcessRecord(record.pid, record.start_time - 1)
        assert not stale.is_alive and not stale.send(signal.SIGKILL)
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_records_survive_the_file_and_half_written_ones_are_left(tmp_path: Path):
    record = record_of(os.getpid())
    assert record is not None
    write_record(tmp_path / "pids" / "rank-0.json", record)
    (tmp_path / "pids" / "rank-1.json").write_text('{"pid": 12')
    (tmp_path / "pids" / "rank-2.json").write_text('{"pid": 12}')
    assert read_records(tmp_path / "pids") == {"rank-0": record}
    assert read_records(tmp_path / "missing") == {}


@pytest.mark.cold
def test_descendants_are_found_across_sessions():
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
            "print(child.pid, flush=True); child.wait()",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    found = descendants(parent.pid)
    assert [record.pid for record in found] == [child_pid]
    assert found[0].send(signal.SIGKILL)
    parent.communicate()
