"""Which steps are not taken and whose rows a step learns from; where a rank writes, also on a second attempt."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import mean, stdev

import pytest
from report_factory import make_report

from shardwise.launch.rundir.process_record import launcher_record, read_state, record_of, write_record
from shardwise.trainer.runtime.run import state
from shardwise.trainer.runtime.run.process import install_stop_flag
from shardwise.trainer.spec.messages.rank_files import SUPERVISED

LOSSES = tuple(2.0 + 0.25 * math.sin(step) for step in range(state.LEAST_STEPS))
NORMS = tuple(0.5 + 0.125 * math.cos(step) for step in range(state.LEAST_STEPS))
CALM = state.SpikeRecord(losses=LOSSES, grad_norms=NORMS)


@pytest.mark.parametrize("record", [state.SpikeRecord(), CALM])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_taken(record, value):
    for loss, norm, what in ((value, 0.5, "loss"), (value, None, "loss"), (2.0, value, "gradient norm")):
        found = state.find_fault(record, loss=loss, grad_norm=norm, skips_spikes=True)
        assert found == f"the {what} is not finite"


def test_a_spike_is_more_than_six_standard_deviations_above_the_mean_of_half_a_window():
    edge = mean(LOSSES) + state.SIGMAS * stdev(LOSSES)
    assert state.find_fault(CALM, loss=edge - 1e-9, grad_norm=0.5, skips_spikes=True) is None
    fault = state.find_fault(CALM, loss=edge + 1e-9, grad_norm=0.5, skips_spikes=True)
    assert fault is not None and fault.startswith(f"the loss, {edge:.4g}, is 6 sigma above the mean of the last 64")
    edge = mean(NORMS) + state.SIGMAS * stdev(NORMS)
    assert state.find_fault(CALM, loss=2.0, grad_norm=edge - 1e-9, skips_spikes=True) is None
    assert "the gradient norm" in (state.find_fault(CALM, loss=2.0, grad_norm=edge + 1e-9, skips_spikes=True) or "")
    young = state.SpikeRecord(losses=LOSSES[1:], grad_norms=NORMS[1:])
    assert state.find_fault(young, loss=1e9, grad_norm=1e9, skips_spikes=True) is None
    assert state.find_fault(CALM, loss=-1e9, grad_norm=0.0, skips_spikes=True) is None, "what falls is no spike"
    for level in (2.0, 1e-6, 0.0):  # where nothing varies a little more is none
        record = state.SpikeRecord(losses=(level,) * state.WINDOW_STEPS)
        assert state.find_fault(record, loss=level * 1.11, grad_norm=None, skips_spikes=True) is None
        assert state.find_fault(record, loss=level * 1.13 + 1e-3, grad_norm=None, skips_spikes=True) is not None


def test_a_spike_is_a_fault_only_on_request():
    assert state.find_fault(CALM, loss=1e9, grad_norm=1e9, skips_spikes=True) is not None
    assert state.find_fault(CALM, loss=1e9, grad_norm=1e9, skips_spikes=False) is None
    assert state.find_fault(CALM, loss=math.nan, grad_norm=0.5, skips_spikes=False) == "the loss is not finite"


def test_the_window_is_the_last_steps_that_were_taken():
    record = state.SpikeRecord()
    for step in range(1, 3 * state.WINDOW_STEPS + 1):
        fault = "a spike" if step % 10 == 0 else None
        record = state.after_step(
            record, step=step, loss=float(step), grad_norm=step / 2, fault=fault, was_skipped=fault is not None
        )
    taken = [float(step) for step in range(1, 3 * state.WINDOW_STEPS + 1) if step % 10][-state.WINDOW_STEPS :]
    assert record.losses == tuple(taken)
    assert record.grad_norms == tuple(step / 2 for step in taken)
    assert record.skipped_steps == tuple(range(10, 3 * state.WINDOW_STEPS + 1, 10))


def test_steps_in_a_row_are_counted_until_one_is_taken():
    record = CALM
    for step in range(7, 7 + state.STEPS_UNTIL_ROLL_BACK):
        fault = state.find_fault(record, loss=9.0, grad_norm=0.5, skips_spikes=True)
        assert fault is not None, "a spike that stays is one to the end"
        record = state.after_step(record, step=step, loss=9.0, grad_norm=0.5, fault=fault, was_skipped=step != 8)
    assert (record.in_a_row, record.losses, record.grad_norms) == (state.STEPS_UNTIL_ROLL_BACK, LOSSES, NORMS)
    assert record.skipped_steps == (7, 9, 10, 11), "step 8 was a fault that was found too late to skip it"
    record = state.after_step(record, step=12, loss=2.0, grad_norm=0.5, fault=None, was_skipped=False)
    assert (record.in_a_row, record.losses[-1]) == (0, 2.0)


NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_ranks_of_one_launcher_agree_on_when_it_started():
    imported = "from shardwise.trainer.runtime.run.state import start_of_launch"
    code = f"{imported}; print(start_of_launch(world_size=2).timestamp())"
    answers = {subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2)}
    assert len(answers) == 1, "both have this process as their launcher"
    assert state.start_of_launch(world_size=1).timestamp() == float(answers.pop())
    assert timedelta(0) <= datetime.now(UTC) - state.start_of_launch(world_size=1) < timedelta(hours=12)


def test_each_rank_has_a_report_of_its_own_and_an_attempt_that_is_started_again_a_folder(tmp_path):
    folder = tmp_path / "attempts" / "3"
    folder.mkdir(parents=True)
    paths = state.run_paths(folder / "plan.json", started_at=NOW)
    for rank in (0, 2):
        state.ReportWriter(paths, rank=rank).write_report(make_report())
    assert sorted(path.name for path in folder.iterdir()) == ["report-rank-2.json", "report.json"]
    assert (paths.run_dir, paths.attempt, paths.attempt_dir, paths.is_again) == (tmp_path, 3, folder, False)
    again = state.run_paths(folder / "plan.json", started_at=NOW)
    assert again.attempt_dir == again.run_dir == folder / "again-20300102-030405"
    assert again.is_again and again.resume_dir == tmp_path and again.plan_dir == folder


@pytest.fixture(autouse=True)
def handlers_given_back() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("is_supervised", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_request_to_stop_is_noted_but_ctrl_c_is_left_to_a_supervisor(number, is_supervised, monkeypatch):
    received: list[int] = []
    signal.signal(number, lambda *_: received.append(number))  # instead of the end of the tests, were it left alone
    monkeypatch.delenv(SUPERVISED, raising=False)
    if is_supervised:
        monkeypatch.setenv(SUPERVISED, "1")
    flag = install_stop_flag()
    os.kill(os.getpid(), number)
    assert not received and flag.is_set is not (is_supervised and number == signal.SIGINT)


def test_a_rank_ends_at_its_start_if_its_launcher_has_ended_also_where_no_process_waited_for_it(tmp_path: Path):
    """As in a container whose process 1 does not reap: the launcher stays in /proc."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as launcher:
        record = record_of(launcher.pid)
        assert record is not None
        write_record(launcher_record(tmp_path, 0), record)
        begin = "import sys; from pathlib import Path; from shardwise.trainer.runtime.run import process\n"
        code = f"{begin}process.die_with_launcher(Path(sys.argv[1])); print('works')"
        rank = [sys.executable, "-c", code, str(tmp_path)]
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
