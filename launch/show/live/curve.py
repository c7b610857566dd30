"""A curve of a few hundred points, however long the run, and its drawing in a row of characters. Pure but for `add`."""

from collections.abc import Sequence
from typing import NamedTuple

_MOST_POINTS = 512


class Point(NamedTuple):
    """A value at a step; of several steps, their mean at the last of them."""

    step: int
    value: float
    num_steps: int = 1


class Curve:
    """Points in the order of their steps; neighbours are joined where there are too many."""

    def __init__(self) -> None:
        self._points: list[Point] = []

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(self._points)

    def add(self, step: int, value: float) -> None:
        """A step that comes again, after a run has gone back, takes the place of what came from it on."""
        while self._points and self._points[-1].step >= step:
            self._points.pop()
        self._points.append(Point(step, value))
        if len(self._points) > _MOST_POINTS:
            self._points = _halved(self._points)


def sparkline(points: Sequence[Point], *, width: int, levels: str) -> str:
    """The curve in `width` characters, the lowest value as the first of `levels`, the highest as the last.

    Each character is the mean of a stretch of steps; a short curve takes a character a point.
    """
    means = _columns(points, width)
    if not means:
        return ""
    low, high = min(means), max(means)
    if high == low:
        return levels[0] * len(means)
    return "".join(levels[round((mean - low) / (high - low) * (len(levels) - 1))] for mean in means)


def _halved(points: Sequence[Point]) -> list[Point]:
    """The older half is thinned out by two: what is new is shown as it came."""
    old, new = points[: len(points) // 2], points[len(points) // 2 :]
    pairs = [old[place : place + 2] for place in range(0, len(old), 2)]
    return [_joined(pair) for pair in pairs] + list(new)


def _joined(points: Sequence[Point]) -> Point:
    num_steps = sum(point.num_steps for point in points)
    return Point(points[-1].step, sum(point.value * point.num_steps for point in points) / num_steps, num_steps)


def _columns(points: Sequence[Point], width: int) -> list[float]:
    """Means of equal stretches of steps; one without a point repeats the one before."""
    if len(points) <= width:
        return [point.value for point in points]
    first, last = points[0].step, points[-1].step
    stretches: list[list[Point]] = [[] for _ in range(width)]
    for point in points:
        stretches[(point.step - first) * width // (last - first + 1)].append(point)
    means: list[float] = []
    for stretch in stretches:
        means.append(_joined(stretch).value if stretch else means[-1])
    return means
