"""Every surface that shows a figure of a plan or of a run shows the same value under the same name.

The plan is of a machine whose disk is measured and that has run before, so that every part of the time is predicted. Of
the run there are two: one has ended and took longer than predicted, the other one trains, and its last steps are slower
than its first.
"""

import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from msgspec.structs import replace
from planning_factory import machine, plan_of, shape_of
from report_factory import calibration_of, record_of
from reported_run import report_for, step_rows, write_run
from run_factory import attempt_record
from tracker_factory import EndNotice, LoggedRun, Trackers, WandbMode, tracker_environment, tracker_order

from shardwise.launch import api
from shardwise.launch.commands.report import report_json
from shardwise.launch.commands.train import show_plan
from shardwise.launch.commands.ui import explorer, pages
from shardwise.launch.commands.ui.runs import Runs
from shardwise.launch.rundir.files import read_run
from shardwise.launch.rundir.lock import locked
from shardwise.launch.rundir.metrics import recent_tokens_per_s
from shardwise.launch.rundir.state import Queue, RunStatus, read_liveness, status_of
from shardwise.launch.show.follow import Progress, WatchedRun, render_status, render_table
from shardwise.launch.show.recorded_run import read_recorded
from shardwise.launch.show.report import render_run
from shardwise.launch.show.run_page import comparison_page, run_page
from shardwise.launch.show.view import block, log_line
from shardwise.launch.terminal import Console
from shardwise.launch.track.offline import offline_logs
from shardwise.launch.track.tracker import PREDICTED, predicted_series, series_name
from shardwise.launch.track.wandb import run_config, run_figures
from shardwise.trainer.planning.candidates import run_seconds, run_time, run_totals
from shardwise.trainer.planning.explain.first_screen import about, first_screen, memory_text, summary_lines, text_of
from shardwise.trainer.planning.explain.plan_page import plan_page
from shardwise.trainer.planning.memory import grouped
from shardwise.trainer.planning.page.content import page_text
from shardwise.trainer.planning.page.html import pages_html
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.hardware import Disk
from shardwise.trainer.spec.messages.rank_files import Heartbeat, encode_heartbeat, heartbeat_path
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.strategy import Precision
from shardwise.trainer.spec.units import GIB, format_bytes, format_count, format_seconds

MIB = 2**20
PARTS_S = {"steps": 60.0, "evaluation": 20.0, "saving": 10.0, "sample": 5.0, "export": 5.0}


class Finished(NamedTuple):
    """A run whose last steps were faster than its report's median, as happens on a shared machine."""

    run_dir: Path
    plan: Plan
    report: Report


def predicted_whole() -> Plan:
    """A plan of which every part of the time is predicted."""
    disk = Disk(
        path="/", filesystem="ext4", total_bytes=1024 * GIB, free_bytes=512 * GIB,
        write_bytes_per_s=100 * MIB, read_bytes_per_s=200 * MIB,
    )  # fmt: skip
    hardware = machine("1xCPU")
    hardware = replace(hardware, host=replace(hardware.host, disks=(disk,)))
    size = shape_of("tiny").num_parameters
    record = record_of(num_parameters=size, start_up_s=8.0, precision=Precision.BF16)
    plan = plan_of("tiny", hardware, steps=len(step_rows()), calibration=calibration_of(record))
    assert not run_time(context_of(plan), plan.chosen).not_predicted
    return plan


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder, plan = tmp_path_factory.mktemp("runs"), predicted_whole()
    time = run_time(context_of(plan), plan.chosen)
    report = report_for(plan, duration_s=130.0, phases_s=PARTS_S)
    report = replace(report, predicted_s=time.total_s, predicted_parts_s=time.parts_s)
    host = replace(report.measured.memory, host_bytes=489 * MIB, peak_reserved_bytes=None, device_bytes=None)
    report = replace(report, measured=replace(report.measured, memory=host))
    report = replace(report, history=(attempt_record(step=report.step, duration_s=130.0),))
    rows = step_rows(host_rss_bytes=517 * MIB, memory_peak_bytes=host.peak_allocated_bytes)
    for name in ("one", "other", "training"):
        write_run(folder / name, plan=plan, report=report, rows=rows, has_report=name != "training")
        attempt = folder / name / "attempts" / "1"
        attempt.mkdir(parents=True)
        codec.write(attempt / "plan.json", plan)
    beat = heartbeat_path(folder / "training" / "attempts" / "1", 0)
    beat.parent.mkdir()
    beat.write_bytes(encode_heartbeat(Heartbeat(step=len(rows), count=1, phase="forward")))
    return Finished(folder / "one", plan, report)


