"""A view follows from the plan, the steps and the files of a run; a curve stays small however long the run."""

from pathlib import Path
from typing import Any

import pytest
from engine_plan_factory import engine_plan
from msgspec.structs import replace
from run_factory import metrics_row, run_plan

from shardwise.launch.rundir.files import Position, read_position
from shardwise.launch.show import view as live
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.rank_files import Heartbeat, encode_heartbeat, heartbeat_path
from shardwise.trainer.spec.units import GIB, MIB


def log_of(*rows: dict[str, Any], seen_s: float | None = None) -> live.StepLog:
    steps = live.StepLog()
    for row in rows:
        steps.note(row, seen_s=seen_s)
    return steps


def test_the_time_that_is_left_follows_from_the_clock_or_the_steps_and_from_the_newest_attempt():
    """Half a second of evaluation after each two seconds of a step."""
    steps = log_of(*(metrics_row(step) for step in range(1, 61)))
    assert steps.seconds_left(100) == 40 * 2.0
    assert steps.seconds_left(60) is None and live.StepLog().seconds_left(100) is None
    steps = live.StepLog()
    for step in range(1, 11):
        steps.note(metrics_row(step), seen_s=2.5 * step)
    assert steps.seconds_left(100) == pytest.approx(90 * 2.5)
    steps = live.StepLog()
    for step in range(1, 11):
        steps.note(metrics_row(step), seen_s=100.0 * step)
    steps.note(metrics_row(8, attempt=2), seen_s=2000.0)
    assert steps.seconds_left(10) == 2 * 2.0 and steps.step == 8


def test_speed_is_tokens_over_seconds_of_the_last_steps():
    slow = {**metrics_row(1), "step_s": 3.0, "tokens_per_s": 100.0}
    fast = {**metrics_row(2), "step_s": 1.0, "tokens_per_s": 300.0}
    assert log_of(slow, fast).tokens_per_s() == 150.0
    assert log_of({"step": 1, "attempt": 1}).tokens_per_s() is None


def test_the_view_holds_the_newest_figure_of_each_name_and_the_prediction():
    first = {**metrics_row(1), "eval_loss": 4.5, "skipped": True, "gpu_throttle": "temperature"}
    second = {**metrics_row(2), "gpu_utilization": 0.5}
    plan = run_plan(num_steps=10)
    view = live.view_of(log_of(first, second), plan, title="t", state="training", attempt=3, incidents=["one"])
    assert (view.step, view.num_steps, view.loss, view.eval_loss, view.lr) == (2, 10, 4.98, 4.5, 3e-4)
    assert (view.num_skipped, view.attempt, view.incidents) == (1, 3, ("one",))
    assert view.predicted_tokens_per_s == 1024.0 and view.tokens_per_s == 1234.0
    assert view.card == live.CardFigures(utilization=0.5), "the clocks are no longer held down"
    assert [point.value for point in view.curve] == [4.99, 4.98]
    assert view.seconds_left == 8 * 2.0
    four = replace(plan, candidates=(replace(plan.chosen, num_ranks=4),))
    view = live.view_of(log_of(first, {**second, "loss": None}), four, title="t", state="s", is_running=False)
    assert view.predicted_tokens_per_s == 4096.0, "of all ranks"
    assert view.seconds_left is None and view.loss is None and [point.step for point in view.curve] == [1]
    view = live.view_of(log_of(metrics_row(4)), None, title="t", state="s")
    assert (view.step, view.num_steps, view.predicted_tokens_per_s) == (4, None, None)
    assert view.memory == live.MemoryGauge(None, None, "RAM", None, 7 * MIB, None)


def test_the_memory_of_a_cpu_is_the_ranks_ram_against_the_machines():
    gauge = live.memory_gauge({**metrics_row(1), "host_rss_bytes": 300 * MIB}, run_plan())
    assert gauge == live.MemoryGauge(300 * MIB, 64 * GIB, "RAM", None, 7 * MIB, 30 * MIB)
    assert live.memory_gauge({}, run_plan()) is None


