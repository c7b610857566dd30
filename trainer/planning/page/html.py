"""A page as one HTML file: the text of the page with charts as inline SVG; nothing is fetched and no script runs.

Everything that a person or a file may have named is escaped. A policy in the head forbids every request and every style
but the one in the head. Colours follow the reader's light or dark setting. Lengths along a chart are shares of its
width, so that text keeps its size from a phone to a wide screen. The colour of a series is the custom property `--hue`
of the classes c0 to c11.

A plot is `PLOT_WIDTH` x `PLOT_HEIGHT` units, stretched to the available width, y downwards. A value that is not finite
is a gap: the line ends before it and starts again after it. A figure between two gaps is a dot.
"""

import base64
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import NamedTuple

from shardwise.trainer.planning.page.content import (
    Bars,
    Block,
    LineChart,
    Mark,
    Page,
    PairedBars,
    Points,
    Quote,
    Section,
    Sentence,
    Series,
    Spans,
    StackedBar,
    Table,
    Unit,
)
from shardwise.trainer.spec.units import GIB, KIB, MIB, TIB, format_bytes


def pages_html(pages: Sequence[Page], *, title: str) -> str:
    """A complete document that holds one page or several, one after the other."""
    body = "\n".join(line for page in pages for line in _page(page))
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def fragment_html(page: Page, *, title: str, shown: Iterable[str]) -> str:
    """A page within another one, such as a notebook: the sections of these names, and below them all others, folded.

    Its style applies to it alone.
    """
    opened = list(shown)
    first = [section for section in page.sections if section.name in opened]
    folded = [section for section in page.sections if section.name not in opened]
    lines = [f'<div class="{_FRAGMENT}"><style>{scoped(STYLE, _FRAGMENT)}</style>', f"<h1>{escape(title)}</h1>"]
    for section in sorted(first, key=lambda section: opened.index(section.name)):
        lines += _section(section)
    for section in folded:
        blocks = "\n".join(line for block in section.blocks for line in block_html(block))
        lines.append(f"<details><summary>{escape(section.title)}</summary>\n{blocks}</details>")
    return "\n".join((*lines, "</div>"))


_FRAGMENT = "shardwise"
_RULE = re.compile(r"(@media[^{]*\{)|([^{}@]+)\{")


def scoped(style: str, name: str) -> str:
    """The rules of a style sheet for elements within those of class `name`, which stand for the document."""

    def prefixed(found: re.Match[str]) -> str:
        if found[1]:
            return found[1]
        selectors = (each.strip() for each in found[2].split(","))
        return ", ".join(f".{name}" if each in (":root", "body") else f".{name} {each}" for each in selectors) + " {"

    return _RULE.sub(prefixed, style)


def _page(page: Page) -> Iterator[str]:
    yield f"<h1>{escape(page.title)}</h1>"
    for section in page.sections:
        yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    yield f"<section>\n<h2>{escape(section.title)}</h2>"
    for block in section.blocks:
        yield from block_html(block)
    yield "</section>"


_MANY_LINES = 20


def block_html(block: Block) -> Iterator[str]:
    """A block, escaped, in the classes of `STYLE`."""
    if isinstance(block, Sentence):
        yield f"<p>{escape(block.text)}</p>"
    elif isinstance(block, Quote):
        focus = ' tabindex="0"' if block.text.count("\n") > _MANY_LINES else ""  # a page may limit its height
        yield f"<h3>{escape(block.label)}</h3>\n<pre{focus}>{escape(block.text)}</pre>"
    elif isinstance(block, Table):
        yield from _table(block)
    else:
        yield from _chart(block)


def _chart(block: StackedBar | Bars | PairedBars | Spans | LineChart) -> Iterator[str]:
    if isinstance(block, StackedBar):
        yield from stacked_bar_html(block)
    elif isinstance(block, Bars):
        yield from bars_svg(block)
    elif isinstance(block, PairedBars):
        yield from paired_bars_html(block)
    elif isinstance(block, Spans):
        yield from spans_svg(block)
    else:
        yield from line_chart_html(block)


def scrolling(label: str, *more: str) -> str:
    """The beginning of a box that the arrow keys move, once it has the focus, if it is wider than the window."""
    return f'<div class="{" ".join(("scroll", *more))}" tabindex="0" role="group" aria-label="{escape(label)}">'


