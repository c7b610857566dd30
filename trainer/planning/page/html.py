"""A page as one HTML file: the same words as the text, and charts, with nothing fetched and no script.

Everything a person or a file may have named is escaped on its way in. A policy in the head forbids every request, and
every style but the one in the head. Colours follow the reader's light or dark setting, and charts the width there is.
"""

import base64
import hashlib
from collections.abc import Iterator, Sequence
from html import escape

from shardwise.trainer.planning.page.content import (
    Bars,
    Block,
    LineChart,
    Page,
    PairedBars,
    Quote,
    Section,
    Sentence,
    Spans,
    StackedBar,
    Table,
)
from shardwise.trainer.planning.page.svg import (
    STYLE,
    bars_svg,
    cell,
    line_chart_html,
    paired_bars_html,
    spans_svg,
    stacked_bar_html,
)


def pages_html(pages: Sequence[Page], *, title: str) -> str:
    """A complete document that holds one page or several, one after the other."""
    body = "\n".join(line for page in pages for line in _page(page))
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
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
    elif isinstance(block, Quote):
        yield f"<h3>{escape(block.label)}</h3>\n<pre>{escape(block.text)}</pre>"
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


def _table(table: Table) -> Iterator[str]:
    header, *rows = table.starred
    yield '<div class="scroll"><table>'
    yield f"<tr>{''.join(cell('th', text, is_right=n in table.right) for n, text in enumerate(header))}</tr>"
    for number, row in enumerate(rows, start=1):
        cells = (
            cell("td", text, is_right=column in table.right, is_best=(number, column) in table.best)
            for column, text in enumerate(row)
        )
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</table></div>"
