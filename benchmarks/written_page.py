"""Generated tables in pages of docs/, between `<!-- name -->` and `<!-- /name -->`."""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, ending with a newline."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def with_tables(document: str, tables: Mapping[str, str]) -> str:
    """`document` with every table between its markers; AssertionError unless it has them exactly once."""
    for name, table in tables.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        document, count = place.subn(partial(_between, table), document)
        assert count == 1, f"{count} places in the page for the table {name}"
    return document


def _between(table: str, marks: re.Match[str]) -> str:
    return f"{marks[1]}{table}{marks[2]}"


def run_page(document: Path, tables: Callable[[], Mapping[str, str]], *, command: str, summary: str) -> int:
    """The command line of `command`: prints the tables, with --write writes them into the page, with --check compares.

    Returns the exit code: 1 if the page is out of date.
    """
    parser = argparse.ArgumentParser(description=summary)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", action="store_true", help=f"update docs/{document.name}")
    choice.add_argument("--check", action="store_true", help="exit with 1 if the page is out of date")
    options = parser.parse_args()
    if not options.write and not options.check:
        sys.stdout.write("\n".join(tables().values()))
        return 0
    old = document.read_text(encoding="utf-8")
    new = with_tables(old, tables())
    if options.write:
        document.write_text(new, encoding="utf-8")
    elif new != old:
        script = Path(command).name
        sys.stderr.write(f"docs/{document.name} is out of date: python benchmarks/{script} --write\n")
        return 1
    return 0
