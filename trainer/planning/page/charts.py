"""The geometry of charts, pure: which marks an axis has, where a line runs, what is stacked on what, what is left out.

A plot is `PLOT_WIDTH` x `PLOT_HEIGHT` units, stretched to the width there is, y downwards. What is no finite number is
a gap: the line ends before it and begins anew after it. A figure between two gaps is a dot.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from shardwise.trainer.planning.page.content import LineChart, Points, Series, Unit
from shardwise.trainer.spec.units import GIB, KIB, MIB, TIB

PLOT_WIDTH, PLOT_HEIGHT = 1000, 180
MOST_POINTS = 400  # of a line: more cannot be told apart, and would make a page of a long run large
_MOST_TICKS = 5
_SCALES = {Unit.BYTES: (TIB, GIB, MIB, KIB), Unit.SECONDS: (86400, 3600, 60)}
_ROOM_ABOVE = 0.05  # of the range, so that the highest line is not the edge


class Axes(NamedTuple):
    """The figures that the four edges of a plot stand for."""

    left: float
    right: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        """Units from the left edge."""
        return PLOT_WIDTH * self.x_share(value)

    def x_share(self, value: float) -> float:
        """0 at the left edge, 1 at the right one; where both are one, the middle."""
        return (value - self.left) / (self.right - self.left) if self.right > self.left else 0.5

    def y(self, value: float) -> float:
        """Units from the upper edge."""
        return PLOT_HEIGHT * (1 - (value - self.bottom) / (self.top - self.bottom))


def axes_of(chart: LineChart) -> Axes | None:
    """Edges that hold every line, mark and band; None where there is no figure to draw."""
    heights = [y for upper in _tops(chart) for _, y in upper if y is not None]
    if not heights:
        return None
    places = [x for series in chart.series for x, _ in series.points]
    places += [place for band in chart.bands for place in (band.begin, band.end)]
    low, high = min(heights), max(heights)
    bottom = min(0.0, low) if chart.from_zero or chart.is_stacked else low
    room = (high - bottom) * _ROOM_ABOVE or abs(high) * _ROOM_ABOVE or 1.0
    lowest = bottom if chart.from_zero or chart.is_stacked else bottom - room
    return Axes(min(places), max(places), lowest, high + room)


def ticks(low: float, high: float, most: int = _MOST_TICKS) -> tuple[float, ...]:
    """Round figures from `low` to `high`, at most `most` of them, a step of 1, 2 or 5 apart."""
    if not high > low:
        return (low,)
    raw = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(number * step for number in range(first, last + 1))


def unit_ticks(low: float, high: float, unit: Unit) -> tuple[float, ...]:
    """Figures that are round in the unit that they are written in: 200 MiB, 15 min."""
    scale = next((size for size in _SCALES.get(unit, ()) if max(abs(low), abs(high)) >= 2 * size), 1)
    return tuple(scale * value for value in ticks(low / scale, high / scale))


def line_path(points: Points, axes: Axes) -> str:
    """The `d` of a path through the points; empty where there is none."""
    return " ".join(_polyline([(axes.x(x), axes.y(y)) for x, y in part]) for part in parts_of(points))


def area_path(lower: Points, upper: Points, axes: Axes) -> str:
    """The `d` of the areas between two lines that have the same x; where either has a gap there is none."""
    pairs = tuple((x, None if low is None else high) for (x, low), (_, high) in zip(lower, upper, strict=True))
    floor = dict(lower)
    return " ".join(
        _polyline(
            [
                *((axes.x(x), axes.y(y)) for x, y in part),
                *((axes.x(x), axes.y(floor[x] or 0.0)) for x, _ in reversed(part)),
            ]
        )
        + " Z"
        for part in parts_of(pairs)
    )


def parts_of(points: Points) -> Iterator[list[tuple[float, float]]]:
    """Runs of points without a gap."""
    for is_there, run in groupby(points, key=lambda point: is_figure(point[1])):
        if is_there:
            yield [(x, y) for x, y in run if y is not None]


def is_figure(value: float | None) -> bool:
    """True if the value can be drawn."""
    return value is not None and math.isfinite(value)


def stacked(series: Sequence[Series]) -> list[tuple[Points, Points]]:
    """The lower and the upper edge of each series on top of those before it; what has no figure adds nothing."""
    places = sorted({x for each in series for x, _ in each.points})
    below = dict.fromkeys(places, 0.0)
    found: list[tuple[Points, Points]] = []
    for each in series:
        heights = dict(each.points)
        above = {x: below[x] + (y if is_figure(y := heights.get(x)) and y is not None else 0.0) for x in places}
        found.append((tuple(below.items()), tuple(above.items())))
        below = above
    return found


def thinned(points: Iterable[tuple[float, float | None]], most: int = MOST_POINTS) -> Points:
    """At most about `most` points, the lowest and the highest of each stretch among them, so that no spike is lost."""
    every = tuple(points)
    if len(every) <= most:
        return every
    size = -(-2 * len(every) // most)
    retained: list[tuple[float, float | None]] = []
    for begin in range(0, len(every), size):
        stretch = every[begin : begin + size]
        figures = [(y, number) for number, (_, y) in enumerate(stretch) if y is not None and math.isfinite(y)]
        gaps = [number for number, (_, y) in enumerate(stretch) if not is_figure(y)][:1]
        numbers = {min(figures)[1], max(figures)[1]} if figures else set()
        retained += [stretch[number] for number in sorted({*numbers, *gaps})]
    return tuple(retained)


def averaged(points: Iterable[tuple[float, float | None]], most: int = MOST_POINTS) -> Points:
    """At most `most` points, each the mean of a stretch, the same stretches for lines of the same x."""
    every = tuple(points)
    size = -(-len(every) // most)
    if size <= 1:
        return every
    stretches = (every[begin : begin + size] for begin in range(0, len(every), size))
    return tuple((stretch[-1][0], _mean([y for _, y in stretch])) for stretch in stretches)


def _mean(values: Iterable[float | None]) -> float | None:
    figures = [value for value in values if value is not None and math.isfinite(value)]
    return sum(figures) / len(figures) if figures else None


def _polyline(places: Sequence[tuple[float, float]]) -> str:
    first, *others = (f"{x:.1f} {y:.1f}" for x, y in places)
    return f"M{first}" + ("".join(f"L{other}" for other in others) or "h0")


def _tops(chart: LineChart) -> Iterator[Points]:
    """Points that the upper edge of the chart must contain."""
    if chart.is_stacked:
        yield from (upper for _, upper in stacked(chart.series))
        return
    for series in chart.series:
        yield tuple((x, y) for x, y in series.points if is_figure(y))
