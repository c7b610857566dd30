"""Pages of docs/ whose tables a command writes, each between `<!-- name -->` and `<!-- /name -->` of the page."""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown, ending with a line feed."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def with_tables(document: str, tables: Mapping[str, str]) -> str:
    """`document` with every table in its place; AssertionError where it has no place, or several, for one."""
    for name, table in tables.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        document, count = place.subn(partial(_between, table), document)
        assert count == 1, f"{count} places in the page for the table {name}"
    return document


def _between(table: str, marks: re.Match[str]) -> str:
    return f"{marks[1]}{table}{marks[2]}"


def run_page(document: Path, tables: Callable[[], Mapping[str, str]], *, command: str, summary: str) -> int:
    """The command line of `command`: prints the tables, with --write puts them into the page, with --check compares.

    The exit code: 1 where the page is to be written again.
    """
    parser = argparse.ArgumentParser(description=summary)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", action="store_true", help=f"renew docs/{document.name}")
    choice.add_argument("--check", action="store_true", help="end with 1 where the page is to be written again")
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
        sys.stderr.write(f"docs/{document.name} is not what the program does now: python benchmarks/{script} --write\n")
        return 1
    return 0
