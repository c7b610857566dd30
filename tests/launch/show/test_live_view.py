"""What is shown of a run follows from its plan and its steps."""

from typing import Any

import pytest
from engine_plan_factory import engine_plan
from msgspec.structs import replace
from run_factory import metrics_row, run_plan

from shardwise.launch.show.live.view import CardFigures, MemoryGauge, StepLog, memory_gauge, view_of
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.strategy import Sharding
from shardwise.trainer.spec.units import GIB, MIB


def log_of(*rows: dict[str, Any], seen_s: float | None = None) -> StepLog:
    steps = StepLog()
    for row in rows:
        steps.note(row, seen_s=seen_s)
    return steps


def test_steps_that_were_there_before_are_paced_by_themselves():
    steps = log_of(*(metrics_row(step) for step in range(1, 61)))
    assert steps.seconds_left(100) == 40 * 2.0
    assert steps.seconds_left(60) is None and StepLog().seconds_left(100) is None


def test_steps_that_were_seen_to_come_are_paced_by_the_clock():
    """Half a second of evaluation beside each two seconds of a step."""
    steps = StepLog()
    for step in range(1, 11):
        steps.note(metrics_row(step), seen_s=2.5 * step)
    assert steps.seconds_left(100) == pytest.approx(90 * 2.5)


def test_a_new_attempt_is_paced_anew():
    steps = StepLog()
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
    view = view_of(log_of(first, second), plan, title="t", state="training", attempt=3, incidents=["one"])
    assert (view.step, view.num_steps, view.loss, view.eval_loss, view.lr) == (2, 10, 4.98, 4.5, 3e-4)
    assert (view.num_skipped, view.attempt, view.incidents) == (1, 3, ("one",))
    assert view.predicted_tokens_per_s == 1024.0 and view.tokens_per_s == 1234.0
    assert view.card == CardFigures(utilization=0.5), "the clocks are no longer held down"
    assert [point.value for point in view.curve] == [4.99, 4.98]


def test_speed_is_predicted_for_all_ranks():
    plan = run_plan()
    four = replace(plan, candidates=(replace(plan.chosen, num_ranks=4),))
    assert view_of(log_of(metrics_row(1)), four, title="t", state="s").predicted_tokens_per_s == 4096.0


def test_a_run_that_does_not_run_has_no_time_left():
    steps = log_of(metrics_row(1))
    assert view_of(steps, run_plan(), title="t", state="s").seconds_left is not None
    assert view_of(steps, run_plan(), title="t", state="s", is_running=False).seconds_left is None


def test_without_a_plan_the_steps_are_shown():
    view = view_of(log_of(metrics_row(4)), None, title="t", state="s")
    assert (view.step, view.num_steps, view.predicted_tokens_per_s) == (4, None, None)
    assert view.memory == MemoryGauge(None, None, "RAM", None, 7 * MIB, None)


def test_a_loss_that_is_no_number_stays_out_of_the_curve():
    view = view_of(log_of(metrics_row(1), {**metrics_row(2), "loss": None}), None, title="t", state="s")
    assert view.loss is None and [point.step for point in view.curve] == [1]


def test_the_memory_of_a_cpu_is_the_ranks_ram_against_the_machines():
    gauge = memory_gauge({**metrics_row(1), "host_rss_bytes": 300 * MIB}, run_plan())
    assert gauge == MemoryGauge(300 * MIB, 64 * GIB, "RAM", None, 7 * MIB, 30 * MIB)
    assert memory_gauge({}, run_plan()) is None


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
    gauge = memory_gauge({"step": 1, "memory_peak_bytes": 2 * GIB, **counted}, plan)
    assert gauge == MemoryGauge(used, total, "card", 40 * MIB, 2 * GIB, 30 * MIB)
