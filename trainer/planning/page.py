"""What an explanation is made of, before it is text or HTML: sections of sentences, tables and charts.

One page is made from a plan and written twice (`text_layout.page_text`, `explain_html.page_html`), so that both say the
same. Everything in it is plain text: whoever writes it escapes it.
"""

from trainer.spec.value import Value


class Sentence(Value, frozen=True, kw_only=True, tag=True):
    """A paragraph."""

    text: str


class Table(Value, frozen=True, kw_only=True, tag=True):
    """Rows of cells, the header first; columns in `right` are numbers.

    The column `wide` is the one that text moves to a line of its own where the table would be too wide.
    """

    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    wide: int | None = None


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


Block = Sentence | Table | StackedBar | Bars


class Section(Value, frozen=True, kw_only=True):
    """A heading and what stands under it."""

    title: str
    blocks: tuple[Block, ...] = ()


class Page(Value, frozen=True, kw_only=True):
    """One explanation."""

    title: str
    sections: tuple[Section, ...]
