"""What a rank does to itself before it imports anything heavy."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.launch.rundir.process_record import launcher_record, read_state, record_of, write_record
from shardwise.trainer.runtime.run.process import install_stop_flag
from shardwise.trainer.spec.messages.rank_files import SUPERVISED


@pytest.fixture(autouse=True)
def handlers_given_back() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_stop_is_noted_and_ends_nothing(number: signal.Signals):
    received = []
    signal.signal(number, lambda *_: received.append(number))  # instead of the end of the tests, were it left alone
    flag = install_stop_flag()
    os.kill(os.getpid(), number)
    assert flag.is_set and not received


@pytest.mark.parametrize("is_supervised", [True, False])
def test_ctrl_c_is_left_to_the_supervisor_if_there_is_one(is_supervised: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(SUPERVISED, raising=False)
    if is_supervised:
        monkeypatch.setenv(SUPERVISED, "1")
    flag = install_stop_flag()
    os.kill(os.getpid(), signal.SIGINT)
    assert flag.is_set is not is_supervised


def test_a_rank_ends_at_its_start_if_its_launcher_has_ended_also_where_no_process_waited_for_it(tmp_path: Path):
    """As in a container whose process 1 does not reap: the launcher stays in /proc."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as launcher:
        record = record_of(launcher.pid)
        assert record is not None
        write_record(launcher_record(tmp_path, 0), record)
        begin = "import sys; from pathlib import Path; from shardwise.trainer.runtime.run import process\n"
        rank = [
            sys.executable,
            "-c",
            f"{begin}process.die_with_launcher(Path(sys.argv[1])); print('works')",
            str(tmp_path),
        ]
        assert subprocess.run(rank, check=True, capture_output=True).stdout == b"works\n"
        launcher.kill()
        while read_state(launcher.pid) != ("Z", record.start_time):
            pass
        answer = subprocess.run(rank, check=False, capture_output=True, text=True)
    assert answer.returncode == 1 and "launcher of this rank has ended" in answer.stderr


CLEANING = """
import sys, time
from pathlib import Path
from shardwise.trainer.runtime.run.process import end_with_parent
folder = Path(sys.argv[1])
end_with_parent()
try:
    (folder / "ready").touch()
    time.sleep(60)
except SystemExit:
    (folder / "cleaning").touch()
    time.sleep(0.3)
    (folder / "cleaned").touch()
    raise
"""


def test_a_second_request_to_end_does_not_interrupt_the_cleaning(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", CLEANING, str(tmp_path)])
    for name in ("ready", "cleaning"):
        while not (tmp_path / name).exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM and (tmp_path / "cleaned").exists()
