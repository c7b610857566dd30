"""The ladder as a picture: for each rung its peak, its step time, and what was predicted of both. Pure.

Bars are what was measured, the line across each is the prediction; a rung that ran out of memory has the line alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

from launch.ladder_run import Outcome
from launch.png_canvas import Canvas, text_width
from trainer.spec.units import format_bytes, format_seconds

_PAPER, _INK, _FAINT, _PEAK, _STEP, _OVER, _GRID = range(7)
_PALETTE = (
    (255, 255, 255), (27, 31, 36), (93, 102, 112), (47, 111, 181), (46, 139, 87), (194, 59, 75), (230, 234, 238)
)  # fmt: skip
_MARGIN, _ROW, _BAR, _TOP = 24, 46, 20, 96
_BAR_WIDTH, _GAP = 380, 40
_WORDS_WIDTH = 250  # right of a bar: what was measured and what was predicted
_MARK = 3  # pixels of the line that is a prediction


def ladder_png(title: str, rows: Sequence[dict[str, Any]]) -> bytes:
    """A PNG of the rungs that ran, or ran out of memory; `rows` are those of `ladder_rows`."""
    seen = [row for row in rows if row["outcome"] in (Outcome.RAN, Outcome.OUT_OF_MEMORY)]
    names = max([text_width(row["rung"]) for row in seen], default=0) + _GAP // 2
    width = _MARGIN + names + 2 * (_BAR_WIDTH + _WORDS_WIDTH) + _GAP + _MARGIN
    canvas = Canvas(max(width, text_width(title) + 2 * _MARGIN), _TOP + _ROW * len(seen) + _MARGIN, _PALETTE)
    canvas.write(title, _MARGIN, _MARGIN, _INK)
    first = _MARGIN + names
    second = first + _BAR_WIDTH + _WORDS_WIDTH + _GAP
    canvas.write("peak memory (line: predicted)", first, _TOP - 36, _FAINT)
    canvas.write("seconds a step (line: predicted)", second, _TOP - 36, _FAINT)
    for number, row in enumerate(seen):
        canvas.write(row["rung"], _MARGIN, _TOP + number * _ROW + 2, _INK)
    _bars(canvas, first, seen, ("peak_bytes", "predicted_peak_bytes"), _PEAK, lambda size: format_bytes(round(size)))
    _bars(canvas, second, seen, ("step_s", "predicted_step_s"), _STEP, format_seconds)
    return canvas.png()


def _bars(
    canvas: Canvas,
    left: int,
    rows: Sequence[dict[str, Any]],
    names: tuple[str, str],
    colour: int,
    words: Callable[[float], str],
) -> None:
    """One column of bars on a common scale."""
    sizes = [row[name] for row in rows for name in names if row[name] is not None]
    if not sizes:
        return
    largest = max(sizes) or 1
    for number, row in enumerate(rows):
        top = _TOP + number * _ROW
        measured, predicted = (row[name] for name in names)
        canvas.fill(left, top, _BAR_WIDTH, _BAR, _GRID)
        if measured is not None:
            canvas.fill(left, top, round(_BAR_WIDTH * measured / largest), _BAR, colour)
        if predicted is not None:
            place = left + round(_BAR_WIDTH * predicted / largest)
            canvas.fill(place - _MARK, top - 3, _MARK, _BAR + 6, _INK)
        is_over = row["outcome"] == Outcome.OUT_OF_MEMORY
        told = "out of memory" if is_over else "-" if measured is None else words(measured)
        canvas.write(told, left + _BAR_WIDTH + 12, top + 2, _OVER if is_over else _INK)
