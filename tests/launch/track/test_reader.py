"""Lines of a run directory for trackers: each once, with its place, and the incidents."""

import pytest
from report_factory import make_report
from run_factory import attempt_record
from tracker_factory import append_steps, write_plan

from shardwise.launch.track.process import RunReader, StallWatch
from shardwise.launch.track.tracker import NOT_SAVED
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.messages.rank_files import Heartbeat, encode_heartbeat, heartbeat_path
from shardwise.trainer.spec.report import Fault


@pytest.fixture
def run_dir(tmp_path):
    write_plan(tmp_path)
    return tmp_path


def places(reader):
    return [(line.place, line.step) for line in reader.read_lines()]


def test_each_line_is_read_once_with_its_place(run_dir):
    reader = RunReader(run_dir, first_attempt=1)
    assert places(reader) == []
    append_steps(run_dir, [1, 2])
    assert places(reader) == [(0, 1), (1, 2)]
    append_steps(run_dir, [3])
    with (run_dir / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"step": 4, "lo\xff{"step": 2}\n[1]\n{"loss": 1}\n{"step": 7, ')
    assert places(reader) == [(2, 3)], "damaged lines keep their place"
    with (run_dir / "metrics.jsonl").open("ab") as stream:
        stream.write(b'"loss": 2.0}\n')
    assert places(reader) == [(6, 7)], "a line that was half written"
    assert places(reader) == []
    for chunk in (b"x" * (3 << 20), b"x" * 5 + b'\n{"step": 8}\n'):
        with (run_dir / "metrics.jsonl").open("ab") as stream:
            stream.write(chunk)
        found = places(reader)
    assert found == [(8, 8)], "a line that is too long has its place"
    assert places(RunReader(run_dir, first_attempt=1))[-1:] == [(8, 8)]


def test_the_first_of_several_lines_without_a_finite_loss_is_an_incident(run_dir):
    append_steps(run_dir, [1])
    append_steps(run_dir, [2, 3], loss=None)
    append_steps(run_dir, [4])
    append_steps(run_dir, [5], skipped=True)
    later = RunReader(run_dir, first_attempt=2)
    assert [incident for line in later.read_lines() for incident in later.incidents_of(line)] == []
    reader = RunReader(run_dir, first_attempt=1)
    texts = [incident.text for line in reader.read_lines() for incident in reader.incidents_of(line)]
    first, second = texts
    assert "step 2" in first and "loss" in first and "step 5" in second and "skipped" in second


def test_a_checkpoint_that_was_not_saved_is_an_incident_once_until_one_is(run_dir):
    reader = RunReader(run_dir, first_attempt=1)
    path = heartbeat_path(run_dir / "attempts" / "1", 0)
    path.parent.mkdir()
    found = []
    for step, problem in enumerate(("", "no room at 2", "no room at 3", "", "no room at 5"), start=1):
        path.write_bytes(encode_heartbeat(Heartbeat(step=step, count=1, phase="forward", problem=problem)))
        found.append([(each.title, each.text) for each in reader.read_incidents()])
    assert found == [[], [(NOT_SAVED, "no room at 2")], [], [], [(NOT_SAVED, "no room at 5")]]


def test_an_attempt_that_failed_is_reported_once(run_dir):
    reader = RunReader(run_dir, first_attempt=2)
    memory = {"fault": Fault.OUT_OF_MEMORY, "cause": "CUDA out of memory"}
    first, failed = (attempt_record(number, step=5, **memory) for number in (1, 2))
    codec.write(run_dir / "report.json", make_report(history=(first, failed, attempt_record(3))))
    (incident,) = reader.read_incidents()
    assert incident.title == "out of memory"
    assert all(fact in incident.text for fact in ("attempt 2", "step 5", "none/fp32/adamw", "CUDA out of memory"))
    assert list(reader.read_incidents()) == []


def test_a_silence_much_longer_than_a_step_is_reported_once():
    watch = StallWatch()
    sign = Heartbeat(step=7, count=1, phase="backward")
    assert watch.check(sign, now_s=0) is None
    for _ in range(3):
        watch.note(30.0)
    assert watch.check(sign, now_s=1) is watch.check(sign, now_s=299) is None
    stall = watch.check(sign, now_s=302)
    assert stall is not None and all(fact in stall for fact in ("backward", "step 8", " 5 min"))
    assert watch.check(sign, now_s=900) is None
    later = Heartbeat(step=7, count=2, phase="optimizer")
    assert watch.check(later, now_s=901) is None and watch.check(later, now_s=1300) is not None
    for phase in ("saving a checkpoint", "evaluating", "finished"):
        other = Heartbeat(step=7, count=3, phase=phase)
        assert watch.check(other, now_s=2000) is watch.check(other, now_s=20_000) is None
