"""A page as one HTML file: the same words as the text, and charts, with nothing fetched and no script.

Everything a person or a file may have named is escaped on its way in; charts are inline SVG, the text of every chart
stands beside it in words, and colours follow the reader's light or dark setting.
"""

from collections.abc import Iterator, Sequence
from html import escape

from trainer.planning.page import Bars, Block, Page, Section, Sentence, StackedBar, Table
from trainer.spec.units import format_bytes

_WIDTH, _BAR_HEIGHT, _LABEL_WIDTH, _VALUE_WIDTH = 860, 22, 370, 110
_NUM_COLOURS = 12

_STYLE = """
:root { color-scheme: light dark;
        --ink: #1b1f24; --faint: #6a737d; --paper: #ffffff; --line: #d8dee4; --free: #eaeef2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --faint: #9198a1; --paper: #0d1117; --line: #30363d; --free: #21262d; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 58rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 0.9rem; color: var(--faint); font-weight: normal; margin-bottom: 0.2rem; }
table { border-collapse: collapse; font-size: 0.85rem; display: block; overflow-x: auto; }
th, td { padding: 0.15rem 0.6rem; text-align: left; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: normal; } .right { text-align: right; font-variant-numeric: tabular-nums; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 12px; }
.free { fill: var(--free); } .key { display: inline-block; width: 0.9em; height: 0.9em; }
"""
_HUES = tuple(round(360 * number * 5 / _NUM_COLOURS) % 360 for number in range(_NUM_COLOURS))


def pages_html(pages: Sequence[Page], *, title: str) -> str:
    """A complete document that holds one page or several, one after the other."""
    body = "\n".join(line for page in pages for line in _page(page))
    colours = "".join(
        f".c{number} {{ fill: hsl({hue} 55% 50%); background: hsl({hue} 55% 50%); }}\n"
        for number, hue in enumerate(_HUES)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{colours}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _page(page: Page) -> Iterator[str]:
    yield f"<h1>{escape(page.title)}</h1>"
    for section in page.sections:
        yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    yield f"<section>\n<h2>{escape(section.title)}</h2>"
    for block in section.blocks:
        yield from _block(block)
    yield "</section>"


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Sentence):
        yield f"<p>{escape(block.text)}</p>"
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, StackedBar):
        yield from _stacked_bar(block)
    else:
        yield from _bars(block)


def _table(table: Table) -> Iterator[str]:
    header, *rows = table.rows
    yield "<table>"
    yield f"<tr>{''.join(_cell('th', cell, is_right=n in table.right) for n, cell in enumerate(header))}</tr>"
    for row in rows:
        yield f"<tr>{''.join(_cell('td', cell, is_right=n in table.right) for n, cell in enumerate(row))}</tr>"
    yield "</table>"


def _cell(tag: str, text: str, *, is_right: bool = False) -> str:
    attributes = ' class="right"' if is_right else ""
    return f"<{tag}{attributes}>{escape(text)}</{tag}>"


def _stacked_bar(bar: StackedBar) -> Iterator[str]:
    yield f'<svg viewBox="0 0 {_WIDTH} {_BAR_HEIGHT}" width="{_WIDTH}" height="{_BAR_HEIGHT}" role="img">'
    yield f'<rect class="free" width="{_WIDTH}" height="{_BAR_HEIGHT}"/>'
    left = 0.0
    for number, (name, size) in enumerate(bar.parts.items()):
        width = _WIDTH * size / bar.total
        words = escape(f"{name}: {format_bytes(size)}")
        yield (
            f'<rect class="c{number % _NUM_COLOURS}" x="{left:.1f}" width="{width:.1f}" height="{_BAR_HEIGHT}">'
            f"<title>{words}</title></rect>"
        )
        left += width
    yield "</svg>"
    yield "<table>"
    for number, (name, size) in enumerate(bar.parts.items()):
        key = f'<td><span class="key c{number % _NUM_COLOURS}"></span></td>'
        yield f"<tr>{key}{_cell('td', name)}{_cell('td', format_bytes(size), is_right=True)}</tr>"
    yield f"<tr><td></td>{_cell('td', 'free')}{_cell('td', format_bytes(bar.free), is_right=True)}</tr>"
    yield "</table>"


def _bars(bars: Bars) -> Iterator[str]:
    """A row each: label, bar, value."""
    if not bars.rows:
        return
    height = _BAR_HEIGHT * len(bars.rows)
    room = _WIDTH - _LABEL_WIDTH - _VALUE_WIDTH
    largest = max(size for _, size, _ in bars.rows) or 1.0
    yield f"<h3>{escape(bars.caption)}</h3>"
    yield f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img">'
    for number, (label, size, words) in enumerate(bars.rows):
        top, width = number * _BAR_HEIGHT, room * size / largest
        middle = top + 15
        yield f'<text x="0" y="{middle}">{escape(label)}</text>'
        yield f'<rect class="c0" x="{_LABEL_WIDTH}" y="{top + 4}" width="{width:.1f}" height="{_BAR_HEIGHT - 8}"/>'
        yield f'<text x="{_LABEL_WIDTH + width + 6:.1f}" y="{middle}">{escape(words)}</text>'
    yield "</svg>"
