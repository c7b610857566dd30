"""Writes the tables of docs/accuracy.md between its markers, and stores the figures."""

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import judging
from accuracy import ROOT, Score, figure, unfitted, unfitted_figure
from written_page import markdown_table, with_tables

PAGE = ROOT / "docs" / "accuracy.md"


def page_tables(
    scores: Sequence[Score], tools: Sequence[dict[str, object]], versions: dict[str, str]
) -> dict[str, str]:
    """The generated parts of the page by the name of their markers."""
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    return {
        "unfitted": unfitted_table(),
        "judging": judging_table(),
        "judging-odd": odd_table(),
        "scores": scores_table(scores),
        "tools": f"{_table(tools)}\nWith {used}.\n",
    }


def scores_table(scores: Sequence[Score]) -> str:
    """Our own scores."""
    return _table([figure(score) for score in scores])


def unfitted_table() -> str:
    """Errors on trainers and machines that nothing was fitted to."""
    return _table([unfitted_figure(kind) for kind in unfitted()])


def judging_table() -> str:
    """Errors of the rows to judge by, the even ones."""
    rows = judging.read_rows()
    return f"{_table(judging.table(rows))}\n{judging.verdicts(rows)}.\n"


def odd_table() -> str:
    """Errors of the odd rows, once they have been scored."""
    scores = judging.stored_odd()
    if scores is None:
        return f"The {len(judging.raw_rows(even=False))} odd rows have not been scored yet.\n"
    return f"Scored on {scores['date']}:\n\n{_table(scores['table'])}\n{scores['verdicts']}.\n"


def write_page(scores: Sequence[Score], tools: Sequence[dict[str, object]], *, versions: dict[str, str]) -> None:
    """Updates the tables of docs/accuracy.md."""
    PAGE.write_text(with_tables(PAGE.read_text(), page_tables(scores, tools, versions)))
    print(f"wrote {PAGE.relative_to(ROOT)}")


def write_results(scores: Sequence[Score], tools: Sequence[dict[str, object]]) -> Path:
    """Stores the figures under benchmarks/results/."""
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


def _table(rows: Sequence[dict[str, object]]) -> str:
    return markdown_table(list(rows[0]), [list(map(str, row.values())) for row in rows])
