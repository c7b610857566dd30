"""The tables of docs/job-file.md, rendered from the table of settings; a test holds the document to them.

`write_job_reference(Path("docs/job-file.md"))` writes them anew, leaving what stands above `MARK` alone.
"""

import json
from pathlib import Path

from trainer.spec.job.fields import BY_PATH, SECTIONS, Field, children, section_says
from trainer.spec.job.kinds import Kind
from trainer.spec.job.sections import Job
from trainer.spec.job.writing import job_tree

MARK = "<!-- Below: written by trainer/spec/job/reference.py -->"


def job_reference() -> str:
    """Every setting with what it may hold, its default and what it does."""
    tables = [_table(section) for section in SECTIONS]
    return "\n".join([MARK, "", "## Every setting", "", *tables])


def write_job_reference(document: Path) -> None:
    """Replaces what follows the mark in the document."""
    above = document.read_text(encoding="utf-8").partition(MARK)[0]
    document.write_text(above + job_reference(), encoding="utf-8")


def _table(section: str) -> str:
    rows = [BY_PATH[path] for path in children(section) if path in BY_PATH]
    heading = f"### {section or 'Top level'}\n\n{section_says(section)}\n"
    head = "| setting | may be | default | |\n|---|---|---|---|"
    return "\n".join([heading, head, *map(_row, rows), ""])


def _row(entry: Field) -> str:
    cells = (f"`{entry.path}`", _may_be(entry.kind), f"`{_default(entry.path)}`", entry.says)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _may_be(kind: Kind) -> str:
    return ", ".join(f"`{word}`" for word in kind.choices) if kind.choices else kind.expected


def _default(path: str) -> str:
    value: object = job_tree(Job())
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if path in ("data.train", "model.name", "model.config"):
        return "none: must be given" if path == "data.train" else "one of name, config"
    return value if isinstance(value, str) else json.dumps(value)
