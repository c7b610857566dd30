"""The lists of docs/commands.md: every command with its options, from the parser of the command line.

python benchmarks/commands.py --write      updates docs/commands.md
python benchmarks/commands.py --check      exits with 1 if the page is out of date
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "benchmarks", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from written_page import markdown_table, run_page  # noqa: E402  (the path comes first)

from shardwise.launch.options import build_parser  # noqa: E402

DOCUMENT = ROOT / "docs" / "commands.md"
UNSTATED = {"--json": "machine-readable output", "--gpus": "use these GPUs"}


def tables() -> dict[str, str]:
    """The table `commands`: a heading for each command, its usage, what it does, and a row for each option."""
    (commands,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    summaries = {each.dest: each.help or "" for each in commands._choices_actions}
    return {"commands": "\n".join(_section(name, commands.choices[name], text) for name, text in summaries.items())}


def _section(name: str, parser: argparse.ArgumentParser, summary: str) -> str:
    actions = [each for each in parser._actions if each.dest != "help"]
    places = " ".join(_place(each) for each in actions if not each.option_strings)
    options = [row for each in actions if each.option_strings for row in _rows(each)]
    head = f"### {name}\n\n`shardwise {name}{' ' + places if places else ''}`: {summary}\n"
    return head + (f"\n{markdown_table(('option', 'meaning'), options)}" if options else "")


def _place(action: argparse.Action) -> str:
    shown = str(action.metavar or action.dest.upper())
    if action.nargs == "*":
        return f"[{shown} ...]"
    return f"{shown} ..." if action.nargs == "+" else f"[{shown}]" if action.nargs == "?" else shown


def _rows(action: argparse.Action) -> Iterator[tuple[str, str]]:
    shown = "\\|".join(action.choices) if action.choices else str(action.metavar or "").replace("|", "\\|")
    flags = ", ".join(action.option_strings)
    meaning = action.help or UNSTATED.get(action.option_strings[-1], "")
    yield f"`{flags}{' ' + shown if action.nargs != 0 and shown else ''}`", meaning


if __name__ == "__main__":
    sys.exit(run_page(DOCUMENT, tables, command=__file__, summary="the lists of docs/commands.md"))
