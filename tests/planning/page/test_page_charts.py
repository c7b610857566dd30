"""Known points give known paths; what is no figure leaves a gap, and leaving points out loses nothing high or low."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shardwise.trainer.planning.page.content import LineChart, Points, Series, Span, Unit
from shardwise.trainer.planning.page.html import (
    Axes,
    area_path,
    averaged,
    axes_of,
    line_path,
    stacked,
    thinned,
    ticks,
    unit_ticks,
)

AXES = Axes(left=0, right=10, bottom=0, top=10)
NAN = math.nan


@pytest.mark.parametrize(
    ("points", "path"),
    [
        ((), ""),
        (((0, 0), (5, 5), (10, 10)), "M0.0 180.0L500.0 90.0L1000.0 0.0"),
        (((5, 5),), "M500.0 90.0h0"),
        (((0, 0), (5, None), (10, 10)), "M0.0 180.0h0 M1000.0 0.0h0"),
        (((0, 0), (1, 0), (2, NAN), (3, 0), (4, 0)), "M0.0 180.0L100.0 180.0 M300.0 180.0L400.0 180.0"),
        (((0, None), (1, math.inf)), ""),
    ],
)
def test_a_line_runs_through_its_points_and_ends_at_gaps(points: Points, path: str) -> None:
    assert line_path(points, AXES) == path


def test_an_area_goes_along_its_upper_edge_and_back_along_the_lower() -> None:
    lower, upper = ((0, 0.0), (10, 5.0)), ((0, 10.0), (10, 10.0))
    assert area_path(lower, upper, AXES) == "M0.0 0.0L1000.0 0.0L1000.0 90.0L0.0 180.0 Z"
    assert area_path(((0, None), (10, 5.0)), upper, AXES) == "M1000.0 0.0L1000.0 90.0 Z"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, (0, 5, 10)),
        (0, 8, (0, 2, 4, 6, 8)),
        (0.2, 0.9, (0.2, 0.4, 0.6, 0.8)),
        (-1, 1, (-1, -0.5, 0, 0.5, 1)),
        (3, 3, (3,)),
        (1, 300, (0, 100, 200, 300)[1:]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: tuple[float, ...]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@given(low=st.floats(-1e9, 1e9), share=st.floats(1e-3, 1e3))
def test_ticks_are_few_and_within(low: float, share: float) -> None:
    size = share * max(1.0, abs(low))
    found = ticks(low, low + size)
    assert len(found) <= 6
    assert all(low - size * 0.01 <= tick <= low + size * 1.01 for tick in found)


def test_ticks_are_round_in_the_unit_they_are_written_in() -> None:
    written = [Unit.BYTES.text(tick) for tick in unit_ticks(0, 244 * 2**20, Unit.BYTES)]
    assert written == ["0 B", "100 MiB", "200 MiB"]
    assert unit_ticks(0, 3600, Unit.SECONDS) == (0, 1200, 2400, 3600)


def chart(*lines: Points, **changes: Any) -> LineChart:
    series = tuple(Series(name=str(number), points=points) for number, points in enumerate(lines))
    return replace(LineChart(caption="", x_label="", unit=Unit.NUMBER, series=series), **changes)


def test_axes_hold_every_line_and_band() -> None:
    drawn = chart(((1, 2.0), (3, 4.0)), ((2, 6.0),), bands=(Span(begin=0, end=5, text="b"),))
    axes = axes_of(drawn)
    assert axes is not None
    assert (axes.left, axes.right, axes.bottom) == (0, 5, 0) and axes.top == pytest.approx(6.3)


def test_a_line_that_does_not_begin_at_zero_fills_the_plot() -> None:
    axes = axes_of(chart(((0, 4.0), (1, 8.0)), from_zero=False))
    assert axes is not None and (axes.bottom, axes.top) == pytest.approx((3.8, 8.2))


@pytest.mark.parametrize("points", [(), ((0, None),), ((0, NAN), (1, None))])
def test_without_a_figure_there_are_no_axes(points: Points) -> None:
    assert axes_of(chart(points)) is None


def test_one_point_and_a_flat_line_have_axes_with_room() -> None:
    for points in (((3, 5.0),), ((3, 0.0),), ((0, 5.0), (1, 5.0))):
        axes = axes_of(chart(points, from_zero=False))
        assert axes is not None and axes.top > axes.bottom
        assert 0 <= axes.y(points[0][1]) <= 180 and 0 <= axes.x(points[0][0]) <= 1000


def test_areas_lie_on_top_of_each_other_and_a_gap_adds_nothing() -> None:
    first, second = Series(name="a", points=((0, 1.0), (1, 2.0))), Series(name="b", points=((0, 3.0), (1, None)))
    (low, high), (next_low, next_high) = stacked((first, second))
    assert (
        low == ((0, 0.0), (1, 0.0)) and high == next_low == ((0, 1.0), (1, 2.0)) and next_high == ((0, 4.0), (1, 2.0))
    )
    axes = axes_of(chart(first.points, second.points, is_stacked=True))
    assert axes is not None and axes.top == pytest.approx(4.2)


@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=500), st.integers(10, 60))
def test_thinned_lines_keep_their_extremes_their_gaps_and_their_order(heights: list[float | None], most: int) -> None:
    points = tuple((float(x), y) for x, y in enumerate(heights))
    retained = thinned(points, most)
    assert len(retained) <= max(most * 1.5 + 3, len(points) if len(points) <= most else 0)
    assert set(retained) <= set(points) and all(a[0] < b[0] for a, b in pairwise(retained))
    figures = [y for y in heights if y is not None]
    if figures:
        told = [y for _, y in retained if y is not None]
        assert (min(told), max(told)) == (min(figures), max(figures))
    assert (None in heights) == (None in [y for _, y in retained])


def test_averaged_lines_of_the_same_steps_keep_the_same_steps() -> None:
    points = tuple((float(x), float(x % 2)) for x in range(1000))
    other = tuple((x, None if x < 10 else 1.0) for x, _ in points)
    found, beside = averaged(points, 100), averaged(other, 100)
    assert len(found) == 100 and [x for x, _ in found] == [x for x, _ in beside]
    assert {y for _, y in found} == {0.5} and beside[0] == (9.0, None) and beside[1] == (19.0, 1.0)
    assert averaged(points[:5]) == points[:5]