@pytest.mark.parametrize(
    ("counted", "used"),
    [
        ({"memory_device_bytes": 5 * GIB, "memory_reserved_bytes": 4 * GIB, "memory_allocated_bytes": GIB}, 5 * GIB),
        ({"memory_reserved_bytes": 4 * GIB, "memory_allocated_bytes": GIB}, 4 * GIB),
        ({"memory_allocated_bytes": GIB}, GIB),
        ({}, None),
    ],
)
@pytest.mark.parametrize(("cap", "total"), [(None, 80 * GIB), (8 * GIB, 8 * GIB)])
def test_the_memory_of_a_gpu_is_what_is_used_of_the_card_or_of_its_cap(counted, used, cap, total):
    plan = engine_plan(Sharding.NONE, kind=DeviceKind.CUDA)
    plan = replace(plan, device_kind=DeviceKind.CUDA, hardware=replace(plan.hardware, vram_cap_bytes=cap))
    gauge = live.memory_gauge({"step": 1, "memory_peak_bytes": 2 * GIB, **counted}, plan)
    assert gauge == live.MemoryGauge(used, total, "card", 40 * MIB, 2 * GIB, 30 * MIB)


LEVELS = "12345678"
GAP = [live.Point(1, 0.0), live.Point(2, 0.0), live.Point(3, 0.0), live.Point(90, 7.0), live.Point(100, 7.0)]


@pytest.mark.parametrize(
    ("curve", "width", "drawn"),
    [
        ([], 20, ""),
        ([3.0], 20, "1"),
        ([2.0, 2.0, 2.0], 20, "111"),
        ([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 20, "87654321"),
        ([10.0, 0.0, 5.0], 20, "815"),
        ([1.0] * 50 + [2.0] * 50, 4, "1188"),
        (GAP, 4, "1118"),
    ],
    ids=["empty", "one", "flat", "down", "three", "means of stretches", "a stretch without a point"],
)
def test_a_curve_is_drawn_from_its_lowest_to_its_highest_value(curve, width, drawn):
    points = [
        each if isinstance(each, live.Point) else live.Point(step, each) for step, each in enumerate(curve, start=1)
    ]
    assert live.sparkline(points, width=width, levels=LEVELS) == drawn


def test_a_curve_of_a_hundred_thousand_steps_keeps_its_ends_and_its_mean():
    curve = live.Curve()
    for step in range(1, 100_001):
        curve.add(step, float(step))
    retained = curve.points
    assert len(retained) <= 512 and retained[-1] == live.Point(100_000, 100_000.0)
    assert sum(point.num_steps for point in retained) == 100_000
    assert sum(point.value * point.num_steps for point in retained) == pytest.approx(sum(range(1, 100_001)))
    curve.add(99_999, 5.0)
    assert curve.points[-1] == live.Point(99_999, 5.0), "a run that went back draws its steps once"
    drawn = live.sparkline(retained, width=32, levels=LEVELS)
    assert drawn[0] == "1" and drawn[-1] == "8" and list(drawn) == sorted(drawn)


def test_the_tail_returns_each_whole_step_once(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tail = live.MetricsTail(path)
    assert tail.read_new() == [], "no file yet"
    for text, rows in (
        ('{"step": 1}\n{"step": 2}\n{"step"', [{"step": 1}, {"step": 2}]),
        (": 3}\n", [{"step": 3}]),
        ('{"step": 1, "lo{"step": 2}\n\n[1]\n{"step": "x"}\n{"loss": 1.0}\n\xff\xfe\n{"step": 4}\n', [{"step": 4}]),
    ):
        with path.open("a", encoding="latin-1") as stream:
            stream.write(text)
        assert tail.read_new() == rows
    path.write_text('{"step": 7}\n')
    assert tail.read_new() == [{"step": 7}], "written anew"


@pytest.mark.parametrize(("phase", "shown"), [("backward", "training"), ("on_step", "training"), ("saving", "saving")])
def test_where_status_json_cannot_be_written_the_heartbeat_has_the_position(tmp_path: Path, phase: str, shown: str):
    (tmp_path / "status.json").write_text('{"phase": "loading", "step": 0}')
    path = heartbeat_path(tmp_path, 0)
    path.parent.mkdir()
    beat = Heartbeat(step=7, count=1, phase=phase, problem="no checkpoint at step 6: the disk is full")
    path.write_bytes(encode_heartbeat(beat))
    assert read_position(tmp_path) == Position(shown, 7, beat.problem)
    path.write_bytes(encode_heartbeat(Heartbeat(step=0, count=9, phase="importing")))
    assert read_position(tmp_path) == Position("loading", 0)
