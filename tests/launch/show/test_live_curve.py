"""A curve stays small however long the run, and is drawn from its lowest to its highest value."""

import pytest

from shardwise.launch.show.live.view import Curve, Point, sparkline

LEVELS = "12345678"


def points(*values: float) -> list[Point]:
    return [Point(step, value) for step, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ((), ""),
        ((3.0,), "1"),
        ((2.0, 2.0, 2.0), "111"),
        ((8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0), "87654321"),
        ((10.0, 0.0, 5.0), "815"),
    ],
)
def test_a_short_curve_takes_a_character_a_point(values, drawn):
    assert sparkline(points(*values), width=20, levels=LEVELS) == drawn


def test_a_long_curve_is_the_means_of_equal_stretches():
    assert sparkline(points(*[1.0] * 50, *[2.0] * 50), width=4, levels=LEVELS) == "1188"


def test_a_stretch_without_a_point_repeats_the_one_before():
    told = [Point(1, 0.0), Point(2, 0.0), Point(3, 0.0), Point(90, 7.0), Point(100, 7.0)]
    assert sparkline(told, width=4, levels=LEVELS) == "1118"


def test_a_curve_of_a_hundred_thousand_steps_keeps_its_ends_and_its_mean():
    curve = Curve()
    for step in range(1, 100_001):
        curve.add(step, float(step))
    kept = curve.points
    assert len(kept) <= 512 and kept[-1] == Point(100_000, 100_000.0)
    assert sum(point.num_steps for point in kept) == 100_000
    assert sum(point.value * point.num_steps for point in kept) == pytest.approx(sum(range(1, 100_001)))
    drawn = sparkline(kept, width=32, levels=LEVELS)
    assert drawn[0] == "1" and drawn[-1] == "8" and list(drawn) == sorted(drawn)


def test_a_run_that_went_back_draws_its_steps_once():
    curve = Curve()
    for step in (1, 2, 3, 4):
        curve.add(step, 9.0)
    curve.add(3, 5.0)
    assert [point.step for point in curve.points] == [1, 2, 3] and curve.points[-1].value == 5.0
