"""Pages of one run and of several: each kind of content, figures with the best marked, names that are only text."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from page_reader import read_page
from reported_run import measured_figures, report_for, step_rows, tiny_plan, write_point, write_run
from run_factory import attempt_record

from shardwise.launch.show import run_page as pages
from shardwise.launch.show.recorded_run import RecordedRun, read_recorded, recorded_runs
from shardwise.trainer.planning.page.content import LineChart, Page, Quote, Sentence, Table, page_text
from shardwise.trainer.planning.page.html import pages_html
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, Fault, Report, RollBack, Sample

SECTIONS = [
    "finished", "predicted", "loss", "throughput", "time", "memory of a device", "memory of a device during",
    "the plan", "runners-up", "not chosen", "notes", "sample", "verified", "hardware", "versions",
]  # fmt: skip


def run_of(tmp_path: Path, **changes: Any) -> RecordedRun:
    return read_recorded(write_run(tmp_path / "bot", **changes))


def titles(page: Page) -> list[str]:
    return [section.title for section in page.sections]


def blocks(page: Page, title: str = "") -> list[object]:
    return [block for section in page.sections if section.title.startswith(title) for block in section.blocks]


def sentences(page: Page, title: str = "") -> list[str]:
    return [block.text for block in blocks(page, title) if isinstance(block, Sentence)]


def table(page: Page, title: str) -> Table:
    (found,) = [block for block in blocks(page, title) if isinstance(block, Table)]
    return found


def test_every_section_of_a_finished_run_is_there(tmp_path: Path) -> None:
    page = pages.run_page(run_of(tmp_path))
    assert [begin for title, begin in zip(titles(page), SECTIONS, strict=True) if not title.startswith(begin)] == []
    title, *_ = titles(page)
    assert all(fact in title for fact in ("40 of 40", "10.2k tokens", "12 s"))
    assert all(fact in page.title for fact in ("bot:", "llama", "1 rank", "Test CPU"))
    assert [title for title in titles(page) if "none/fp32/adamw_fused" in title]
    rejected = sentences(page, "not chosen")
    assert len(rejected) == 6 and "shardwise plan" in rejected[-1]
    assert Quote(label="after", text="main():\n    pass") in blocks(page, "sample")
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
    page = pages.run_page(run)
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
    reader = read_page(pages_html([pages.run_page(run)], title=folder))
    assert not {"script", "img", "b"} & set(reader.tags)
    assert not [attribute for attribute, _ in reader.attributes if attribute.startswith("on")]
    assert " ".join(reader.text).count(name) >= 10


def test_the_page_of_a_run_without_a_report_shows_its_progress(tmp_path: Path) -> None:
    run = run_of(tmp_path, has_report=False, rows=step_rows(range(1, 8)))
    page = pages.run_page(run)
    title, *_ = titles(page)
    (loss,) = sentences(page, title)
    assert "7 of 40" in title and "4.8600" in loss
    assert {"predicted and measured", "loss", "throughput", "hardware"} <= set(titles(page))
    assert not {"sample", "verified engine", "incidents"} & set(titles(page))
    (run.run_dir / "metrics.jsonl").write_text("")
    page = pages.run_page(read_recorded(run.run_dir))
    assert not {"loss", "throughput", "memory of a device"} & set(titles(page))
    assert [text.partition(":")[0] for text in sentences(page, "time of a step")] == ["predicted"]
    (run.run_dir / "plan.json").write_text("{}")
    page = pages.run_page(read_recorded(run.run_dir))
    assert page.title == "bot" and "hardware" not in titles(page)


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
    marks = pages.marks_of(run_of(tmp_path, report=report, rows=rows))
    for mark, (at, fact) in zip(marks, ((3, "skipped"), (12, "memory"), (30, "step 20")), strict=True):
        assert mark.at == at and fact in mark.text


def test_the_usable_memory_is_drawn_where_it_is_near(tmp_path: Path) -> None:
    usable = tiny_plan().chosen.memory.usable_bytes
    assert usable is not None
    for share, names in ((0.1, []), (0.5, ["usable"])):
        run = run_of(tmp_path / str(share), rows=step_rows(memory_peak_bytes=int(share * usable)))
        assert [each.name for each in pages.memory_chart(run).series] == ["peak allocated", "predicted peak", *names]


def test_a_smoothed_loss_is_a_line_over_a_faint_one_and_has_no_bias_of_its_start(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 4.0 + (-1) ** step} for step in range(1, 101)] + [{"step": 101}]
    run = run_of(tmp_path, rows=rows)
    assert [each.is_faint for each in pages.loss_chart(run).series] == [False, False]
    measured, _, smooth = pages.loss_chart(run, smoothing=0.9).series
    assert measured.is_faint and not smooth.is_faint
    heights = [y for _, y in smooth.points]
    assert heights[0] == 3.0 and heights[-1] is None
    assert all(y is not None and abs(y - 4) < 0.1 for y in heights[60:100])


def faster(plan: Plan, times: float, **changes: Any) -> Report:
    measured = measured_figures(plan)
    speed = measured.speed
    assert speed.step_s is not None and speed.tokens_per_s_per_gpu is not None
    quick = replace(speed, step_s=speed.step_s / times, tokens_per_s_per_gpu=speed.tokens_per_s_per_gpu * times)
    return report_for(plan, measured=replace(measured, speed=quick), duration_s=100 / times, **changes)


def at_rate(lr: float) -> Plan:
    plan = tiny_plan()
    return replace(plan, job=replace(plan.job, train=replace(plan.job.train, lr=lr)))


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RecordedRun, ...]:
    slow, quick = at_rate(1e-4), at_rate(3e-4)
    write_run(tmp_path / "slow", plan=slow, report=faster(slow, 1.0))
    write_run(tmp_path / "quick", plan=quick, report=faster(quick, 2.0), rows=step_rows(eval_loss=4.4))
    write_run(tmp_path / "going", plan=slow, has_report=False, rows=step_rows(range(1, 4)))
    return recorded_runs([tmp_path / "slow", tmp_path / "quick", tmp_path / "going"])


def test_each_run_is_a_row_and_the_best_figures_have_a_star(runs: tuple[RecordedRun, ...]) -> None:
    figures = table(pages.comparison_page(runs), "figures")
    header, slow, quick, going = figures.starred
    named = [dict(zip(header, row, strict=True)) for row in (slow, quick, going)]
    assert [row["run"] for row in named] == ["slow", "quick", "going"]
    assert [row["ending"] for row in named] == ["finished", "finished", "not ended"]
    assert [row["held-out"] for row in named] == ["4.3000 *", "4.4000", "-"]
    assert [row["time"] for row in named] == ["1 min 40 s", "50 s *", "-"]
    assert [row["step"] for row in named] == ["40", "40", "3"]
    assert named[1]["tokens/s"].endswith(" *") and named[1]["step time"].endswith(" *")
    assert not named[0]["tokens/s"].endswith("*") and not named[0]["strategy"].endswith("*")


def test_losses_on_other_data_and_times_of_other_schedules_and_broken_runs_are_not_compared(tmp_path: Path) -> None:
    plan = tiny_plan()
    other = replace(plan, data=replace(plan.data, fingerprint="another"))
    same = recorded_runs([write_run(tmp_path / name, rows=step_rows(data_s=1.0)) for name in ("a", "b")])
    assert table(pages.comparison_page(same), "figures").best == ()
    text = page_text(pages.comparison_page(same), width=100)
    assert "2 runs" in text.splitlines()[0] and "  a: 50% " in text and "held-out loss\n\n" not in text
    assert max(map(len, text.splitlines())) <= 100
    found = recorded_runs([tmp_path / "a", write_run(tmp_path / "c", plan=other, rows=step_rows(eval_loss=1.0))])
    page = pages.comparison_page(found)
    assert not [column for _, column in table(page, "figures").best if column == 3]
    assert "no loss" in " ".join(sentences(page))
    longer = replace(plan, schedule=replace(plan.schedule, num_steps=80))
    write_run(tmp_path / "usual", plan=plan, report=faster(plan, 1.0))
    found = recorded_runs([tmp_path / "usual", write_run(tmp_path / "longer", plan=longer, report=faster(longer, 2.0))])
    assert {column for _, column in table(pages.comparison_page(found), "figures").best} == {5}
    failed = faster(plan, 2.0, ending=Ending.FAILED)
    found = recorded_runs([tmp_path / "usual", write_run(tmp_path / "failed", report=failed)])
    assert {column for _, column in table(pages.comparison_page(found), "figures").best} == {5, 6}


def test_a_chart_has_the_first_twelve_runs_and_their_number(tmp_path: Path) -> None:
    found = recorded_runs([write_run(tmp_path / f"run-{number}", rows=step_rows([1])) for number in range(13)])
    loss = blocks(pages.comparison_page(found), "training loss")
    assert [len(block.series) for block in loss if isinstance(block, LineChart)] == [12]
    assert "12 of 13" in " ".join(sentences(pages.comparison_page(found), "training loss"))


def test_runs_that_have_not_begun_or_are_damaged_stand_in_the_table(tmp_path: Path) -> None:
    write_point(tmp_path / "queued", ("train.lr=1e-4",))
    whole, damaged = write_run(tmp_path / "<img src=x>"), write_run(tmp_path / "damaged")
    (damaged / "report.json").write_text("{")
    page = pages.comparison_page(recorded_runs([tmp_path / "queued", whole, damaged]))
    assert [row[1] for row in table(page, "figures").rows[1:]] == ["not begun", "finished", "not ended"]
    assert any(each.startswith("queued: ") for each in sentences(page))
    reader = read_page(pages_html([page], title="t"))
    assert "img" not in reader.tags and " ".join(reader.text).count("<img src=x>") >= 3, "names are only text"


def test_learning_rate_gradients_and_the_use_of_the_device_are_drawn_if_they_are_measured(tmp_path: Path) -> None:
    rows = step_rows(lr=1e-4, grad_norm=0.5, gpu_utilization=0.9, mfu=0.4, gpu_power_w=300, padding_share=0)
    page = pages.run_page(run_of(tmp_path, rows=rows))
    drawn = [
        (block.caption, [each.name for each in block.series]) for block in blocks(page) if isinstance(block, LineChart)
    ]
    assert ("learning rate", ["learning rate"]) in drawn
    assert ("norm of the gradients before clipping", ["gradient norm", "clipped to"]) in drawn
    assert ("GPU busy, MFU", ["GPU busy", "MFU"]) in drawn
    assert "power of the GPU in watts" in dict(drawn) and "temperature of the GPU in degrees Celsius" not in dict(drawn)


def test_a_chart_over_steps_is_one_over_tokens_or_time_and_its_marks_move_along(tmp_path: Path) -> None:
    rows = [{**row, "tokens": 100 * row["step"], "step_s": 1.0 + row["step"]} for row in step_rows(range(2, 41, 2))]
    rows[9]["skipped"], rows[9]["skipped_rows"] = True, [1]
    run = run_of(tmp_path, rows=rows)
    chart = pages.loss_chart(run)
    assert pages.on_axis(chart, run, pages.XAxis.STEPS) == chart and chart.marks[0].at == 20
    tokens = pages.on_axis(chart, run, pages.XAxis.TOKENS)
    assert tokens.x_label == "tokens" and tokens.marks[0].at == 2000
    assert tokens.series[0].points == tuple((100.0 * x, y) for x, y in chart.series[0].points)
    seconds = [x for x, _ in pages.on_axis(chart, run, pages.XAxis.TIME).series[0].points]
    assert seconds[:2] == [2 * 3.0, 2 * 3.0 + 2 * 5.0], "a step without a line took as long as the next one"
    without = read_recorded(write_run(tmp_path / "older"))
    assert pages.on_axis(pages.loss_chart(without), without, pages.XAxis.TOKENS) == pages.loss_chart(without)
    labels = [
        {
            block.x_label
            for block in blocks(pages.comparison_page(runs, axis=pages.XAxis.TOKENS))
            if isinstance(block, LineChart)
        }
        for runs in ([run, run], [run, without])
    ]
    assert labels == [{"tokens"}, {"step"}], "runs are drawn on an axis that all of them have"


def test_settings_that_differ_from_the_defaults_are_listed_beside_them() -> None:
    job = tiny_plan().job
    changed = replace(job, train=replace(job.train, lr=0.25, clip=1.0), log=replace(job.log, tensorboard=True))
    rows = {row[0]: row[1:] for row in pages.settings_table(changed).rows}
    assert rows["train.lr"][0] == "0.25" and rows["log.tensorboard"] == ("True", "False") and "train.clip" not in rows
