"""`shardwise report`: one run in full, several side by side; as text, as JSON, as one HTML page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shardwise.launch.options import ReportOptions
from shardwise.launch.show.recorded_run import RecordedRun, recorded_runs
from shardwise.launch.terminal import Console, write_page
from shardwise.trainer.spec.errors import ExitCode, InputError


def run_report(options: ReportOptions, console: Console) -> ExitCode:
    """Prints the reports, and writes the files of --html and --share; InputError if a folder is no run."""
    runs = recorded_runs(options.run_dirs)
    if options.html is not None:
        _write_page(options.html, runs)
    if options.share is not None:
        _share(options.share, runs)
    if options.as_json:
        for run in runs:
            console.json(report_json(run))
        return ExitCode.DONE
    console.line(_text(runs))
    return ExitCode.DONE


def report_json(run: RecordedRun) -> dict[str, Any]:
    """The report with the run's directory and what would help; InputError where there is none."""
    if run.report is None:
        raise InputError(f"{run.run_dir}: {run.problem}: the run has not ended, or was killed before it could")
    figures: dict[str, Any] = msgspec.to_builtins(run.report)
    recommended = msgspec.to_builtins(run.recommended)
    return {"run_dir": str(run.run_dir), **figures, "recommendations": recommended}


def _text(runs: Sequence[RecordedRun]) -> str:
    if len(runs) == 1:
        from shardwise.launch.show.report import render_run

        return render_run(runs[0])
    from shardwise.launch.show.report import terminal_width
    from shardwise.launch.show.run_page import comparison_page
    from shardwise.trainer.planning.page.content import page_text

    return page_text(comparison_page(runs), width=terminal_width())


def _share(path: Path, runs: Sequence[RecordedRun]) -> None:
    from shardwise.launch.show.shared_row import append_row

    for run in runs:
        append_row(path, run)


def _write_page(path: Path, runs: Sequence[RecordedRun]) -> None:
    from shardwise.launch.show.run_page import comparison_page, run_page
    from shardwise.trainer.planning.page.html import pages_html

    page = run_page(runs[0]) if len(runs) == 1 else comparison_page(runs)
    write_page(path, pages_html([page], title=page.title))