def text_in(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", html, flags=re.S))).split())


def flat(text: str) -> str:
    return " ".join(text.split())


def start_of_training(plan: Plan) -> str:
    stream = io.StringIO()
    show_plan(plan, Console(stream))
    return stream.getvalue()


def surfaces_of_a_plan(plan: Plan) -> dict[str, str]:
    page, result = plan_page(plan), msgspec.convert(msgspec.to_builtins(plan), api.PlanResult)
    found = {
        "first screen": text_of(first_screen(plan)),
        "first screen, 80 columns": text_of(first_screen(plan, width=80)),
        "start of train": start_of_training(plan),
        "several machines": text_of(summary_lines(plan)),
        "-v": page_text(page, width=100),
        "--html": text_in(pages_html([page], title="plan")),
        "explorer": text_in(explorer.verdict_html(plan, context_of(plan))),
        "notebook, text": repr(result),
        "notebook, page": text_in(result._repr_html_()),
    }
    return {name: flat(text) for name, text in found.items()}


def status_in(run_dir: Path) -> RunStatus:
    files = read_run(run_dir)
    liveness = read_liveness(files, Queue({}), reads_ended=False, environment={})
    return status_of(files, liveness, now_s=0.0, last_line=None, logs=())


def surfaces_of_a_run(run: Finished) -> dict[str, str]:
    recorded, runs = read_recorded(run.run_dir), Runs(run.run_dir.parent)
    page, comparison = run_page(recorded), comparison_page([recorded, recorded])
    view, result = WatchedRun(run.run_dir, environment={}).look().view, api.report(run.run_dir)
    tiles = pages.run_content(runs, {"name": ["one"]}).parts
    compared = pages.comparison_content(runs, {"run": ["one", "other"]}).parts
    found = {
        "report": render_run(recorded),
        "report --html": text_in(pages_html([page], title="run")),
        "report of several": page_text(comparison, width=200),
        "notebook, text": repr(result),
        "notebook, page": text_in(result._repr_html_()),
        "watch": block(view, width=200, is_ascii=True).plain,
        "log line": log_line(view),
        "status": render_status(status_in(run.run_dir), base=run.run_dir.parent),
        "ui list": text_in(pages.runs_content(runs, {}).parts["table"]),
        "ui tiles": text_in(tiles["live"]),
        "ui figures": text_in(tiles["figures"]),
        "ui comparison": text_in(compared["figures"]),
    }
    return {name: flat(text) for name, text in found.items()}


def surfaces_of_a_training(run: Finished) -> dict[str, str]:
    """Of a run whose supervisor is this process."""
    folder, environment = run.run_dir.parent / "training", dict[str, str]()
    progress = Progress(Console(io.StringIO()), attempt_dir=folder / "attempts" / "1", plan=run.plan, environment={})
    view, shown = WatchedRun(folder, environment=environment).look().view, progress.view()
    runs, recorded, status = Runs(folder.parent), read_recorded(folder), status_in(folder)
    found = {
        "block of train": block(shown, width=200, is_ascii=True).plain,
        "log line of train": log_line(shown),
        "watch": block(view, width=200, is_ascii=True).plain,
        "status": render_status(status, base=folder.parent),
        "status of all": render_table([status], base=folder.parent),
        "ui list": text_in(pages.runs_content(runs, {}).parts["table"]),
        "ui tiles": text_in(pages.run_content(runs, {"name": ["training"]}).parts["live"]),
        "report": render_run(recorded),
    }
    return {name: flat(text) for name, text in found.items()}


def test_every_surface_of_a_plan_has_one_memory_and_one_time(run: Finished) -> None:
    plan, context = run.plan, context_of(run.plan)
    seconds, surfaces = run_seconds(context, plan.chosen), surfaces_of_a_plan(plan)
    assert seconds is not None
    for name, text in surfaces.items():
        assert memory_text(plan.chosen.memory) in text, name
        assert format_bytes(plan.chosen.memory.peak_allocated_bytes) in text, name
        assert about(seconds) in text or format_seconds(seconds) in text, name
        assert f"{format_bytes(plan.chosen.memory.occupied_bytes)} of" not in text, name
        tokens = run_totals(context, plan.chosen).tokens_per_s
        assert f"{tokens:,.0f} tokens/s" in text or f"tokens/s {format_count(tokens)}" in text, name
    for name in ("-v", "--html", "notebook, page"):
        for part, part_s in run_time(context, plan.chosen).parts_s.items():
            assert f"{part} {format_seconds(part_s)}" in surfaces[name], (name, part)
    as_json = json.loads(codec.encode(plan))
    (row,) = (row for row in as_json["methods"] if row["method"] == plan.chosen.method)
    assert row["hours"] * 3600 == pytest.approx(seconds)
    assert row["memory_bytes"] == plan.chosen.memory.need_bytes


def test_every_surface_of_an_ended_run_has_the_figures_of_its_report(run: Finished) -> None:
    memory, rate, surfaces = run.report.measured.memory, run.report.tokens_per_s, surfaces_of_a_run(run)
    assert rate is not None and memory.peak_allocated_bytes is not None and memory.host_bytes is not None
    speed, peak = format_count(rate), format_bytes(memory.peak_allocated_bytes)
    last = format_count(recent_tokens_per_s(step_rows()) or 0.0)
    for name, text in surfaces.items():
        assert f"{speed} " in f"{text} ", name
        assert name in ("ui list",) or peak in text, name
        assert not re.search(rf"\b{re.escape(last)} tokens/s", text), name
        assert name in ("watch", "log line") or format_seconds(run.report.duration_s) in text, name
    for name in ("report", "report --html", "notebook, text", "notebook, page", "ui figures"):
        text = surfaces[name]
        for label, *pair in compared_times(run.report):
            expected, found = map(format_seconds, pair)
            assert f"{label} {expected} {found} {pair[1] / pair[0] - 1:+.1%}" in text, (name, label)
        process = run.plan.chosen.memory.need_bytes, memory.host_bytes
        sizes = " ".join(map(format_bytes, process))
        assert f"RAM of each process {sizes} {process[1] / process[0] - 1:+.1%}" in text, name
    assert sum(run.report.predicted_parts_s.values()) == pytest.approx(run.report.predicted_s)
    assert sum(run.report.parts_s.values()) == pytest.approx(run.report.duration_s)
    assert "sample not predicted" in surfaces["report"], "nothing is invented"
    resident = format_bytes(memory.host_bytes)
    assert f"{resident.split()[0]} " in surfaces["watch"], "of the report, not of the last step"
    assert f"RAM of each process {resident}" in surfaces["ui tiles"]
    expected = f"predicted {format_seconds(run.report.predicted_s or 0.0)}"
    assert expected in surfaces["status"] and expected in surfaces["ui tiles"]


def compared_times(report: Report) -> Iterator[tuple[str, float, float]]:
    """Name, predicted and measured seconds of the run and of its parts."""
    measured = {"start-up": report.duration_s - sum(PARTS_S.values()), **PARTS_S}
    yield "time of the run", report.predicted_s or 0.0, report.duration_s
    yield from ((part, report.predicted_parts_s[part], measured[part]) for part in report.predicted_parts_s)


def test_every_difference_is_measured_minus_predicted_and_relative_to_the_prediction(run: Finished) -> None:
    expected, found = run.report.predicted, run.report.measured
    pairs = [(before, after) for _, before, after in compared_times(run.report)]
    pairs += [(run.plan.chosen.memory.need_bytes, found.memory.host_bytes)]
    names = ("steady_allocated_bytes", "peak_allocated_bytes")
    pairs += [(getattr(expected.memory, name), getattr(found.memory, name)) for name in names]
    pairs += [(size, found.memory.parts[name]) for name, size in grouped(expected.memory.parts).items() if size]
    pairs += [(expected.speed.tokens_per_s_per_gpu, found.speed.tokens_per_s_per_gpu)]
    pairs += [(expected.speed.step_s, found.speed.step_s)]
    signed, surfaces = Counter(f"{after / before - 1:+.1%}" for before, after in pairs), surfaces_of_a_run(run)
    for name in ("report", "report --html", "notebook, text", "notebook, page", "ui figures"):
        assert Counter(re.findall(r"[+-][\d.,]+%", surfaces[name])) == signed, name
    of_several = [pairs[0], (expected.memory.peak_allocated_bytes, found.memory.peak_allocated_bytes), pairs[-2]]
    twice = Counter(f"{after / before - 1:+.1%}" for before, after in (*of_several, *of_several))
    for name in ("report of several", "ui comparison"):
        assert Counter(re.findall(r"[+-][\d.,]+%", surfaces[name])) == twice, name
    share = f"{found.speed.tokens_per_s_per_gpu / expected.speed.tokens_per_s_per_gpu:.0%} of the predicted"
    assert share in surfaces["watch"] and share in surfaces["ui tiles"]


def test_every_surface_of_a_training_has_the_rate_of_its_last_steps_and_its_peak(run: Finished) -> None:
    folder = run.run_dir.parent / "training"
    with locked(folder):
        surfaces, status = surfaces_of_a_training(run), status_in(folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rate, peak = recent_tokens_per_s(rows), max(row["memory_peak_bytes"] for row in rows)
    assert rate is not None and (status.tokens_per_s, status.memory_peak_bytes) == (rate, peak)
    for name, text in surfaces.items():
        assert f"{format_count(rate)} " in f"{text} ", name
        assert name in ("status of all", "ui list") or format_bytes(peak) in text, name
        assert name in ("status of all", "ui list", "report", "log line of train") or "last 50 steps" in text, name


def test_machine_readable_figures_are_those_of_the_report(run: Finished) -> None:
    report, measured = run.report, run.report.measured
    as_json = json.loads(json.dumps(report_json(read_recorded(run.run_dir))))
    sent, config = run_figures(report), run_config(run.plan)
    assert as_json["measured"] == json.loads(msgspec.json.encode(measured))
    assert as_json["duration_s"] == report.duration_s and as_json["predicted_s"] == report.predicted_s
    assert as_json["predicted_parts_s"] == report.predicted_parts_s and as_json["phases_s"] == PARTS_S
    status = json.loads(codec.encode(status_in(run.run_dir)))
    assert (status["duration_s"], status["predicted_s"]) == (report.duration_s, report.predicted_s)
    assert status["tokens_per_s"] == report.tokens_per_s
    assert status["memory_peak_bytes"] == measured.memory.peak_allocated_bytes
    assert sent["tokens_per_s_per_gpu"] == measured.speed.tokens_per_s_per_gpu
    assert sent["memory_peak_bytes"] == measured.memory.peak_allocated_bytes
    chosen = run.plan.chosen
    drawn, totals = predicted_series(chosen, run.plan.device_kind), run_totals(context_of(run.plan), chosen)
    expected = report.predicted
    for field, value in {
        "memory_peak_bytes": expected.memory.peak_allocated_bytes,
        "memory_allocated_bytes": expected.memory.steady_allocated_bytes,
        "step_s": expected.speed.step_s,
        "tokens_per_s_per_gpu": expected.speed.tokens_per_s_per_gpu,
        "tokens_per_s": totals.tokens_per_s,
        "host_rss_bytes": chosen.memory.need_bytes,
    }.items():
        assert value is not None and drawn[f"{series_name(field)}{PREDICTED}"] == pytest.approx(value), field
    assert str(chosen.memory.need_bytes) in json.dumps(config, default=str)
    for part, part_s in run_time(context_of(run.plan), chosen).parts_s.items():
        name = f"{part.replace('-', '_')}_s"
        assert config["predicted"][f"{name}{PREDICTED}"] == sent[f"{name}{PREDICTED}"] == pytest.approx(part_s), part
        assert sent[name] == pytest.approx(report.parts_s[part]), part
    assert config["predicted"][f"duration_s{PREDICTED}"] == sent[f"duration_s{PREDICTED}"] == report.predicted_s


@pytest.mark.cold
def test_what_wandb_wrote_offline_has_the_figures_of_metrics_and_report(run: Finished, tmp_path: Path) -> None:
    order = tracker_order(wandb=WandbMode.OFFLINE)
    shown = Trackers(run.run_dir, order, tracker_environment(tmp_path)).end(EndNotice(has_report=True))
    (path,) = offline_logs(run.run_dir)
    log, report = LoggedRun(path), run.report
    rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(log.history) == len(rows), shown
    for sent, row in zip(log.history, rows, strict=True):
        for field in ("tokens_per_s", "tokens_per_s_per_gpu", "step_s", "memory_peak_bytes", "host_rss_bytes", "loss"):
            assert sent[series_name(field)] == row[field], field
    expected = predicted_series(run.plan.chosen, run.plan.device_kind)
    assert {name: log.history[-1][name] for name in expected} == pytest.approx(expected)
    assert {name: log.config["predicted"][name] for name in expected} == pytest.approx(expected)
    figures = {f"report/{name}": value for name, value in run_figures(report).items()}
    assert {name: log.summary[name] for name in figures} == pytest.approx(figures)
    assert log.summary["report/duration_s"] == report.duration_s