def _table(table: Table) -> Iterator[str]:
    header, *rows = table.starred
    yield f"{scrolling('table')}<table>"
    titles = (cell("th" if text else "td", text, is_right=number in table.right) for number, text in enumerate(header))
    yield f"<tr>{''.join(titles)}</tr>"
    for number, row in enumerate(rows, start=1):
        cells = (
            cell("td", text, is_right=column in table.right, is_best=(number, column) in table.best)
            for column, text in enumerate(row)
        )
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</table></div>"


PLOT_WIDTH, PLOT_HEIGHT = 1000, 180
MOST_POINTS = 400  # of a line: more are not visible, and would make a page of a long run large
_MOST_TICKS, _MOST_X_TICKS = 6, 5  # the latter are side by side
_SCALES = {Unit.BYTES: (TIB, GIB, MIB, KIB), Unit.SECONDS: (86400, 3600, 60)}
_ROOM_ABOVE = 0.05  # of the range, so that the highest line is not the edge


class Axes(NamedTuple):
    """The figures that the four edges of a plot stand for."""

    left: float
    right: float
    bottom: float
    top: float
    is_log: bool = False  # of y

    def x(self, value: float) -> float:
        """Units from the left edge."""
        return PLOT_WIDTH * self.x_share(value)

    def x_share(self, value: float) -> float:
        """0 at the left edge, 1 at the right one; where both are one, the middle."""
        return (value - self.left) / (self.right - self.left) if self.right > self.left else 0.5

    def y(self, value: float) -> float:
        """Units from the upper edge, 0 for a value above it."""
        low, high = (math.log(edge) if self.is_log else edge for edge in (self.bottom, self.top))
        place = math.log(value) if self.is_log else value
        return PLOT_HEIGHT * max(0.0, 1 - (place - low) / (high - low))


NUM_COLOURS = 12
# Neighbours differ in lightness as well as in hue, on white and on near-black.
_LIGHT = (
    "#2f6fb5", "#d9730d", "#2e8b57", "#b83280", "#7a5cb8", "#8c6d46",
    "#1796a8", "#c23b4b", "#7d8b1f", "#5f6b76", "#c99a00", "#4457c9",
)  # fmt: skip
_DARK = (
    "#6ca6e8", "#f0a05a", "#5fc08a", "#e57cb7", "#ab92e6", "#c4a57c",
    "#54c4d4", "#ee7f8b", "#b6c552", "#9aa6b1", "#e8c34a", "#8b9bf5",
)  # fmt: skip

_SHEET = """
:root { color-scheme: light dark;
        --ink: #1b1f24; --faint: #5d6670; --paper: #ffffff; --line: #d8dee4; --free: #e6eaee; --good: #1a7f37; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --faint: #9198a1; --paper: #0d1117; --line: #30363d; --free: #21262d; --good: #56d364; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 58rem; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; line-height: 1.3; }
h2 { font-size: 1.05rem; margin-top: 2rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 0.9rem; color: var(--faint); font-weight: normal; margin: 1rem 0 0.2rem; }
p { margin: 0.4rem 0; }
pre { white-space: pre-wrap; font: 13px/1.45 ui-monospace, monospace; border-left: 3px solid var(--line);
      padding-left: 0.8rem; margin: 0.2rem 0; }
.axis { margin: 0; text-align: right; font-size: 0.8rem; color: var(--faint); }
.scroll { overflow-x: auto; margin: 0.4rem 0; }
table { border-collapse: collapse; font-size: 0.85rem; overflow-wrap: normal; }
th, td { padding: 0.15rem 0.6rem; text-align: left; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: normal; }
.right { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.best { font-weight: 600; color: var(--good); }
svg { display: block; width: 100%; overflow: visible; }
svg text { fill: var(--ink); font-size: 12px; } svg text.faint { fill: var(--faint); }
svg text.halo { paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
.free { fill: var(--free); } .part { fill: var(--hue); }
.key { display: inline-block; width: 0.8em; height: 0.8em; background: var(--hue); border-radius: 2px; }
.key.dashed { background: none; height: 0; border-top: 2px dashed var(--hue); border-radius: 0; vertical-align: 0.3em; }
.keys { display: flex; flex-wrap: wrap; gap: 0 1rem; list-style: none; margin: 0.2rem 0; padding: 0;
        font-size: 0.8rem; color: var(--faint); }
.chart { display: grid; grid-template-columns: 4.2rem minmax(0, 1fr); gap: 0 0.4rem; }
.line { fill: none; stroke: var(--hue); stroke-width: 1.8px; stroke-linejoin: round; stroke-linecap: round;
        vector-effect: non-scaling-stroke; }
.line.dashed { stroke-dasharray: 6 5; stroke-linecap: butt; } .line.faint { stroke-opacity: 0.4; }
.line.dot { stroke-width: 6px; }
.area { fill: var(--hue); fill-opacity: 0.75; } .band { fill: var(--hue); fill-opacity: 0.16; }
.grid { stroke: var(--line); } .mark { stroke: var(--ink); stroke-dasharray: 2 3; }
"""


