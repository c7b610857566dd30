"""`--trial N`: candidates really run, the measured winner is taken, and nothing is left behind."""

import io
import signal
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from workplace_factory import LIMIT_S, Workplace, wait_for

from shardwise.launch.run.trials import Trial, run_trials
from shardwise.launch.rundir.process_record import read_records
from shardwise.launch.terminal import Console
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import CalibrationRecord, Plan, RecordSource
from shardwise.trainer.spec.report import Ending, Report
from shardwise.trainer.spec.strategy import Attention


def scratch(place: Workplace) -> list[Path]:
    return list((place.folder / "cache" / "trials").iterdir())


def test_two_candidates_run_and_the_faster_one_trains(workplace):
    output = workplace.run("train", "job.yaml", "train.steps=2", "--trial", "2").stdout
    run_dir = workplace.only_run()
    plan, report = codec.read(run_dir / "plan.json", Plan), codec.read(run_dir / "report.json", Report)
    measured = {trial.strategy: trial.step_s for trial in plan.trials if trial.step_s is not None}
    assert len(measured) == 2
    assert plan.chosen.strategy.name == report.plan.strategy.name == min(measured, key=measured.__getitem__)
    assert plan.chosen.speed.step_s == pytest.approx(measured[plan.chosen.strategy.name])
    assert [note for note in plan.notes if note.startswith("trial: ")]
    for number, name in enumerate(measured, start=1):
        assert any(f"trial {number} of 2" in line and name in line for line in output.splitlines())
    assert report.ending is Ending.FINISHED
    path = workplace.folder / "home" / ".local" / "state" / "shardwise" / "calibration.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    records = [msgspec.json.decode(line, type=CalibrationRecord) for line in lines]
    found = {record.strategy: record.measured_step_s for record in records if record.source is RecordSource.TRIAL}
    assert found.items() <= measured.items()
    assert len(found) + output.count("not stored for later plans") >= 2, "on a busy machine none is stored"
    assert [record.source for record in records[len(found) :]] in ([], [RecordSource.RUN])  # none is timed
    assert scratch(workplace) == []


def test_a_plan_can_be_tried_without_being_trained(workplace):
    answer = workplace.run("plan", "job.yaml", "--trial", "1", "--json")
    plan = codec.decode(answer.stdout.encode(), Plan, origin="stdout")
    (trial,) = plan.trials
    assert plan.chosen.strategy.name == trial.strategy
    assert plan.chosen.speed.step_s == pytest.approx(trial.step_s)
    assert not (workplace.folder / "runs").exists()
    assert plan.schedule.num_steps == 8  # the job's, not the trial's


def prepared_plan(place: Workplace) -> Plan:
    place.run("train", "job.yaml", "--dry-run", "--run-dir", "made")
    return codec.read(place.folder / "made" / "plan.json", Plan)


def trials_of(plan: Plan, place: Workplace) -> tuple[list[Trial], list[str]]:
    told = io.StringIO()
    cache = place.folder / "cache"
    trials = run_trials(plan, 2, cache=cache, console=Console(told), environment=place.environment)
    return list(trials), told.getvalue().splitlines()


def test_a_candidate_that_cannot_run_is_told_in_one_line_and_the_others_go_on(workplace):
    plan = prepared_plan(workplace)
    broken = replace(plan.candidates[0], attention=Attention.FLASH)  # which no CPU has
    trials, told = trials_of(replace(plan, candidates=(broken, *plan.candidates[1:])), workplace)
    assert trials[0].report is None and trials[0].result is None
    assert trials[1].result is not None and trials[1].result.step_s
    done = trials[1].report
    assert (done.checkpoint, done.export, done.evaluations, done.sample) == (None, None, (), None)
    assert "trial 1 of 2" in told[1] and broken.strategy.name in told[1] and "failed" in told[1]
    (logs,) = scratch(workplace)
    assert str(logs) in told[1] and (logs / "1" / "attempts" / "1" / "logs").is_dir()


def test_what_runs_out_of_memory_in_a_trial_is_out_of_the_plan(workplace):
    """A real one: a data limit on the process refuses what the plan thought was there."""
    workplace.write_job(train={"steps": 2, "seq_len": 128, "tokens_per_step": 65536}, pin={"loss": "eager"})
    plan = prepared_plan(workplace)
    capped = replace(plan, hardware=replace(plan.hardware, vram_cap_bytes=2**20), candidates=plan.candidates[:1])
    (trial,), told = trials_of(capped, workplace)
    assert trial.result is not None and trial.result.ran_out_of_memory and trial.result.step_s is None
    assert "out of memory" in told[-1]
    assert scratch(workplace) == []


def test_an_interrupt_in_a_trial_leaves_nothing_running_and_nothing_behind(workplace):
    process = workplace.start("train", "job.yaml", "--trial", "2")
    rank = "cache/trials/*/1/attempts/1/pids/rank-0.json"
    wait_for(lambda: list(workplace.folder.glob(rank)), "a rank of a trial", process)
    (path,) = workplace.folder.glob(rank)
    family = read_records(path.parent).values()
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 130, output
    assert family and not any(member.is_alive for member in family)
    assert scratch(workplace) == [] and not (workplace.folder / "runs").exists()
