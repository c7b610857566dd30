"""Only the recorded process is ever signalled."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from workplace_factory import wait_for

from shardwise.launch.rundir.process_record import ProcessRecord, descendants, read_records, record_of, write_record

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
PARENT = f"""
import subprocess
child = subprocess.Popen({SLEEP!r}, start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def recorded(process: subprocess.Popen[bytes]) -> ProcessRecord:
    record = record_of(process.pid)
    assert record is not None
    return record


@pytest.mark.parametrize("is_collected", [True, False])
def test_a_recorded_process_is_alive_until_it_ends_collected_or_not(is_collected: bool):
    sleeper = subprocess.Popen(SLEEP)
    record = recorded(sleeper)
    stale = ProcessRecord(record.pid, record.start_time - 1)  # of another process under the same pid
    assert not stale.is_alive and not stale.send(signal.SIGKILL) and sleeper.poll() is None
    assert record.is_alive and record.send(signal.SIGKILL)
    if is_collected:
        sleeper.wait()
        assert record_of(sleeper.pid) is None
    wait_for(lambda: not record.is_alive, "its end")  # as a zombie, if nothing has waited for it
    sleeper.wait()


def test_records_survive_the_file_and_half_written_ones_are_left(tmp_path: Path):
    record = record_of(os.getpid())
    assert record is not None
    write_record(tmp_path / "pids" / "rank-0.json", record)
    for rank, text in ((1, '{"pid": 12'), (2, '{"pid": 12}')):
        (tmp_path / "pids" / f"rank-{rank}.json").write_text(text)
    assert read_records(tmp_path / "pids") == {"rank-0": record}
    assert read_records(tmp_path / "missing") == {}


@pytest.mark.cold
def test_descendants_are_found_across_sessions():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    (found,) = descendants(parent.pid)
    assert found.pid == child_pid and found.send(signal.SIGKILL)
    parent.communicate()