def _hues(colours: tuple[str, ...]) -> str:
    return "".join(f".c{number} {{ --hue: {colour}; }}\n" for number, colour in enumerate(colours))


STYLE = f"{_SHEET}{_hues(_LIGHT)}@media (prefers-color-scheme: dark) {{\n{_hues(_DARK)}}}\n"


_BAR_HEIGHT = 22
_ROW_HEIGHT, _TEXT_AT, _THIN, _THIN_AT = 34, 14, 10, 19  # of a row: text above a thin bar
_ABOVE, _BELOW = 10, 24  # a plot: room for half a line of text, and for the figures of the x axis
_NAMED_MARKS = 5  # at most, with their text above the plot; otherwise the text is a tooltip
_MARK_HEIGHT = 14  # of such a text


def cell(tag: str, text: str, *, is_right: bool = False, is_best: bool = False) -> str:
    """A cell of a table."""
    names = " ".join(name for name, is_set in (("right", is_right), ("best", is_best)) if is_set)
    attributes = f' class="{names}"' if names else ""
    return f"<{tag}{attributes}>{escape(text)}</{tag}>"


def stacked_bar_html(bar: StackedBar) -> Iterator[str]:
    """The bar, and a table of its parts."""
    yield f'<svg height="{_BAR_HEIGHT}" role="img" aria-label="{escape(", ".join(bar.parts))}">'
    yield f'<rect class="free" width="100%" height="{_BAR_HEIGHT}"/>'
    left = 0.0
    for number, (name, size) in enumerate(bar.parts.items()):
        width = 100 * size / bar.total if bar.total else 0.0
        yield (
            f'<rect class="part c{number % NUM_COLOURS}" x="{left:.2f}%" width="{width:.2f}%" height="{_BAR_HEIGHT}">'
            f"<title>{escape(f'{name}: {format_bytes(size)}')}</title></rect>"
        )
        left += width
    yield "</svg>"
    yield f'{scrolling("table")}<table class="legend">'
    for number, (name, size) in enumerate(bar.parts.items()):
        key = f'<td><span class="key c{number % NUM_COLOURS}"></span></td>'
        yield f"<tr>{key}{cell('td', name)}{cell('td', format_bytes(size), is_right=True)}</tr>"
    yield f"<tr><td></td>{cell('td', 'free')}{cell('td', format_bytes(bar.free), is_right=True)}</tr>"
    yield "</table></div>"


def bars_svg(bars: Bars) -> Iterator[str]:
    """A row each: the label and the value above the bar."""
    if not bars.rows:
        return
    largest = max(size for _, size, _ in bars.rows) or 1.0
    yield f"<h3>{escape(bars.caption)}</h3>"
    yield f'<svg height="{_ROW_HEIGHT * len(bars.rows)}" role="img" aria-label="{escape(bars.caption)}">'
    for number, (label, size, text) in enumerate(bars.rows):
        top = number * _ROW_HEIGHT
        yield from _row_text(label, text, top)
        yield _rect("part c0", 0.0, size / largest, top + _THIN_AT, _THIN)
    yield "</svg>"


