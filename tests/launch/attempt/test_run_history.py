"""Attempts are counted over every start of a run, also those whose supervisor was killed with them."""

import json
from pathlib import Path

import pytest
from engine_plan_factory import engine_plan
from report_factory import make_report
from run_factory import attempt_record

from launch.attempt.retries import earlier_history, num_at_step, refuse_endless_restarts
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.messages.heartbeat import Heartbeat, encode_heartbeat, heartbeat_path
from trainer.spec.report import AttemptRecord, Ending, Fault
from trainer.spec.strategy import Sharding


def killed(run_dir: Path, number: int, *, step: int) -> None:
    """What an attempt leaves whose supervisor was killed."""
    attempt = run_dir / "attempts" / str(number)
    for rank, done in enumerate((step, step - 1)):
        path = heartbeat_path(attempt, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_heartbeat(Heartbeat(step=done, count=1, phase="forward")))
    codec.write(attempt / "plan.json", engine_plan(Sharding.DDP, num_ranks=2))


def record(number: int, *, step: int, fault: Fault | None = Fault.KILLED) -> AttemptRecord:
    ending, cause = (Ending.PREEMPTED, None) if fault is None else (Ending.FAILED, "rank 1 was killed by SIGKILL")
    return attempt_record(number, step=step, ending=ending, fault=fault, cause=cause)


def test_attempts_without_a_report_are_read_from_heartbeats(tmp_path):
    codec.write(tmp_path / "report.json", make_report(history=(record(1, step=3),)))
    for number, step in ((1, 9), (2, 5)):
        killed(tmp_path, number, step=step)
    (tmp_path / "attempts" / "3").mkdir()  # it had not begun
    lines = [
        {"step": step, "attempt": attempt} for attempt, steps in ((1, (1, 2, 3)), (2, (3, 4, 5))) for step in steps
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 6, "att')
    history = earlier_history(tmp_path)
    assert [(each.number, each.step, each.fault) for each in history] == [(1, 3, Fault.KILLED), (2, 5, Fault.KILLED)]
    assert history[1].resumed_from_step == 2 and 0 <= history[1].duration_s < 60


def test_a_run_that_dies_at_one_step_each_time_is_not_started_again(tmp_path):
    for number in (1, 2):
        killed(tmp_path, number, step=5)
    refuse_endless_restarts(tmp_path)
    killed(tmp_path, 3, step=5)
    with pytest.raises(EnvironmentFaultError, match=r"(?s)step 5.*killed.*attempts/3/logs"):
        refuse_endless_restarts(tmp_path)


def test_a_run_that_gets_on_may_die_as_often_as_it_likes(tmp_path):
    for number in range(1, 6):
        killed(tmp_path, number, step=number)
    refuse_endless_restarts(tmp_path)


def test_an_orderly_end_breaks_the_row():
    history = [record(1, step=5), record(2, step=5), record(3, step=5, fault=None), record(4, step=5)]
    assert (num_at_step(history, 5), num_at_step(history[:2], 5), num_at_step(history, 4)) == (1, 2, 0)


def test_jobs_that_are_stopped_before_a_step_each_time_are_not_started_for_ever(tmp_path):
    def write(num: int) -> None:
        records = tuple(record(number, step=7, fault=None) for number in range(1, num + 1))
        codec.write(tmp_path / "report.json", make_report(history=records))

    write(10)
    refuse_endless_restarts(tmp_path)
    write(11)
    with pytest.raises(EnvironmentFaultError, match=r"(?s)10 jobs.*step 7.*slurm\.time"):
        refuse_endless_restarts(tmp_path)


def test_a_new_run_has_no_history(tmp_path):
    assert earlier_history(tmp_path) == []
    refuse_endless_restarts(tmp_path)
