"""The view of a run: made of its plan, its steps and its files; drawn letter by letter, and no line ever wraps."""

from pathlib import Path
from typing import Any

import pytest
from engine_plan_factory import engine_plan
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console
from run_factory import metrics_row, run_plan

from shardwise.launch.rundir.files import Position, read_position
from shardwise.launch.show import view as live
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.rank_files import Heartbeat, encode_heartbeat, heartbeat_path
from shardwise.trainer.spec.units import GIB, MIB

CURVE = tuple(live.Point(step, 9 * 0.98**step + 4.5) for step in range(1, 151))
POSITION: dict[str, Any] = {"step": 150, "num_steps": 300, "attempt": 2, "seconds_left": 70.0, "num_skipped": 2}
LOSSES: dict[str, Any] = {"curve": CURVE, "loss": 4.9513, "eval_loss": 5.1943, "lr": 3e-4}
ON_A_CARD = live.LiveView(
    title="tiny-20261122-173000", state="training", **POSITION, **LOSSES,
    tokens_per_s=6630.0, predicted_tokens_per_s=5840.0, mfu=0.41, card=live.CardFigures(0.98, 650.4, 71),
    memory=live.MemoryGauge(61 * GIB, 80 * GIB, "card", 63 * GIB, 55 * GIB, 54 * GIB),
    incidents=("an older one", "out of memory at step 3 with zero2/bf16: predicted 70 GiB; the next fallback"),
)  # fmt: skip
ON_A_CPU = live.LiveView(
    title="tiny", state="training", step=1, num_steps=300, curve=CURVE[:1], loss=9.5, lr=3e-4, tokens_per_s=2920.0,
    predicted_tokens_per_s=5840.0, memory=live.MemoryGauge(483 * MIB, 24 * GIB, "RAM", None, 240 * MIB, 244 * MIB),
)  # fmt: skip
GOLDEN = {
    (40, True): """\
tiny-20261122-173000: training, step 150
progress   ###---  50%, 1 min 10 s left
loss       #=-.__  4.9513, held out 5.19
speed      ######  6.63k tokens/s, 114%
memory     ####|-  61 of 80 GiB card, pe
card       98% busy, 650 W, 71 C
incidents  1 restart, 2 steps skipped, o
""",
    (80, False): """\
tiny-20261122-173000: training, step 150 of 300, attempt 2
progress   ██████████░░░░░░░░░░  50%, 1 min 10 s left
loss       █▇▆▅▅▄▄▃▃▂▂▂▂▂▁▁▁▁▁▁  4.9513, held out 5.1943, learning rate 0.0003
speed      ████████████████████  6.63k tokens/s, 114% of the predicted 5.84k, M…
memory     ███████████████│░░░░  61 of 80 GiB card, peak 55, predicted 54 GiB
card       98% busy, 650 W, 71 C
incidents  1 restart, 2 steps skipped, out of memory at step 3 with zero2/bf16:…
""",
}