def paired_bars_html(bars: PairedBars) -> Iterator[str]:
    """A row each: the prediction above the measurement."""
    known = [size for _, *sizes in bars.rows for size in sizes if size is not None]
    if not known:
        return
    largest = max(known) or 1.0
    height = _ROW_HEIGHT + _THIN + 2
    yield f"<h3>{escape(bars.caption)}</h3>"
    yield _keys((("predicted", 0, False), ("measured", 1, False)))
    yield f'<svg height="{height * len(bars.rows)}" role="img" aria-label="{escape(bars.caption)}">'
    for number, (label, *sizes) in enumerate(bars.rows):
        top = number * height
        text = " / ".join("-" if size is None else bars.unit.text(size) for size in sizes)
        yield from _row_text(label, text, top)
        for place, size in enumerate(sizes):
            if size is not None:
                yield _rect(f"part c{place}", 0.0, size / largest, top + _THIN_AT + place * (_THIN + 1), _THIN)
    yield "</svg>"


def spans_svg(spans: Spans) -> Iterator[str]:
    """A row each: the text above a stretch of the common axis."""
    if not spans.rows:
        return
    end = max(span.end for span in spans.rows) or 1.0
    height = _ROW_HEIGHT * len(spans.rows)
    yield f"<h3>{escape(spans.caption)}</h3>"
    yield f'<svg height="{height + _BELOW}" role="img" aria-label="{escape(spans.caption)}">'
    for number, span in enumerate(spans.rows):
        top = number * _ROW_HEIGHT
        yield from _row_text(span.text, "", top)
        width = max(0.002, (span.end - span.begin) / end)
        yield _rect(f"part c{number % NUM_COLOURS}", span.begin / end, width, top + _THIN_AT, _THIN)
    axes = Axes(0.0, end, 0.0, 1.0)
    yield from _x_ticks(
        ((value, spans.unit.text(value)) for value in unit_ticks(0.0, end, spans.unit, _MOST_X_TICKS)),
        axes,
        height + 16,
    )
    yield "</svg>"


def line_chart_html(chart: LineChart) -> Iterator[str]:
    """The plot with its scales; nothing if there is no figure."""
    axes = axes_of(chart)
    if axes is None:
        return
    values = log_ticks(axes.bottom, axes.top) if axes.is_log else unit_ticks(axes.bottom, axes.top, chart.unit)
    marks = [mark for mark in chart.marks if axes.left <= mark.at <= axes.right]
    above = _ABOVE + (_MARK_HEIGHT * len(marks) if len(marks) <= _NAMED_MARKS else 0)
    heights = [(value, above + axes.y(value)) for value in values]
    height = above + PLOT_HEIGHT + _BELOW
    yield f"<h3>{escape(chart.caption)}</h3>"
    yield _keys(_series_keys(chart))
    yield f'<div class="chart"><svg height="{height}">'
    for value, top in heights:
        yield f'<text class="faint" x="100%" y="{top + 4:.1f}" text-anchor="end">{chart.unit.text(value)}</text>'
    yield f'</svg><svg height="{height}" role="img" aria-label="{escape(chart.caption)}">'
    yield from _bands(chart, axes, above)
    yield from (f'<line class="grid" x1="0" x2="100%" y1="{top:.1f}" y2="{top:.1f}"/>' for _, top in heights)
    box = f'viewBox="0 0 {PLOT_WIDTH} {PLOT_HEIGHT}" preserveAspectRatio="none"'
    yield f'<svg y="{above}" width="100%" height="{PLOT_HEIGHT}" {box}>'
    yield from _paths(chart, axes)
    yield "</svg>"
    yield from _marks(marks, axes, above)
    beyond = _beyond(chart, axes)
    yield from (
        f'<text class="faint" x="{axes.x_share(x):.2%}" y="{above + 2}" text-anchor="middle" aria-hidden="true">'
        f"\u25b2<title>{escape(chart.unit.text(y))}</title></text>"
        for x, y in beyond
    )
    labels = (
        (value, chart.x_unit.text(value)) for value in unit_ticks(axes.left, axes.right, chart.x_unit, _MOST_X_TICKS)
    )
    yield from _x_ticks(labels, axes, above + PLOT_HEIGHT + 16)
    yield f'</svg></div>\n<p class="axis">{escape(chart.x_label)}</p>{_beyond_html(chart, beyond)}'


def _beyond(chart: LineChart, axes: Axes) -> list[tuple[float, float]]:
    """Points above the upper edge."""
    found = {(x, y) for upper in _uppermost(chart) for x, y in upper if y is not None and is_figure(y) and y > axes.top}
    return sorted(found)


