"""Several runs side by side: figures with the best marked, what their jobs differ in, curves over each other."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from page_reader import read_page
from reported_run import measured_figures, report_for, step_rows, tiny_plan, write_point, write_run

from shardwise.launch.show.recorded_run import RecordedRun, recorded_runs
from shardwise.launch.show.run_page import comparison_page
from shardwise.trainer.planning.page.content import Page, Sentence, Table, page_text
from shardwise.trainer.planning.page.html import pages_html
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, Report


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


def table(page: Page, title: str) -> Table:
    (found,) = (
        block
        for section in page.sections
        if section.title.startswith(title)
        for block in section.blocks
        if isinstance(block, Table)
    )
    return found


def sentences(page: Page) -> list[str]:
    return [block.text for section in page.sections for block in section.blocks if isinstance(block, Sentence)]


def test_each_run_is_a_row_and_the_best_figures_have_a_star(runs: tuple[RecordedRun, ...]) -> None:
    figures = table(comparison_page(runs), "figures")
    header, slow, quick, going = figures.starred
    named = [dict(zip(header, row, strict=True)) for row in (slow, quick, going)]
    assert [row["run"] for row in named] == ["slow", "quick", "going"]
    assert [row["ending"] for row in named] == ["finished", "finished", "not ended"]
    assert [row["held-out"] for row in named] == ["4.3000 *", "4.4000", "-"]
    assert [row["time"] for row in named] == ["1 min 40 s", "50 s *", "-"]
    assert [row["step"] for row in named] == ["40", "40", "3"]
    assert named[1]["tokens/s"].endswith(" *") and named[1]["step time"].endswith(" *")
    assert not named[0]["tokens/s"].endswith("*") and not named[0]["strategy"].endswith("*")


def test_losses_on_other_data_are_not_compared_and_equal_figures_have_no_best(tmp_path: Path) -> None:
    plan = tiny_plan()
    other = replace(plan, data=replace(plan.data, fingerprint="another"))
    same = recorded_runs([write_run(tmp_path / name, rows=step_rows(data_s=1.0)) for name in ("a", "b")])
    assert table(comparison_page(same), "figures").best == ()
    text = page_text(comparison_page(same), width=100)
    assert "2 runs" in text.splitlines()[0] and "  a: 50% " in text and "held-out loss\n\n" not in text
    assert max(map(len, text.splitlines())) <= 100
    found = recorded_runs([tmp_path / "a", write_run(tmp_path / "c", plan=other, rows=step_rows(eval_loss=1.0))])
    page = comparison_page(found)
    assert not [column for _, column in table(page, "figures").best if column == 3]
    assert "no loss" in " ".join(sentences(page))


def test_times_of_other_schedules_and_of_broken_runs_are_not_compared(tmp_path: Path) -> None:
    plan = tiny_plan()
    longer = replace(plan, schedule=replace(plan.schedule, num_steps=80))
    reports = (faster(plan, 1.0), faster(longer, 2.0))
    found = recorded_runs(
        [
            write_run(tmp_path / name, plan=each, report=report)
            for name, each, report in zip("ab", (plan, longer), reports, strict=True)
        ]
    )
    assert {column for _, column in table(comparison_page(found), "figures").best} == {5}
    failed = faster(plan, 2.0, ending=Ending.FAILED)
    found = recorded_runs([tmp_path / "a", write_run(tmp_path / "c", report=failed)])
    assert {column for _, column in table(comparison_page(found), "figures").best} == {5, 6}


def test_runs_that_have_not_begun_or_are_damaged_stand_in_the_table(tmp_path: Path) -> None:
    write_point(tmp_path / "queued", ("train.lr=1e-4",))
    whole, damaged = write_run(tmp_path / "<img src=x>"), write_run(tmp_path / "damaged")
    (damaged / "report.json").write_text("{")
    page = comparison_page(recorded_runs([tmp_path / "queued", whole, damaged]))
    assert [row[1] for row in table(page, "figures").rows[1:]] == ["not begun", "finished", "not ended"]
    assert any(each.startswith("queued: ") for each in sentences(page))
    reader = read_page(pages_html([page], title="t"))
    assert "img" not in reader.tags and " ".join(reader.text).count("<img src=x>") >= 3, "names are only text"
