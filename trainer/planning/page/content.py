"""Content of an explanation before it is text or HTML: sections of sentences, tables and charts.

One page is made from a plan or a run and written twice (`text_layout.page_text`, `page_html.pages_html`), so that both
say the same. Everything in it is plain text: whoever writes it escapes it. Text leaves charts out, so whatever a chart
shows stands beside it in words or in a table.
"""

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

    def words(self, value: float) -> str:
        """`1.5 GiB`, `12.3k`, `45 ms` or `4.2`."""
        if self is Unit.BYTES:
            return format_bytes(round(value))
        if self is Unit.SECONDS:
            return "0" if not value else format_seconds(value)
        return format_count(value) if self is Unit.COUNT else f"{value:,.6g}"


class Sentence(Value, frozen=True, kw_only=True, tag=True):
    """A paragraph."""

    text: str


class Quote(Value, frozen=True, kw_only=True, tag=True):
    """Text whose line breaks are its own, under a few words that say what it is."""

    label: str
    text: str


class Table(Value, frozen=True, kw_only=True, tag=True):
    """Rows of cells, the header first; columns in `right` are numbers.

    The column `wide` is the one that text moves to a line of its own where the table would be too wide. The cells in
    `best`, as (row, column), are marked with a star.
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
    """Parts of a whole in bytes; what they leave of `total` is free."""

    parts: dict[str, int]
    total: int

    @property
    def free(self) -> int:
        return max(0, self.total - sum(self.parts.values()))


class Bars(Value, frozen=True, kw_only=True, tag=True):
    """One bar a row, to compare by eye: (label, size, the size in words); text leaves it out."""

    caption: str
    rows: tuple[tuple[str, float, str], ...]


class PairedBars(Value, frozen=True, kw_only=True, tag=True):
    """Two bars a row, what was predicted above what was measured: (label, predicted, measured); None: not known."""

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
    is_dashed: bool = False  # what was predicted, or a limit


class Mark(Value, frozen=True, kw_only=True):
    """Something that happened at a place of the x axis."""

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


Block = Sentence | Quote | Table | StackedBar | Bars | PairedBars | Spans | LineChart


class Section(Value, frozen=True, kw_only=True):
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...] = ()


class Page(Value, frozen=True, kw_only=True):
    """One explanation."""

    title: str
    sections: tuple[Section, ...]
