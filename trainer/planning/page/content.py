"""Content of an explanation, sections of sentences, tables and charts, and its form as plain text.

A page is made once, from a plan or a run, and written as text (`page_text`) and as HTML (`html.pages_html`). Everything
in it is plain text, which each writer escapes. Text omits charts, so everything that a chart shows is also in a
sentence or a table. The text is ASCII: aligned tables, wrapped paragraphs, a stacked bar.
"""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds
from shardwise.trainer.spec.value import Value

Points = tuple[tuple[float, float | None], ...]  # (x, y); None: there is no figure, and the line has a gap


class Unit(StrEnum):
    """How a chart writes a figure."""

    NUMBER = "number"
    COUNT = "count"
    BYTES = "bytes"
    SECONDS = "seconds"
    SHARE = "share"

    def text(self, value: float) -> str:
        """`1.5 GiB`, `12.3k`, `45 ms` or `4.2`."""
        if self is Unit.BYTES:
            return format_bytes(round(value))
        if self is Unit.SECONDS:
            return "0" if not value else format_seconds(value)
        if self is Unit.SHARE:
            return f"{100 * value:.3g}%"
        return format_count(value) if self is Unit.COUNT else f"{value:,.6g}"


class Sentence(Value, frozen=True, kw_only=True, tag=True):
    """A paragraph."""

    text: str


class Quote(Value, frozen=True, kw_only=True, tag=True):
    """Preformatted text under a label."""

    label: str
    text: str


class Table(Value, frozen=True, kw_only=True, tag=True):
    """Rows of cells, the header first; columns in `right` are numbers.

    In text that would be too wide, the cells of column `wide` move to lines of their own. The cells in `best`, as
    (row, column), are marked with a star.
    """

    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    wide: int | None = None
    best: tuple[tuple[int, int], ...] = ()

    @property
    def starred(self) -> tuple[tuple[str, ...], ...]:
        """The rows with their stars."""
        return tuple(
            tuple(f"{cell} *" if (number, column) in self.best else cell for column, cell in enumerate(row))
            for number, row in enumerate(self.rows)
        )


class StackedBar(Value, frozen=True, kw_only=True, tag=True):
    """Parts of a whole in bytes; the rest of `total` is free."""

    parts: dict[str, int]
    total: int

    @property
    def free(self) -> int:
        return max(0, self.total - sum(self.parts.values()))


class Bars(Value, frozen=True, kw_only=True, tag=True):
    """One bar a row: (label, size, the size as text); omitted in text."""

    caption: str
    rows: tuple[tuple[str, float, str], ...]


class PairedBars(Value, frozen=True, kw_only=True, tag=True):
    """Two bars a row, the prediction above the measurement: (label, predicted, measured); None: not known."""

    caption: str
    rows: tuple[tuple[str, float | None, float | None], ...]
    unit: Unit


class Span(Value, frozen=True, kw_only=True):
    """A stretch of an axis."""

    begin: float
    end: float
    text: str


class Spans(Value, frozen=True, kw_only=True, tag=True):
    """One stretch a row on a common axis."""

    caption: str
    rows: tuple[Span, ...]
    unit: Unit


class Series(Value, frozen=True, kw_only=True):
    """One line of a chart; x ascends."""

    name: str
    points: Points
    is_dashed: bool = False  # a prediction or a limit
    is_faint: bool = False  # behind a smoothed one


class Mark(Value, frozen=True, kw_only=True):
    """An event at a place of the x axis."""

    at: float
    text: str


class LineChart(Value, frozen=True, kw_only=True, tag=True):
    """Lines over one axis, or areas on top of each other where it is stacked."""

    caption: str
    x_label: str
    unit: Unit
    series: tuple[Series, ...]
    x_unit: Unit = Unit.NUMBER
    marks: tuple[Mark, ...] = ()
    bands: tuple[Span, ...] = ()  # coloured by their text
    from_zero: bool = True
    is_stacked: bool = False
    is_log: bool = False  # of y; values that are not above 0 are gaps; without effect on areas
    clips: bool = False  # a few values far above all others do not set the scale


Block = Sentence | Quote | Table | StackedBar | Bars | PairedBars | Spans | LineChart