def _beyond_html(chart: LineChart, beyond: Sequence[tuple[float, float]]) -> str:
    if not beyond:
        return ""
    x, y = max(beyond, key=lambda point: point[1])
    number = f"{len(beyond)} values are" if len(beyond) > 1 else "one value is"
    at = f"{chart.x_label} {chart.x_unit.text(x)}"
    text = f"\u25b2 {number} above the chart; the highest is {chart.unit.text(y)}, at {at}"
    return f'<p class="axis">{escape(text)}</p>'


def _paths(chart: LineChart, axes: Axes) -> Iterator[str]:
    if chart.is_stacked:
        for number, (lower, upper) in enumerate(stacked(chart.series)):
            yield f'<path class="area c{number % NUM_COLOURS}" d="{area_path(lower, upper, axes)}"/>'
        return
    for number, series in enumerate(chart.series):
        dashed = f"{' dashed' if series.is_dashed else ''}{' faint' if series.is_faint else ''}"
        path = line_path(series.points, axes)
        if path:
            yield f'<path class="line{dashed} c{number % NUM_COLOURS}" d="{path}"/>'
        lone = [part[0] for part in parts_of(_on_scale(series.points, axes)) if len(part) == 1]
        if lone:
            dots = " ".join(_polyline([(axes.x(x), axes.y(y))]) for x, y in lone)
            yield f'<path class="line dot c{number % NUM_COLOURS}" d="{dots}"/>'


def _bands(chart: LineChart, axes: Axes, above: float) -> Iterator[str]:
    places = _band_places(chart)
    for band in chart.bands:
        left, right = axes.x_share(band.begin), axes.x_share(band.end)
        yield _rect(f"band c{places[band.text]}", left, right - left, above, PLOT_HEIGHT, title=band.text)


def _marks(marks: Sequence[Mark], axes: Axes, above: float) -> Iterator[str]:
    """A line each; if they are few, with its text above the plot, on the side that has room."""
    is_named = len(marks) <= _NAMED_MARKS
    for number, mark in enumerate(marks):
        share, text = axes.x_share(mark.at), escape(mark.text)
        begin = _MARK_HEIGHT * number + 2 if is_named else above
        place = f'x1="{share:.2%}" x2="{share:.2%}" y1="{begin}" y2="{above + PLOT_HEIGHT}"'
        yield f'<line class="mark" {place}><title>{text}</title></line>'
        if is_named:
            anchor, shift = ("end", -4) if share > 0.5 else ("start", 4)
            yield (
                f'<text class="halo" x="{share:.2%}" dx="{shift}" y="{begin + 10}" text-anchor="{anchor}">'
                f"{escape(_short(mark.text))}</text>"
            )


def _short(text: str, most: int = 28) -> str:
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def _x_ticks(labels: Iterable[tuple[float, str]], axes: Axes, top: float) -> Iterator[str]:
    """Figures below a plot; those at its edges stay within it."""
    for value, text in labels:
        share = axes.x_share(value)
        anchor = "start" if share < 0.04 else "end" if share > 0.96 else "middle"
        yield f'<text class="faint" x="{share:.2%}" y="{top}" text-anchor="{anchor}">{escape(text)}</text>'


def _row_text(label: str, text: str, top: float) -> Iterator[str]:
    yield f'<text x="0" y="{top + _TEXT_AT}">{escape(label)}</text>'
    if text:
        yield f'<text class="halo" x="100%" y="{top + _TEXT_AT}" text-anchor="end">{escape(text)}</text>'


def _rect(names: str, left: float, width: float, top: float, height: float, *, title: str = "") -> str:
    """`left` and `width` are shares of the whole."""
    place = f'x="{left:.2%}" y="{top:g}" width="{max(0.0, width):.2%}" height="{height:g}"'
    return f'<rect class="{names}" {place}>{f"<title>{escape(title)}</title>" if title else ""}</rect>'


def _series_keys(chart: LineChart) -> Iterator[tuple[str, int, bool]]:
    for number, series in enumerate(chart.series):
        yield series.name, number, series.is_dashed
    for text, number in _band_places(chart).items():
        yield text, number, False


def _band_places(chart: LineChart) -> dict[str, int]:
    """The colour of each kind of band: those after the colours of the lines."""
    names = dict.fromkeys(band.text for band in chart.bands)
    return {name: (len(chart.series) + number) % NUM_COLOURS for number, name in enumerate(names)}


