"""Event files that TensorBoard itself reads: every line once, and of a step that was repeated the later value."""

from tracker_factory import EndNotice, Trackers, append_steps, tracker_environment, tracker_order, write_plan


def supervise(run_dir, attempt=1):
    trackers = Trackers(run_dir, tracker_order(tensorboard=True, first_attempt=attempt), tracker_environment(run_dir))
    assert "not done" not in trackers.end(EndNotice(has_report=False))


def shown(run_dir, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, round(event.value, 2)) for event in events.Scalars(name)]


def test_a_resumed_run_writes_no_line_twice_and_the_later_value_of_a_step_counts(run_dir):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    append_steps(run_dir, [3], loss=2.5)  # it went back to step 2
    supervise(run_dir)
    assert shown(run_dir, "train/loss") == [(1, 4.99), (2, 4.98), (3, 2.5)]
    assert shown(run_dir, "memory/memory_peak_bytes") == [(step, 7 * 2**20) for step in (1, 2, 3)]
    assert len(shown(run_dir, "memory/memory_peak_bytes_predicted")) == 3
    write_plan(run_dir, 2)
    append_steps(run_dir, [3, 4], attempt=2, loss=1.5)
    supervise(run_dir, attempt=2)
    files = sorted((run_dir / "tensorboard").glob("events.*"), key=lambda path: path.stat().st_mtime)
    assert [sum(event.HasField("summary") for event in EventFileLoader(str(path)).Load()) for path in files] == [4, 2]
    assert shown(run_dir, "train/loss") == [(1, 4.99), (2, 4.98), (3, 1.5), (4, 1.5)]
    (run_dir / "tensorboard" / "lines.json").unlink()
    supervise(run_dir, attempt=2)
    assert [step for step, _ in shown(run_dir, "train/loss")] == [1, 2, 3, 4], "a lost count doubles nothing"
