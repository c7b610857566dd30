"""Runs are read from whatever their directories hold; one bad run does not hide the others."""

from pathlib import Path

import pytest
from reported_run import report_for, step_rows, tiny_plan, write_point, write_run

from shardwise.launch.show.report.runs import labels_of, read_recorded, recorded_runs, state_line
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.report import Ending


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"plan\.json"):
        read_recorded(tmp_path)
    with pytest.raises(InputError, match="nowhere"):
        recorded_runs([tmp_path / "nowhere"])


def test_a_finished_run_has_its_plan_report_and_steps(tmp_path: Path) -> None:
    run = read_recorded(write_run(tmp_path / "bot"))
    assert run.plan == tiny_plan() and run.report == report_for(tiny_plan()) and run.problem is None
    assert len(run.curve) == run.step == run.num_steps == 40 and run.final_loss == 4.5
    assert run.eval_losses == pytest.approx({10: 4.0, 20: 4.7, 30: 4.5, 40: 4.3}), "of step 10 the report's own figure"
    assert all(fact in state_line(run) for fact in ("finished", "40 of 40", "10.2k tokens", "12 s"))


def test_a_run_that_still_goes_tells_how_far_it_got(tmp_path: Path) -> None:
    run = read_recorded(write_run(tmp_path / "bot", has_report=False, rows=step_rows(range(1, 8))))
    assert "7 of 40" in state_line(run) and run.step == 7
    assert run.measured.speed.step_s == 2.0 and run.recommended == ()
    assert run.predicted.speed.step_s == tiny_plan().chosen.speed.step_s


def test_a_run_before_its_first_step_has_no_figures(tmp_path: Path) -> None:
    run = read_recorded(write_run(tmp_path / "bot", has_report=False, rows=()))
    assert run.curve == () and run.final_loss is None and run.measured.speed.step_s is None


def test_a_run_in_the_queue_has_not_begun(tmp_path: Path) -> None:
    write_point(tmp_path / "bot", ("train.lr=1e-4",))
    run = read_recorded(tmp_path / "bot")
    assert "not begun" in state_line(run) and run.overrides == ("train.lr=1e-4",)
    assert run.candidate is None and run.predicted.speed.step_s is None


def test_a_damaged_report_is_a_problem_in_words(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "bot")
    (run_dir / "report.json").write_text('{"format": 1')
    assert f"{run_dir}/report.json" in state_line(read_recorded(run_dir))


def test_a_damaged_plan_leaves_the_report(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "bot")
    (run_dir / "plan.json").write_text("{}")
    run = read_recorded(run_dir)
    assert run.plan is None and run.report is not None and run.recommended == ()
    assert "40 of 40" in state_line(run)


def test_a_sweep_counts_as_its_points(tmp_path: Path) -> None:
    for number in (10, 2):
        write_run(tmp_path / "sweep" / f"point-{number}", overrides=(f"train.lr={number}",))
    write_run(tmp_path / "alone")
    runs = recorded_runs([tmp_path / "sweep", tmp_path / "alone"])
    assert labels_of(runs) == ["point-2", "point-10", "alone"]


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_run(tmp_path / folder / "bot")
    runs = recorded_runs([tmp_path / "a" / "bot", tmp_path / "b" / "bot"])
    assert labels_of(runs) == [f"{tmp_path}/a/bot", f"{tmp_path}/b/bot"]


def test_several_attempts_are_counted(tmp_path: Path) -> None:
    report = report_for(tiny_plan(), ending=Ending.FAILED, attempts=3, step=7)
    run = read_recorded(write_run(tmp_path / "bot", report=report))
    assert all(fact in state_line(run) for fact in ("failed", "7 of 40", "3 attempts"))