def _keys(keys: Iterable[tuple[str, int, bool]]) -> str:
    items = "".join(
        f'<li><span class="key{" dashed" if is_dashed else ""} c{number % NUM_COLOURS}"></span> {escape(name)}</li>'
        for name, number, is_dashed in keys
    )
    return f'<ul class="keys">{items}</ul>'


def axes_of(chart: LineChart) -> Axes | None:
    """Edges that contain every line, mark and band; None if there is no figure to draw."""
    heights = [y for upper in _tops(chart) for _, y in upper if y is not None]
    if not heights:
        return None
    places = [x for series in chart.series for x, _ in series.points]
    places += [place for band in chart.bands for place in (band.begin, band.end)]
    if chart.is_log and not chart.is_stacked and (above := [height for height in heights if height > 0]):
        low, high = min(above), max(above)
        room = max(high / low, 1.1) ** _ROOM_ABOVE
        return Axes(min(places), max(places), low / room, high * room, is_log=True)
    low, high = min(heights), max(heights)
    bottom = min(0.0, low) if chart.from_zero or chart.is_stacked else low
    high = _usual_height(chart, bottom, high) if chart.clips else high
    room = (high - bottom) * _ROOM_ABOVE or abs(high) * _ROOM_ABOVE or 1.0
    lowest = bottom if chart.from_zero or chart.is_stacked else bottom - room
    return Axes(min(places), max(places), lowest, high + room)


_CLIPPED_FROM = 20  # values, of which one in twenty may be above the chart
_USUAL_SHARE, _FAR = 0.95, 3.0


def _usual_height(chart: LineChart, bottom: float, high: float) -> float:
    """A height above nearly all values, if the highest one is `_FAR` times as far from `bottom`; else `high`."""
    measured = sorted(y for upper in _uppermost(chart) for _, y in upper if y is not None and is_figure(y))
    if len(measured) < _CLIPPED_FROM:
        return high
    usual = measured[int(_USUAL_SHARE * (len(measured) - 1))]
    if usual <= bottom or measured[-1] - bottom <= _FAR * (usual - bottom):
        return high
    levels = (y for each in chart.series if each.is_dashed for _, y in each.points if y is not None and is_figure(y))
    return max(bottom + 1.5 * (usual - bottom), *levels, usual)


def _uppermost(chart: LineChart) -> Iterator[Points]:
    """The measured lines, or the upper edge of all areas together."""
    if chart.is_stacked:
        yield from (upper for _, upper in stacked(chart.series)[-1:])
        return
    yield from (each.points for each in chart.series if not each.is_dashed)


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """1, 2 and 5 times powers of ten from `low` to `high`; of many only powers; of none the round figures between."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    within = [value for value in found if low <= value <= high]
    if len(within) > _MOST_TICKS + 2:
        tens = [value for value in (10.0**power for power in powers) if low <= value <= high]
        within = tens[:: -(-len(tens) // _MOST_TICKS)]
    return tuple(within) if len(within) > 1 else tuple(value for value in ticks(low, high) if value > 0)


def ticks(low: float, high: float, most: int = _MOST_TICKS) -> tuple[float, ...]:
    """Round figures from `low` to `high`, at most `most` of them, a step of 1, 2 or 5 apart."""
    if not high > low:
        return (low,)
    raw = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(number * step for number in range(first, last + 1))


def unit_ticks(low: float, high: float, unit: Unit, most: int = _MOST_TICKS) -> tuple[float, ...]:
    """Figures that are round in the unit that they are written in: 200 MiB, 15 min."""
    scale = next((size for size in _SCALES.get(unit, ()) if max(abs(low), abs(high)) >= 2 * size), 1)
    return tuple(scale * value for value in ticks(low / scale, high / scale, most))


def line_path(points: Points, axes: Axes) -> str:
    """The `d` of a path through the points; empty where there is none."""
    parts = parts_of(_on_scale(points, axes))
    return " ".join(_polyline([(axes.x(x), axes.y(y)) for x, y in part]) for part in parts)


def _on_scale(points: Points, axes: Axes) -> Points:
    """The points, with gaps for what a log scale cannot show."""
    return tuple((x, None if y is None or not y > 0 else y) for x, y in points) if axes.is_log else points


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
    """The lower and the upper edge of each series on top of those before it; a gap adds nothing."""
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
