"""Runs are read from the files that their directories have; one bad run does not hide the others."""

from pathlib import Path

import pytest
from reported_run import report_for, tiny_plan, write_run
from run_factory import age, attempt_record, write_attempt, write_holder

from shardwise.launch.show.recorded_run import labels_of, read_recorded, recorded_runs, state_line
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.report import Ending, Fault


def test_an_attempt_that_was_killed_with_its_supervisor_is_in_the_report_and_its_time_counts(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    plan = tiny_plan()
    first = attempt_record(step=10, ending=Ending.PREEMPTED, duration_s=60.0)
    write_run(run_dir, plan=plan, report=report_for(plan, history=(first,), step=10, duration_s=60.0))
    write_attempt(run_dir, 1, steps=[10])
    folder = write_attempt(run_dir, 2, steps=[11, 12])
    age(folder / "plan.json", seconds=100)
    report = read_recorded(run_dir).report
    assert report is not None and [each.number for each in report.history] == [1, 2] and report.attempts == 2
    assert report.history[1].fault is Fault.KILLED and report.history[1].step == 12
    assert report.duration_s == pytest.approx(160, abs=5)
    assert any("attempt 2" in incident for incident in report.incidents)
    write_holder(run_dir, 7, "another-machine")  # which gave a sign of life just now
    alive = read_recorded(run_dir).report
    assert alive is not None and alive.attempts == 1


def test_a_finished_run_has_its_plan_report_and_steps_and_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    run = read_recorded(write_run(tmp_path / "bot"))
    assert run.plan == tiny_plan() and run.report == report_for(tiny_plan()) and run.problem is None
    assert len(run.curve) == run.step == run.num_steps == 40 and run.final_loss == 4.5
    assert run.eval_losses == pytest.approx({10: 4.0, 20: 4.7, 30: 4.5, 40: 4.3}), "of step 10 the report's own figure"
    failed = report_for(tiny_plan(), ending=Ending.FAILED, attempts=3, step=7)
    run = read_recorded(write_run(tmp_path / "failed", report=failed))
    assert all(fact in state_line(run) for fact in ("failed", "7 of 40", "10.2k tokens", "12 s", "3 attempts"))
    with pytest.raises(InputError, match=r"plan\.json"):
        read_recorded(tmp_path)
    with pytest.raises(InputError, match="nowhere"):
        recorded_runs([tmp_path / "nowhere"])


def test_a_sweep_counts_as_its_points_and_runs_of_one_name_have_their_paths(tmp_path: Path) -> None:
    for number in (10, 2):
        write_run(tmp_path / "sweep" / f"point-{number}", overrides=(f"train.lr={number}",))
    write_run(tmp_path / "alone")
    write_run(tmp_path / "b" / "alone")
    assert labels_of(recorded_runs([tmp_path / "sweep", tmp_path / "alone"])) == ["point-2", "point-10", "alone"]
    runs = recorded_runs([tmp_path / "alone", tmp_path / "b" / "alone"])
    assert labels_of(runs) == [f"{tmp_path}/alone", f"{tmp_path}/b/alone"]
