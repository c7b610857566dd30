"""Writes the tables of docs/accuracy.md, between the markers that the page has for them, and keeps the figures."""

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from accuracy import ROOT, Score, figure

PAGE = ROOT / "docs" / "accuracy.md"
SCORES, TOOLS = "scores", "tools"


def markdown_table(rows: Sequence[dict[str, object]]) -> str:
    """Rows as a table of Markdown."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(map(str, row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def scores_section(scores: Sequence[Score]) -> str:
    """The table of our own figures."""
    return markdown_table([figure(score) for score in scores])


def section(page: str, name: str) -> str:
    """What stands between the markers of `name`."""
    return page.partition(_begin(name))[2].partition(_end(name))[0].strip()


def with_section(page: str, name: str, content: str) -> str:
    """The page with that replaced."""
    before, begin, rest = page.partition(_begin(name))
    _, end, after = rest.partition(_end(name))
    assert begin and end, f"{PAGE} has lost the markers of {name}"
    return f"{before}{begin}\n{content}\n{end}{after}"


def write_page(scores: Sequence[Score], tools: Sequence[dict[str, object]], *, versions: dict[str, str]) -> None:
    """Renews both tables of docs/accuracy.md."""
    page = with_section(PAGE.read_text(), SCORES, scores_section(scores))
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    PAGE.write_text(with_section(page, TOOLS, f"{markdown_table(tools)}\n\nWith {used}."))
    print(f"wrote {PAGE.relative_to(ROOT)}")


def write_results(scores: Sequence[Score], tools: Sequence[dict[str, object]]) -> Path:
    """Keeps the figures under benchmarks/results/."""
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    path = ROOT / "benchmarks" / "results" / f"accuracy-{date}.json"
    names = ("shardwise", "accelerate", "deepspeed", "transformers", "torch")
    content = {
        "date": date,
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in names},
        "scores": [score._asdict() | {"is_met": score.is_met} for score in scores],
        "tools": tools,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path.relative_to(ROOT)}")
    return path


def _begin(name: str) -> str:
    return f"<!-- {name}: written by benchmarks/accuracy.py -->"


def _end(name: str) -> str:
    return f"<!-- end of {name} -->"