class Section(Value, frozen=True, kw_only=True):
    """A heading and its content; `name` selects it on the command line."""

    title: str
    blocks: tuple[Block, ...] = ()
    name: str = ""


class Page(Value, frozen=True, kw_only=True):
    """One explanation."""

    title: str
    sections: tuple[Section, ...]


def page_text(page: Page, *, width: int) -> str:
    """The page in lines of at most `width` columns, sections a blank line apart."""
    parts = [paragraph(page.title, width=width, indent="")]
    parts += [lines for section in page.sections if (lines := _section(section, width))]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _section(section: Section, width: int) -> list[str]:
    """The lines of a section; none if it has only charts."""
    lines = [line for block in section.blocks for line in _block(block, width)]
    return [*paragraph(section.title, width=width, indent=""), *lines] if lines or not section.blocks else []


def _block(block: Block, width: int) -> Iterable[str]:
    if isinstance(block, Sentence):
        return paragraph(block.text, width=width)
    if isinstance(block, Quote):
        return [f"  {block.label}: " + block.text.replace("\n", "\n" + " " * 10)]
    if isinstance(block, Table):
        return table(block.starred, right=block.right, wide=block.wide, width=width)
    if isinstance(block, StackedBar):
        return _bar_with_legend(block, width)
    return ()  # a chart: its figures are in other blocks


def table(
    rows: Sequence[Sequence[str]],
    *,
    right: Iterable[int] = (),
    indent: str = "  ",
    wide: int | None = None,
    width: int | None = None,
) -> list[str]:
    """Columns two spaces apart; those in `right` are aligned to the right, the last is never padded.

    If the table is wider than `width` columns, the cells of column `wide` move to lines of their own, and if that is
    not enough those of the last columns.
    """
    if not rows:
        return []
    lines = _aligned(rows, set(right), indent)
    if width is None or wide is None or max(map(len, lines)) <= width:
        return lines
    shown, moved = [column for column in range(len(rows[0])) if column != wide], [wide]
    while max(map(len, aligned := _columns(rows, shown, set(right), indent))) > width and len(shown) > _LEAST_COLUMNS:
        moved.append(shown.pop())
    lines = []
    for number, (line, row) in enumerate(zip(aligned, rows, strict=True)):
        lines.append(line)
        cells = "  ".join(row[column] for column in moved if row[column])
        if number and cells:
            lines += paragraph(cells, width=width, indent=indent + "      ")
    return lines


_LEAST_COLUMNS = 2


def _columns(rows: Sequence[Sequence[str]], shown: Sequence[int], right: set[int], indent: str) -> list[str]:
    """Some columns of the rows, aligned."""
    places = {place for place, column in enumerate(shown) if column in right}
    return _aligned([[row[column] for column in shown] for row in rows], places, indent)


def _aligned(rows: Sequence[Sequence[str]], right: set[int], indent: str) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def paragraph(text: str, *, width: int, indent: str = "  ") -> list[str]:
    """`text` wrapped at spaces; lines after the first are indented by two more columns."""
    return textwrap.wrap(
        text,
        width=max(width, 40),
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _bar_with_legend(bar: StackedBar, width: int) -> Iterator[str]:
    sizes = list(bar.parts.values())
    yield f"  {stacked_bar(sizes, total=bar.total, width=width - 4)}"
    rows = [
        (letter, name, format_bytes(size))
        for letter, (name, size) in zip(letters(len(sizes)), bar.parts.items(), strict=True)
    ]
    yield from table([*rows, (".", "free", format_bytes(bar.free))], right=(2,), indent="    ")


def letters(num_parts: int) -> str:
    """One letter for each part of a bar."""
    from string import ascii_lowercase  # a millisecond, for no page but that of a terminal

    return (ascii_lowercase * (num_parts // len(ascii_lowercase) + 1))[:num_parts]


def stacked_bar(sizes: Sequence[int], *, total: int, width: int) -> str:
    """`[aaabb....]`: each part with its letter, as long as its share of `total`; dots are the rest."""
    cells = ""
    filled = 0
    for letter, size in zip(letters(len(sizes)), sizes, strict=True):
        filled += size
        cells += letter * (min(width, round(width * filled / total)) - len(cells))
    return f"[{cells.ljust(width, '.')}]"
