"""`shardwise report`: text, JSON and a page, of one run and of several."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from page_reader import read_page
from reported_run import report_for, step_rows, tiny_plan, write_run

from shardwise.launch.commands.report import run_report
from shardwise.launch.options import ReportOptions
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import ExitCode, InputError
from shardwise.trainer.spec.report import Report, Sample


def told(*run_dirs: Path, html: Path | None = None, as_json: bool = False) -> str:
    stream = io.StringIO()
    assert run_report(ReportOptions(run_dirs=run_dirs, html=html, as_json=as_json), Console(stream)) is ExitCode.DONE
    return stream.getvalue()


def test_json_is_the_report_with_what_would_help(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "bot", rows=step_rows(data_s=1.0))
    answer = json.loads(told(run_dir, as_json=True))
    report = report_for(tiny_plan())
    assert answer.pop("run_dir") == str(run_dir)
    (recommended,) = answer.pop("recommendations")
    assert recommended["gain"] == 2.0 and "50%" in recommended["text"]
    assert msgspec.convert(answer, Report) == report


def test_json_of_a_run_without_a_report_is_an_error_and_a_page_is_written_beside_the_text(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "bot", has_report=False)
    with pytest.raises(InputError, match="no report"):
        told(run_dir, as_json=True)
    assert "40 of 40" in told(run_dir)
    first, second, page = write_run(tmp_path / "a"), write_run(tmp_path / "b"), tmp_path / "page.html"
    assert told(first, html=page) == told(first)
    assert read_page(page.read_text()).text.count("loss") >= 1 and "<title>a: " in page.read_text()
    told(first, second, html=page)
    assert "<title>2 runs " in page.read_text()


@pytest.mark.cold
def test_text_is_readable_on_a_terminal_of_ascii(tmp_path: Path) -> None:
    sample = Sample(prompt="Grüße", before=None, after="日本")
    run_dir = write_run(tmp_path / "bot", report=report_for(tiny_plan(), sample=sample))
    terminal = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}

    def shown(*words: str) -> str:
        argv = [sys.executable, "-m", "shardwise.launch.cli", "report", str(run_dir), *words]
        return subprocess.run(argv, env=os.environ | terminal, capture_output=True, check=True).stdout.decode("ascii")

    assert r"Gr\u00fc\u00dfe" in shown() and json.loads(shown("--json"))["sample"]["after"] == "日本"
