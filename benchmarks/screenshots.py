"""The pictures of README.md and docs/: real runs of the quickstart, on this machine, in a headless browser.

    python benchmarks/screenshots.py --write                trains three short runs, updates docs/images/
    python benchmarks/screenshots.py --write RUN RUN ...    uses existing runs
    python benchmarks/screenshots.py --write --only ui      those alone whose names begin with ui

Shows the first run alone, all runs side by side, a plan for a machine of the catalogue, what `plan` and `report` print,
for the README, and the pages of `shardwise ui`. Needs Chromium.
"""

import argparse
import html
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "tests" / "factories", ROOT):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from headless_browser import Browser, lacks_browser, running_browser  # noqa: E402  (the path comes first)

from shardwise.launch.commands.ui.server import UiServer  # noqa: E402

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
    Shot("report-dark", "report", "throughput", "memory of a device during", DESK, is_dark=True),
    Shot("report-phone", "report", "predicted and measured", "throughput", PHONE, is_dark=False),
    Shot("comparison-light", "comparison", "figures", "training loss", DESK, is_dark=False),
    Shot("plan-dark", "plan", "memory of", "memory of", DESK, is_dark=True),
    Shot("plan-and-report", "terminal", "$ shardwise plan", "$ shardwise report", DESK, is_dark=True),
)


class PageShot(NamedTuple):
    """One picture: a page of `shardwise ui`, from its top."""

    name: str
    address: str
    width: int
    height: int
    is_dark: bool


RTX_4060 = "/plan?model=llama-3.1-8b&method=qlora&card=RTX-4060-8GB"
PAGE_SHOTS = (
    PageShot("ui-runs", "/", 1160, 430, is_dark=False),
    PageShot("ui-run", "/run?name={run}&smooth=0.6", 1160, 900, is_dark=True),
    PageShot("ui-plan", RTX_4060, 1160, 900, is_dark=False),
    PageShot("ui-phone", "/run?name={run}&smooth=0.6", PHONE, 844, is_dark=False),
)


def main() -> int:
    """Writes the pictures; 1 if there is no browser."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", required=True, help="update docs/images/")
    parser.add_argument("--only", metavar="NAME", help="the pictures whose names begin so")
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="default: three new runs")
    options = parser.parse_args()
    obstacle = lacks_browser()
    if obstacle is not None:
        print(obstacle, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        runs = [run.absolute() for run in options.runs] or trained(Path(scratch) / "runs")
        shots = [shot for shot in SHOTS if shot.name.startswith(options.only or "")]
        if shots:
            write_pages(runs, Path(scratch))
        IMAGES.mkdir(exist_ok=True)
        with running_browser() as browser:
            for shot in shots:
                write_shot(browser, shot, Path(scratch))
            page_shots = [shot for shot in PAGE_SHOTS if shot.name.startswith(options.only or "")]
            if page_shots:
                write_page_shots(browser, page_shots, runs)
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
    """Writes the picture of a page in a file."""
    page = folder / f"{shot.page}.html"
    opened = browser.open(page, width=shot.width, is_dark=shot.is_dark, clip=between(shot.first, shot.last))
    assert opened.messages == [] and opened.requests == []
    write_picture(shot.name, opened.png)


def write_page_shots(browser: Browser, shots: Sequence[PageShot], runs: Sequence[Path]) -> None:
    """Writes pictures of the pages of `shardwise ui`, for the folder of the first run."""
    os.chdir(runs[0].parent.parent)
    with UiServer(Path(runs[0].parent.name), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.open(f"{server.address}/?token={server.token}", width=PHONE, until="document.querySelector('main')")
        for shot in shots:
            address = server.address + shot.address.format(run=runs[0].name)
            opened = browser.open(address, width=shot.width, height=shot.height, is_dark=shot.is_dark)
            assert opened.messages == []
            write_picture(shot.name, opened.png)
        server.shutdown()


def write_picture(name: str, png: bytes) -> None:
    """Writes docs/images/NAME.png in 256 colours; AssertionError if it is too large for a document."""
    small = BytesIO()
    Image.open(BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    png = small.getvalue()
    assert len(png) <= MOST_BYTES, f"{name}.png would have {len(png)} bytes"
    (IMAGES / f"{name}.png").write_bytes(png)
    print(f"docs/images/{name}.png: {len(png) / 1000:.0f} kB")


def between(first: str, last: str) -> str:
    """A script whose value has the box around the sections from one heading to another."""
    find = "(t => [...document.querySelectorAll('section')].find(s => s.innerText.startsWith(t)))({})"
    box = "(a, b) => ({getBoundingClientRect: () => new DOMRect(0, a.top - 12, innerWidth, b.bottom - a.top + 24)})"
    boxes = ", ".join(f"{find.replace('{}', repr(heading))}.getBoundingClientRect()" for heading in (first, last))
    return f"({box})({boxes})"


if __name__ == "__main__":
    sys.exit(main())
