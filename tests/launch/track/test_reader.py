"""What trackers are told of a run directory: each line once, in its place, and what a person wants to hear of."""

import json
from typing import Any

import pytest
from msgspec.structs import replace
from report_factory import make_report
from run_factory import attempt_record, run_plan
from tracker_factory import append_steps, write_plan

from shardwise.launch.track.process import RunReader, StallWatch
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.messages.rank_files import Heartbeat
from shardwise.trainer.spec.report import Fault


@pytest.fixture
def run_dir(tmp_path):
    write_plan(tmp_path)
    return tmp_path


def places(reader):
    return [(line.place, line.step) for line in reader.read_lines()]


def test_each_line_is_told_once_with_its_place(run_dir):
    reader = RunReader(run_dir, first_attempt=1)
    assert places(reader) == []
    append_steps(run_dir, [1, 2])
    assert places(reader) == [(0, 1), (1, 2)]
    append_steps(run_dir, [3])
    assert places(reader) == [(2, 3)]
    assert places(reader) == []


def test_a_line_that_is_half_written_waits_for_its_end(run_dir):
    reader = RunReader(run_dir, first_attempt=1)
    whole = json.dumps({"step": 1, "attempt": 1, "loss": 2.0}) + "\n"
    with (run_dir / "metrics.jsonl").open("a") as stream:
        stream.write(whole[:10])
        stream.flush()
        assert places(reader) == []
        stream.write(whole[10:])
    assert places(reader) == [(0, 1)]


def test_a_damaged_line_keeps_its_place(run_dir):
    append_steps(run_dir, [1])
    with (run_dir / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"step": 2, "lo\xff{"step": 2}\n[1]\n{"loss": 1}\n')
    append_steps(run_dir, [3])
    assert places(RunReader(run_dir, first_attempt=1)) == [(0, 1), (4, 3)]


def test_a_line_has_the_predictions_of_its_own_attempt(run_dir):
    plan = run_plan()
    smaller = replace(plan.chosen, memory=replace(plan.chosen.memory, peak_allocated_bytes=7))
    write_plan(run_dir, 2, replace(plan, candidates=(smaller,)))
    append_steps(run_dir, [1])
    append_steps(run_dir, [1], attempt=2)
    lines = list(RunReader(run_dir, first_attempt=1).read_lines())
    name = "memory/memory_peak_bytes_predicted"
    assert [line.values[name] for line in lines] == [plan.chosen.memory.peak_allocated_bytes, 7]


def test_the_first_of_several_lines_without_a_finite_loss_is_an_incident(run_dir):
    append_steps(run_dir, [1])
    append_steps(run_dir, [2, 3], loss=None)
    append_steps(run_dir, [4])
    append_steps(run_dir, [5], skipped=True)
    reader = RunReader(run_dir, first_attempt=1)
    told = [incident.text for line in reader.read_lines() for incident in reader.incidents_of(line)]
    first, second = told
    assert "step 2" in first and "loss" in first and "step 5" in second and "skipped" in second


def test_lines_of_an_earlier_supervisor_are_no_news(run_dir):
    append_steps(run_dir, [1], loss=None)
    reader = RunReader(run_dir, first_attempt=2)
    assert [incident for line in reader.read_lines() for incident in reader.incidents_of(line)] == []


def test_an_attempt_that_failed_is_told_once(run_dir):
    reader = RunReader(run_dir, first_attempt=2)
    failed: dict[str, Any] = {"fault": Fault.OUT_OF_MEMORY, "cause": "CUDA out of memory"}
    records = [attempt_record(1, **failed), attempt_record(2, step=5, **failed), attempt_record(3)]
    codec.write(run_dir / "report.json", make_report(history=tuple(records)))
    (incident,) = reader.read_incidents()
    assert incident.title == "out of memory"
    assert all(fact in incident.text for fact in ("attempt 2", "step 5", "none/fp32/adamw", "CUDA out of memory"))
    assert list(reader.read_incidents()) == []


def test_a_silence_much_longer_than_a_step_is_told_once():
    watch = StallWatch()
    sign = Heartbeat(step=7, count=1, phase="backward")
    assert watch.check(sign, now_s=0) is None
    for _ in range(3):
        watch.note(30.0)
    assert watch.check(sign, now_s=1) is None
    assert watch.check(sign, now_s=299) is None
    words = watch.check(sign, now_s=302)
    assert words is not None and all(fact in words for fact in ("backward", "step 8", " 5 min"))
    assert watch.check(sign, now_s=900) is None
    assert watch.check(Heartbeat(step=7, count=2, phase="optimizer"), now_s=901) is None
    assert watch.check(Heartbeat(step=7, count=2, phase="optimizer"), now_s=1300) is not None


@pytest.mark.parametrize("phase", ["saving a checkpoint", "evaluating", "finished"])
def test_what_takes_as_long_as_it_takes_is_no_stall(phase):
    watch = StallWatch()
    watch.note(1.0)
    assert watch.check(Heartbeat(step=7, count=1, phase=phase), now_s=0) is None
    assert watch.check(Heartbeat(step=7, count=1, phase=phase), now_s=10_000) is None
