"""The decision after a fault, and the history of attempts over every start of a run."""

import json
from pathlib import Path

import pytest
from engine_plan_factory import engine_plan
from report_factory import make_candidate, make_report
from run_factory import attempt_record

from shardwise.launch.attempt.retries import (
    MAX_RESTARTS,
    Tried,
    decide,
    earlier_history,
    num_at_step,
    refuse_endless_restarts,
)
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.messages.rank_files import Heartbeat, encode_heartbeat, heartbeat_path
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.report import AttemptRecord, Ending, Fault
from shardwise.trainer.spec.strategy import Sharding

CANDIDATES = tuple(make_candidate(micro_batch=size) for size in (4, 2, 1))
KILLED, HUNG, ERROR, MEMORY = Fault.KILLED, Fault.HUNG, Fault.ERROR, Fault.OUT_OF_MEMORY


def nothing_in_the_way(_candidate: Candidate) -> str | None:
    return None


def after(*tried: Tried) -> int | None:
    return decide(tried, CANDIDATES, nothing_in_the_way).candidate


@pytest.mark.parametrize("fault", [KILLED, HUNG, ERROR])
def test_a_death_a_hang_and_an_error_are_followed_by_the_same_again(fault: Fault):
    decision = decide([Tried(1, fault, 7, 6)], CANDIDATES, nothing_in_the_way)
    assert decision.candidate == 1 and "step 6" in decision.reason


def test_an_error_that_would_repeat_is_not_retried():
    assert after(Tried(0, ERROR, 7, 6, is_final=True)) is None, "a person has to mend it"
    assert after(Tried(0, ERROR, 0, 0, had_no_chance=True)) is None, "before any step"


def test_an_error_before_the_first_step_of_a_restart_is_tried_again_unless_it_is_the_same():
    first = Tried(0, ERROR, 7, 6, cause="a bug")
    assert after(first, Tried(0, ERROR, 6, 6, cause="another", had_no_chance=True)) == 0
    assert after(first, Tried(0, ERROR, 6, 6, cause="a bug", had_no_chance=True)) is None


def test_the_third_failure_of_one_step_is_the_last():
    same = Tried(0, ERROR, 7, 6)
    assert after(same, same) == 0
    decision = decide([same, same, same], CANDIDATES, nothing_in_the_way)
    assert decision.candidate is None and "step 7" in decision.reason


def test_other_steps_between_do_not_hide_a_step_that_always_fails():
    assert after(Tried(0, ERROR, 7, 6), Tried(0, ERROR, 8, 6), Tried(0, ERROR, 7, 6), Tried(0, HUNG, 7, 6)) is None


def test_restarts_are_bounded_while_no_newer_checkpoint_comes():
    tried = [Tried(0, KILLED, step, 6) for step in range(7, 8 + MAX_RESTARTS)]
    assert after(*tried[:-1]) == 0
    assert after(*tried) is None


def test_a_newer_checkpoint_starts_the_count_again():
    tried = [Tried(0, KILLED, 7 + 3 * number, 6 + 3 * number) for number in range(4 * MAX_RESTARTS)]
    assert after(*tried) == 0
    same_step = [Tried(0, KILLED, 7, 6), Tried(0, KILLED, 7, 6), Tried(0, KILLED, 9, 8), Tried(0, KILLED, 9, 8)]
    assert after(*same_step) == 0


@pytest.mark.parametrize("fault", [Fault.OUT_OF_MEMORY, Fault.HOST_OUT_OF_MEMORY])
def test_out_of_memory_takes_the_next_fallback_until_none_is_left(fault: Fault):
    assert after(Tried(0, fault, 0, 0)) == 1
    assert after(Tried(0, fault, 0, 0), Tried(1, fault, 3, 0)) == 2
    decision = decide([Tried(2, fault, 3, 0)], CANDIDATES, nothing_in_the_way)
    assert decision.candidate is None and decision.is_out_of_fallbacks


def test_out_of_memory_does_not_count_as_a_restart():
    tried = [Tried(0, MEMORY, 7, 6), Tried(1, KILLED, 7, 6), Tried(1, KILLED, 7, 6)]
    assert after(*tried) == 1


def test_fallbacks_that_are_no_help_are_passed_over_and_named():
    def refuses_halves(candidate: Candidate) -> str | None:
        return "cannot go on" if candidate.micro_batch == 2 else None

    assert decide([Tried(0, MEMORY, 7, 6)], CANDIDATES, refuses_halves).candidate == 2
    none = decide([Tried(0, MEMORY, 7, 6)], CANDIDATES, lambda candidate: "cannot go on")
    assert none.candidate is None and none.is_out_of_fallbacks and "none/fp32/adamw cannot go on" in none.reason


def test_a_fallback_that_is_refused_at_its_start_is_followed_by_the_next():
    refused = Tried(1, ERROR, 6, 6, is_final=True, had_no_chance=True)
    assert after(Tried(0, MEMORY, 7, 6), refused) == 2
    assert after(Tried(0, MEMORY, 7, 6), refused._replace(had_no_chance=False)) is None, "it did train"
    assert after(refused) is None, "memory was not the reason that it ran"


def killed(run_dir: Path, number: int, *, step: int) -> None:
    """Writes the files of an attempt whose supervisor was killed."""
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
