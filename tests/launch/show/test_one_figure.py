"""Every surface that shows a figure of a plan or of a run shows the same value under the same name."""

import json
import re
from html import unescape
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from reported_run import report_for, step_rows, tiny_plan, write_run

from shardwise.launch import api
from shardwise.launch.commands.report import report_json
from shardwise.launch.commands.ui import explorer, pages
from shardwise.launch.commands.ui.runs import Runs
from shardwise.launch.rundir.files import read_run
from shardwise.launch.rundir.state import Queue, read_liveness, status_of
from shardwise.launch.show.follow import WatchedRun, render_status
from shardwise.launch.show.recorded_run import read_recorded
from shardwise.launch.show.report import render_run
from shardwise.launch.show.run_page import comparison_page, run_page
from shardwise.launch.show.view import ASCII, block_lines, log_line
from shardwise.launch.track.tracker import PREDICTED, predicted_series, series_name
from shardwise.launch.track.wandb import run_config, run_figures
from shardwise.trainer.planning.candidates import run_seconds, run_totals
from shardwise.trainer.planning.explain.first_screen import about, first_screen, memory_text, summary_lines, text_of
from shardwise.trainer.planning.explain.plan_page import plan_page
from shardwise.trainer.planning.page.content import page_text
from shardwise.trainer.planning.page.html import pages_html
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds

MIB = 2**20


class Finished(msgspec.Struct, frozen=True):
    """A run whose last steps were faster than its report's median, as happens on a shared machine."""

    run_dir: Path
    plan: Plan
    report: Report


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder, plan = tmp_path_factory.mktemp("runs"), tiny_plan()
    report = report_for(plan, duration_s=130.0, phases_s={"steps": 60.0, "evaluation": 20.0})
    report = replace(report, predicted_s=run_seconds(context_of(plan), plan.chosen))
    host = replace(report.measured.memory, host_bytes=489 * MIB, peak_reserved_bytes=None, device_bytes=None)
    report = replace(report, measured=replace(report.measured, memory=host))
    rows = step_rows(host_rss_bytes=517 * MIB, memory_peak_bytes=host.peak_allocated_bytes)
    for name in ("one", "other"):
        write_run(folder / name, plan=plan, report=report, rows=rows)
        attempt = folder / name / "attempts" / "1"
        attempt.mkdir(parents=True)
        codec.write(attempt / "plan.json", plan)
    return Finished(folder / "one", plan, report)


def text_in(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def flat(text: str) -> str:
    return " ".join(text.split())


def surfaces_of_a_plan(plan: Plan) -> dict[str, str]:
    page = plan_page(plan)
    found = {
        "first screen": text_of(first_screen(plan)),
        "first screen, 80 columns": text_of(first_screen(plan, width=80)),
        "several machines": text_of(summary_lines(plan)),
        "-v": page_text(page, width=100),
        "--html": text_in(pages_html([page], title="plan")),
        "explorer": text_in(explorer.verdict_html(plan, context_of(plan))),
        "notebook": repr(msgspec.convert(msgspec.to_builtins(plan), api.PlanResult)),
    }
    return {name: flat(text) for name, text in found.items()}


def surfaces_of_a_run(run: Finished) -> dict[str, str]:
    recorded, runs = read_recorded(run.run_dir), Runs(run.run_dir.parent)
    page, comparison = run_page(recorded), comparison_page([recorded, recorded])
    view = WatchedRun(run.run_dir, environment={}).look().view
    files = read_run(run.run_dir)
    liveness = read_liveness(files, Queue({}), reads_ended=False, environment={})
    status = status_of(files, liveness, now_s=0.0, last_line=None, logs=())
    tiles = pages.run_content(runs, {"name": ["one"]}).parts
    compared = pages.comparison_content(runs, {"run": ["one", "other"]}).parts
    found = {
        "report": render_run(recorded),
        "report --html": text_in(pages_html([page], title="run")),
        "report of several": page_text(comparison, width=200),
        "notebook": repr(api.report(run.run_dir)),
        "watch": "\n".join(block_lines(view, width=200, glyphs=ASCII)),
        "log line": log_line(view),
        "status": render_status(status, base=run.run_dir.parent),
        "ui list": text_in(pages.runs_content(runs, {}).parts["table"]),
        "ui tiles": text_in(tiles["live"]),
        "ui figures": text_in(tiles["figures"]),
        "ui comparison": text_in(compared["figures"]),
    }
    return {name: flat(text) for name, text in found.items()}


def test_every_surface_of_a_plan_has_one_memory_and_one_time(run: Finished) -> None:
    plan, context = run.plan, context_of(run.plan)
    seconds = run_seconds(context, plan.chosen)
    assert seconds is not None
    for name, text in surfaces_of_a_plan(plan).items():
        assert memory_text(plan.chosen.memory) in text, name
        assert format_bytes(plan.chosen.memory.peak_allocated_bytes) in text, name
        assert about(seconds) in text or format_seconds(seconds) in text, name
        assert f"{format_bytes(plan.chosen.memory.occupied_bytes)} of" not in text, name


def test_every_surface_of_an_ended_run_has_the_figures_of_its_report(run: Finished) -> None:
    memory, rate = run.report.measured.memory, run.report.tokens_per_s
    assert rate is not None and memory.peak_allocated_bytes is not None and memory.host_bytes is not None
    speed, peak = format_count(rate), format_bytes(memory.peak_allocated_bytes)
    last = format_count(1000.0 + len(step_rows()))
    for name, text in surfaces_of_a_run(run).items():
        assert f"{speed} " in f"{text} ", name
        assert name in ("ui list",) or peak in text, name
        assert not re.search(rf"\b{re.escape(last)} tokens/s", text), name
    for name in ("report", "report --html", "notebook", "ui figures"):
        text = surfaces_of_a_run(run)[name]
        whole = (run.report.predicted_s or 0.0, run.report.duration_s)
        expected, found = map(format_seconds, whole)
        assert f"time of the run {expected} {found} {whole[1] / whole[0] - 1:+.1%}" in text, name
        process = run.plan.chosen.memory.need_bytes, memory.host_bytes
        sizes = " ".join(map(format_bytes, process))
        assert f"RAM of each process {sizes} {process[1] / process[0] - 1:+.1%}" in text, name


def test_machine_readable_figures_are_those_of_the_report(run: Finished) -> None:
    report, measured = run.report, run.report.measured
    as_json = json.loads(json.dumps(report_json(read_recorded(run.run_dir))))
    sent, config = run_figures(report), run_config(run.plan)
    assert as_json["measured"] == json.loads(msgspec.json.encode(measured))
    assert as_json["duration_s"] == report.duration_s and as_json["predicted_s"] == report.predicted_s
    assert sent["tokens_per_s_per_gpu"] == measured.speed.tokens_per_s_per_gpu
    assert sent["memory_peak_bytes"] == measured.memory.peak_allocated_bytes
    chosen = run.plan.chosen
    drawn, totals = predicted_series(chosen), run_totals(context_of(run.plan), chosen)
    expected = report.predicted
    for field, value in {
        "memory_peak_bytes": expected.memory.peak_allocated_bytes,
        "memory_allocated_bytes": expected.memory.steady_allocated_bytes,
        "step_s": expected.speed.step_s,
        "tokens_per_s_per_gpu": expected.speed.tokens_per_s_per_gpu,
        "tokens_per_s": totals.tokens_per_s,
    }.items():
        assert value is not None and drawn[f"{series_name(field)}{PREDICTED}"] == pytest.approx(value), field
    assert str(chosen.memory.need_bytes) in json.dumps(config, default=str)
