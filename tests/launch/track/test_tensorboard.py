"""Event files that TensorBoard itself reads: every line once, and of a step that was repeated the later value."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tracker_factory import EndNotice, Trackers, append_steps, tracker_environment, tracker_order, write_plan


@pytest.fixture
def run_dir(tmp_path):
    write_plan(tmp_path)
    append_steps(tmp_path, [1, 2, 3])
    return tmp_path


def supervise(run_dir, attempt=1):
    trackers = Trackers(run_dir, tracker_order(tensorboard=True, first_attempt=attempt), tracker_environment(run_dir))
    assert trackers.end(EndNotice(has_report=False)) == ""


def shown(run_dir, name):
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, round(event.value, 2)) for event in events.Scalars(name)]


def test_every_series_is_there_over_the_step(run_dir):
    supervise(run_dir)
    assert shown(run_dir, "train/loss") == [(1, 4.99), (2, 4.98), (3, 4.97)]
    assert shown(run_dir, "memory/memory_peak_bytes") == [(step, 7 * 2**20) for step in (1, 2, 3)]
    assert len(shown(run_dir, "memory/memory_peak_bytes_predicted")) == 3


def test_a_run_that_goes_on_writes_no_line_twice_and_the_later_value_of_a_step_stands(run_dir):
    supervise(run_dir)
    write_plan(run_dir, 2)
    append_steps(run_dir, [3, 4], attempt=2, loss=1.5)
    supervise(run_dir, attempt=2)
    files = sorted((run_dir / "tensorboard").glob("events.*"), key=lambda path: path.stat().st_mtime)
    assert [sum(event.HasField("summary") for event in EventFileLoader(str(path)).Load()) for path in files] == [3, 2]
    assert shown(run_dir, "train/loss") == [(1, 4.99), (2, 4.98), (3, 1.5), (4, 1.5)]


def test_within_one_supervisor_as_well(run_dir):
    append_steps(run_dir, [2, 3], attempt=1, loss=1.5)
    supervise(run_dir)
    assert shown(run_dir, "train/loss") == [(1, 4.99), (2, 1.5), (3, 1.5)]


def test_a_count_that_is_lost_doubles_nothing(run_dir):
    supervise(run_dir)
    (run_dir / "tensorboard" / "lines.json").unlink()
    append_steps(run_dir, [4])
    supervise(run_dir)
    assert [step for step, _ in shown(run_dir, "train/loss")] == [1, 2, 3, 4]
