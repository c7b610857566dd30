"""Plain text for a terminal: aligned tables, wrapped paragraphs and a stacked bar, in ASCII."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from string import ascii_lowercase

from shardwise.trainer.planning.page.content import Block, Page, Quote, Section, Sentence, StackedBar, Table
from shardwise.trainer.spec.units import format_bytes


def page_text(page: Page, *, width: int) -> str:
    """The page in lines of at most `width` columns, sections a blank line apart."""
    parts = [paragraph(page.title, width=width, indent="")]
    parts += [lines for section in page.sections if (lines := _section(section, width))]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _section(section: Section, width: int) -> list[str]:
    """The lines of a section; none where all it holds are charts."""
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
    return ()  # a chart: its figures stand beside it


def table(
    rows: Sequence[Sequence[str]],
    *,
    right: Iterable[int] = (),
    indent: str = "  ",
    wide: int | None = None,
    width: int | None = None,
) -> list[str]:
    """Columns two spaces apart; those in `right` are aligned to the right, the last is never padded.

    Where that takes more than `width` columns, the cells of the column `wide` stand in lines of their own.
    """
    if not rows:
        return []
    lines = _aligned(rows, set(right), indent)
    if width is None or wide is None or max(map(len, lines)) <= width:
        return lines
    others = [[cell for column, cell in enumerate(row) if column != wide] for row in rows]
    right_others = {column - (column > wide) for column in right if column != wide}
    lines = []
    for number, (line, row) in enumerate(zip(_aligned(others, right_others, indent), rows, strict=True)):
        lines.append(line)
        if number and row[wide]:
            lines += paragraph(row[wide], width=width, indent=indent + "      ")
    return lines


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
    """`text` wrapped at words; lines after the first stand two columns deeper."""
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
    return (ascii_lowercase * (num_parts // len(ascii_lowercase) + 1))[:num_parts]


def stacked_bar(sizes: Sequence[int], *, total: int, width: int) -> str:
    """`[aaabb....]`: each part with its letter, as long as its share of `total`; a dot is what is left."""
    cells = ""
    filled = 0
    for letter, size in zip(letters(len(sizes)), sizes, strict=True):
        filled += size
        cells += letter * (min(width, round(width * filled / total)) - len(cells))
    return f"[{cells.ljust(width, '.')}]"
