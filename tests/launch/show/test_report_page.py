"""The page of a run: a section for each kind of content, and names are only text in it."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace
from page_reader import read_page
from reported_run import report_for, step_rows, tiny_plan, write_run
from run_factory import attempt_record

from shardwise.launch.show.recorded_run import RecordedRun, read_recorded
from shardwise.launch.show.run_page import loss_chart, marks_of, run_page
from shardwise.trainer.planning.page.content import LineChart, Page, Quote, Sentence
from shardwise.trainer.planning.page.html import pages_html
from shardwise.trainer.spec.report import Ending, Fault, RollBack, Sample

SECTIONS = [
    "finished", "predicted", "loss", "throughput", "time", "memory", "the plan", "runners-up", "not chosen",
    "notes", "sample", "verified", "hardware", "versions",
]  # fmt: skip


def run_of(tmp_path: Path, **changes: Any) -> RecordedRun:
    return read_recorded(write_run(tmp_path / "bot", **changes))


def titles(page: Page) -> list[str]:
    return [section.title for section in page.sections]


def sentences(page: Page, title: str) -> list[str]:
    blocks = next(section.blocks for section in page.sections if section.title.startswith(title))
    return [block.text for block in blocks if isinstance(block, Sentence)]


def test_every_section_of_a_finished_run_is_there(tmp_path: Path) -> None:
    page = run_page(run_of(tmp_path))
    assert [begin for title, begin in zip(titles(page), SECTIONS, strict=True) if not title.startswith(begin)] == []
    title, *_ = titles(page)
    assert all(fact in title for fact in ("40 of 40", "10.2k tokens", "12 s"))
    assert all(fact in page.title for fact in ("bot:", "llama", "1 rank", "Test CPU"))
    assert [title for title in titles(page) if "none/fp32/adamw_fused" in title]
    rejected = sentences(page, "not chosen")
    assert len(rejected) == 6 and "shardwise plan" in rejected[-1]
    (blocks,) = (section.blocks for section in page.sections if section.title == "sample")
    assert Quote(label="after", text="main():\n    pass") in blocks
    html = pages_html([page], title="t")
    reader = read_page(html)
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert not [name for name, _ in reader.attributes if name in ("src", "href", "style") or name.startswith("on")]
    assert "http" not in html.replace("http-equiv", "") and reader.tags.count("svg") > 12


def test_incidents_attempts_and_what_would_help_are_there_where_there_are_any(tmp_path: Path) -> None:
    plan = tiny_plan()
    other = replace(plan.chosen, strategy=replace(plan.chosen.strategy, name="none/fp32/other"))
    killed = attempt_record(1, step=7, ending=Ending.FAILED, fault=Fault.KILLED, duration_s=30.0)
    history = (killed, attempt_record(2, step=40, resumed_from_step=5))
    report = report_for(plan, history=history, attempts=2, incidents=("step 7: killed", "step 9 was skipped"))
    run = run_of(tmp_path, plan=plan, report=replace(report, plan=other), rows=step_rows(data_s=1.0))
    page = run_page(run)
    assert "none/fp32/other" in sentences(page, "the plan")[0], "a fallback that ran in the end is named"
    assert {"what would help", "incidents", "attempts"} <= set(titles(page))
    assert sentences(page, "incidents") == ["step 7: killed", "step 9 was skipped"]
    first, *_ = sentences(page, "attempts")
    assert all(fact in first for fact in ("none/fp32/adamw", "4 x 2", "beginning"))
    html = pages_html([page], title="t")
    assert "killed at step 7" in html and "attempts over the time" in html


def test_names_of_any_kind_are_only_text(tmp_path: Path) -> None:
    name = '<script>alert(1)</script>"><img src=x onerror=alert(1)> ünï & <b>'
    plan = tiny_plan()
    gpu_free = replace(plan.hardware, excluded=(name,), notes=(name,), host=replace(plan.hardware.host, cpu_name=name))
    plan = replace(plan, name=name, notes=(name,), hardware=gpu_free)
    report = report_for(
        plan, incidents=(name, name), error=name, ending=Ending.FAILED, versions={name: name},
        sample=Sample(prompt=name, before=name, after=name), export=name.replace("/", ""),
    )  # fmt: skip
    folder = name.replace("/", "")
    run = read_recorded(write_run(tmp_path / folder, plan=plan, report=report, overrides=(name,)))
    reader = read_page(pages_html([run_page(run)], title=folder))
    assert not {"script", "img", "b"} & set(reader.tags)
    assert not [attribute for attribute, _ in reader.attributes if attribute.startswith("on")]
    assert " ".join(reader.text).count(name) >= 10


def test_the_page_of_a_run_without_a_report_shows_its_progress(tmp_path: Path) -> None:
    run = run_of(tmp_path, has_report=False, rows=step_rows(range(1, 8)))
    page = run_page(run)
    title, *_ = titles(page)
    (loss,) = sentences(page, title)
    assert "7 of 40" in title and "4.8600" in loss
    assert {"predicted and measured", "loss", "throughput", "hardware"} <= set(titles(page))
    assert not {"sample", "verified engine", "incidents"} & set(titles(page))
    (run.run_dir / "metrics.jsonl").write_text("")
    page = run_page(read_recorded(run.run_dir))
    assert not {"loss", "throughput", "memory of a device"} & set(titles(page))
    assert [text.partition(":")[0] for text in sentences(page, "time of a step")] == ["predicted"]
    (run.run_dir / "plan.json").write_text("{}")
    page = run_page(read_recorded(run.run_dir))
    assert page.title == "bot" and "hardware" not in titles(page)


def series(chart: LineChart) -> dict[str, tuple[tuple[float, float | None], ...]]:
    return {each.name: each.points for each in chart.series}


def test_what_happened_stands_on_the_axis(tmp_path: Path) -> None:
    failed = attempt_record(1, step=12, ending=Ending.OUT_OF_MEMORY, fault=Fault.OUT_OF_MEMORY)
    report = report_for(
        tiny_plan(),
        history=(failed, attempt_record(2, step=40)),
        incidents=("something else",),
        roll_backs=(RollBack(from_step=30, to_step=20),),
    )
    rows = step_rows(range(1, 8))
    rows[2] |= {"skipped": True, "skipped_rows": [1]}
    rows[4] |= {"skipped": True}
    marks = marks_of(run_of(tmp_path, report=report, rows=rows))
    for mark, (at, fact) in zip(marks, ((3, "skipped"), (12, "memory"), (30, "step 20")), strict=True):
        assert mark.at == at and fact in mark.text


def test_a_smoothed_loss_is_a_line_over_a_faint_one_and_has_no_bias_of_its_start(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 4.0 + (-1) ** step} for step in range(1, 101)] + [{"step": 101}]
    run = run_of(tmp_path, rows=rows)
    assert [each.is_faint for each in loss_chart(run).series] == [False, False]
    measured, _, smooth = loss_chart(run, smoothing=0.9).series
    assert measured.is_faint and not smooth.is_faint
    heights = [y for _, y in smooth.points]
    assert heights[0] == 3.0 and heights[-1] is None
    assert all(y is not None and abs(y - 4) < 0.1 for y in heights[60:100])