def drawn(view: live.LiveView, width: int, *, is_ascii: bool = True) -> list[str]:
    lines = Console(width=width).render_lines(live.block(view, width=width, is_ascii=is_ascii), pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


@pytest.mark.parametrize(("width", "is_ascii"), GOLDEN)
def test_the_view_of_a_run_on_a_card(width, is_ascii):
    lines = drawn(ON_A_CARD, width, is_ascii=is_ascii)
    assert "\n".join(lines) + "\n" == GOLDEN[width, is_ascii]
    assert all(line.isascii() for line in lines) is is_ascii


def test_before_anything_is_known_there_is_a_state():
    assert drawn(live.LiveView(title="tiny"), 80) == ["tiny: starting", "incidents  none"]
    waiting = live.LiveView(title="tiny", state="waiting: job 12 waits", num_steps=8)
    assert drawn(waiting, 80)[0] == "tiny: waiting: job 12 waits, step 0 of 8"
    view = ON_A_CPU._replace(memory=live.MemoryGauge(None, None, "RAM", None, 122 * MIB, 244 * MIB), loss=None)
    lines = drawn(view, 80)
    assert "memory     ##########----------  tensors 122, predicted 244 MiB" in lines, "without a total"
    assert "loss       _                     no number, learning rate 0.0003" in lines
    view = ON_A_CPU._replace(memory=live.MemoryGauge(6 * GIB, 24 * GIB, "RAM", None, None, None))
    assert "memory     #####---------------  6 of 24 GiB RAM" in drawn(view, 80)


@pytest.mark.parametrize("is_ascii", [True, False])
def test_no_line_is_wider_than_the_terminal(is_ascii):
    strange = ON_A_CARD._replace(title="学習 run", incidents=("a\x1b[2Kb\nc 学習" * 20,))
    for width in range(1, 130):
        for line in (lines := drawn(strange, width, is_ascii=is_ascii)):
            assert cell_len(line) <= width and line.isprintable(), width
        assert len(lines) == 7


@pytest.mark.parametrize(
    ("share", "mark", "drawn"),
    [
        (0, None, "----------"), (-1, None, "----------"), (0.5, None, "#####-----"), (0.999, None, "#########-"),
        (1, None, "##########"), (1.7, None, "##########"), (0.5, 0.7, "#####--|--"), (0.5, 3.0, "#####----|"),
    ],
)  # fmt: skip
def test_a_bar_is_full_when_it_is_complete(share, mark, drawn):
    assert live.bar(share, width=10, glyphs=live.ASCII, mark=mark) == drawn


def test_a_log_gets_one_line_of_ascii():
    assert live.log_line(ON_A_CARD) == (
        "[############------------] 150/300  loss 4.9513  lr 0.0003  6.63k tokens/s (114% of predicted)  "
        "61 of 80 GiB  1 min 10 s left  1 restart  2 steps skipped"
    )
    assert live.log_line(ON_A_CPU) == (
        "[------------------------] 1/300  loss 9.5000  lr 0.0003  2.92k tokens/s (50% of predicted)  tensors 240 MiB"
    )
    assert live.log_line(live.LiveView(title="lost its plan", step=3)) == "step 3"


def log_of(*rows: dict[str, Any], step_s: float | None = None) -> live.StepLog:
    steps = live.StepLog()
    for number, row in enumerate(rows, 1):
        steps.note(row, seen_s=None if step_s is None else number * step_s)
    return steps


def test_speed_and_the_time_that_is_left_follow_from_the_clock_or_the_steps_of_the_newest_attempt():
    """Half a second of evaluation after each two seconds of a step."""
    rows = [metrics_row(step) for step in range(1, 61)]
    assert log_of(*rows).seconds_left(100) == 40 * 2.0
    assert log_of(*rows).seconds_left(60) is None and live.StepLog().seconds_left(100) is None
    assert log_of(*rows[:10], step_s=2.5).seconds_left(100) == pytest.approx(90 * 2.5)
    steps = log_of(*rows[:10], step_s=100.0)
    steps.note(metrics_row(8, attempt=2), seen_s=2000.0)
    assert steps.seconds_left(10) == 2 * 2.0 and steps.step == 8
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
    points = curve if curve is GAP else [live.Point(step, each) for step, each in enumerate(curve, start=1)]
    assert live.sparkline(points, width=width, levels=LEVELS) == drawn


def test_a_curve_of_a_hundred_thousand_steps_keeps_its_ends():
    steps = live.StepLog()
    for step in range(1, 100_001):
        steps.note({"step": step, "loss": float(step)})
    assert len(steps.curve) <= 512 and (steps.curve[0], steps.curve[-1]) == ((1, 1.0), (100_000, 100_000.0))
    steps.note({"step": 99_999, "loss": 5.0})
    assert steps.curve[-1] == (99_999, 5.0), "a run that went back draws its steps once"
    drawn = live.sparkline(steps.curve[:-1], width=32, levels=LEVELS)
    assert drawn[0] == "1" and drawn[-1] == "8" and list(drawn) == sorted(drawn)


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
