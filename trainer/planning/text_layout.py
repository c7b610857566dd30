"""Plain text for a terminal: aligned tables, wrapped paragraphs and a stacked bar, in ASCII."""

import textwrap
from collections.abc import Iterable, Sequence
from string import ascii_lowercase


def table(rows: Sequence[Sequence[str]], *, right: Iterable[int] = (), indent: str = "  ") -> list[str]:
    """Columns two spaces apart; those in `right` are aligned to the right, the last is never padded."""
    if not rows:
        return []
    right_columns = set(right)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right_columns else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def paragraph(text: str, *, width: int, indent: str = "  ", hanging: str = "  ") -> list[str]:
    """`text` wrapped at words; lines after the first stand `hanging` deeper."""
    return textwrap.wrap(
        text,
        width=max(width, 40),
        initial_indent=indent,
        subsequent_indent=indent + hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


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
