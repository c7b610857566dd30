"""The pictures of README.md and docs/reports.md: real runs of the quickstart, on this machine, in a headless browser.

    python benchmarks/screenshots.py --write                trains three short runs, updates docs/images/
    python benchmarks/screenshots.py --write RUN RUN ...    uses existing runs

Shows the first run alone, all runs side by side, a plan for a machine of the catalogue, and what `plan` and
`report` print, for the README. Needs Chromium.
"""

import argparse
import html
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "tests" / "factories", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from headless_browser import Browser, lacks_browser, running_browser  # noqa: E402  (the path comes first)

IMAGES = ROOT / "docs" / "images"
JOB = ROOT / "examples" / "quickstart.yaml"
SHORT = ("train.steps=80", "train.tokens_per_step=1024", "eval.every=20 steps", "checkpoint.every=40 steps")
RATES = ("3e-3", "1e-3", "1e-2")
DESK, PHONE = 900, 390
MOST_BYTES = 150_000


class Shot(NamedTuple):
    """One picture: the sections of a page from one heading to another."""

    name: str
    page: str
    first: str  # prefix of the heading of its first section
    last: str
    width: int
    is_dark: bool


SHOTS = (
    Shot("report-light", "report", "predicted and measured", "loss", DESK, is_dark=False),
    Shot("report-dark", "report", "throughput", "memory of", DESK, is_dark=True),
    Shot("report-phone", "report", "predicted and measured", "throughput", PHONE, is_dark=False),
    Shot("comparison-light", "comparison", "figures", "training loss", DESK, is_dark=False),
    Shot("plan-dark", "plan", "memory of", "memory of", DESK, is_dark=True),
    Shot("plan-and-report", "terminal", "$ shardwise plan", "$ shardwise report", DESK, is_dark=True),
)


def main() -> int:
    """Writes the pictures; 1 if there is no browser."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", required=True, help="update docs/images/")
    parser.add_argument("--only", metavar="NAME", help="this picture alone")
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="default: three new runs")
    options = parser.parse_args()
    obstacle = lacks_browser()
    if obstacle is not None:
        print(obstacle, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        write_pages(options.runs or trained(Path(scratch)), Path(scratch))
        IMAGES.mkdir(exist_ok=True)
        with running_browser() as browser:
            for shot in SHOTS:
                if options.only in (None, shot.name):
                    write_shot(browser, shot, Path(scratch))
    return 0


def trained(folder: Path) -> list[Path]:
    """Three short runs that differ in their learning rate."""
    runs = [folder / f"lr-{rate}" for rate in RATES]
    for run_dir, rate in zip(runs, RATES, strict=True):
        shardwise("train", str(JOB), *SHORT, f"train.lr={rate}", "--run-dir", str(run_dir))
    return runs


def write_pages(runs: Sequence[Path], folder: Path) -> None:
    """report.html, comparison.html, plan.html and terminal.html."""
    shardwise("report", str(runs[0]), "--html", str(folder / "report.html"))
    shardwise("report", *map(str, runs), "--html", str(folder / "comparison.html"))
    plan = ("plan", str(JOB), "model.config=llama-3.1-8b", "train.seq_len=4096", "train.tokens_per_step=131072")
    shardwise(*plan, "--hardware", "8xH100-SXM5-80GB", "limits.hours=9000", "--html", str(folder / "plan.html"))
    (folder / "terminal.html").write_text(terminal_page(runs[0]), encoding="utf-8")


def shardwise(*arguments: str, cwd: Path = ROOT) -> str:
    """Runs a command of the working tree and returns what it prints."""
    command = [sys.executable, "-m", "shardwise.launch.cli", *arguments]
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(command, check=True, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True).stdout


def terminal_page(run: Path) -> str:
    """A plan for a small card, and the figures of a finished run, as a terminal shows them."""
    plan = ("plan", "llama-3.1-8b", "--method", "qlora", "--seq-len", "2048", "--hardware", "RTX 4060")
    report = ("report", str(run.relative_to(run.parent.parent)))
    figures = shardwise(*report, cwd=run.parent.parent).partition("\nsample:")[0]
    shown = [(" ".join(plan).replace("RTX 4060", '"RTX 4060"'), shardwise(*plan)), (" ".join(report), figures)]
    panes = "".join(
        f"<section><b>$ shardwise {html.escape(command)}</b>\n{html.escape(text.rstrip())}</section>"
        for command, text in shown
    )
    style = (
        "body{margin:0;background:#111;color:#ddd} "
        "section{white-space:pre-wrap;font:14px/1.35 monospace;padding:12px 20px}"
    )
    return f"<!doctype html><meta charset=utf-8><title>shardwise</title><style>{style} b{{color:#7c6}}</style>{panes}"


def write_shot(browser: Browser, shot: Shot, folder: Path) -> None:
    """Writes the picture; AssertionError if it is too large for a document."""
    page = folder / f"{shot.page}.html"
    opened = browser.open(page, width=shot.width, is_dark=shot.is_dark, clip=between(shot.first, shot.last))
    assert opened.messages == [] and opened.requests == []
    assert len(opened.png) <= MOST_BYTES, f"{shot.name}.png would have {len(opened.png)} bytes"
    (IMAGES / f"{shot.name}.png").write_bytes(opened.png)
    print(f"docs/images/{shot.name}.png: {len(opened.png) / 1000:.0f} kB")


def between(first: str, last: str) -> str:
    """A script whose value has the box around the sections from one heading to another."""
    find = "(t => [...document.querySelectorAll('section')].find(s => s.innerText.startsWith(t)))({})"
    box = "(a, b) => ({getBoundingClientRect: () => new DOMRect(0, a.top - 12, innerWidth, b.bottom - a.top + 24)})"
    boxes = ", ".join(f"{find.replace('{}', repr(heading))}.getBoundingClientRect()" for heading in (first, last))
    return f"({box})({boxes})"


if __name__ == "__main__":
    sys.exit(main())
