"""The tables of settings in docs/job-file.md: `python tests/factories/job_reference.py` writes them anew."""

import json
from pathlib import Path

from shardwise.trainer.spec.job.fields import BY_PATH, SECTIONS, Field, children, job_tree, section_description
from shardwise.trainer.spec.job.sections import Job

DOCUMENT = Path(__file__).parents[2] / "docs" / "job-file.md"
MARK = "<!-- Below: written by tests/factories/job_reference.py -->"


def job_reference() -> str:
    return "\n".join([MARK, "", "## Every setting", "", *map(_table, SECTIONS)])


def write_job_reference(document: Path) -> None:
    above = document.read_text(encoding="utf-8").partition(MARK)[0]
    document.write_text(above + job_reference(), encoding="utf-8")


def _table(section: str) -> str:
    rows = [_row(BY_PATH[path]) for path in children(section) if path in BY_PATH]
    heading = f"### {section or 'Top level'}\n\n{section_description(section)}\n"
    return "\n".join([heading, "| setting | may be | default | |\n|---|---|---|---|", *rows, ""])


def _row(entry: Field) -> str:
    choices = ", ".join(f"`{word}`" for word in entry.kind.choices)
    cells = (f"`{entry.path}`", choices or entry.kind.expected, f"`{_default(entry.path)}`", entry.description)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(path: str) -> str:
    if path in ("data.train", "model.name", "model.config"):
        return "none: must be given" if path == "data.train" else "one of name, config"
    value: object = job_tree(Job())
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    write_job_reference(DOCUMENT)
