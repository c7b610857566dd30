"""The decision after a fault, and the history of attempts over every start of a run."""

import json
from pathlib import Path

import msgspec
import pytest
from engine_plan_factory import engine_plan
from msgspec.structs import replace
from report_factory import make_candidate, make_report
from run_factory import attempt_record

from shardwise.launch.attempt.retries import (
    MAX_RESTARTS,
    SavedFacts,
    Tried,
    decide,
    earlier_history,
    num_at_step,
    obstacle_to_resume,
    read_facts,
    refuse_endless_restarts,
)
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.messages.rank_files import Heartbeat, encode_heartbeat, heartbeat_path
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.report import AttemptRecord, Ending, Fault
from shardwise.trainer.spec.strategy import Method, Precision

CANDIDATES = tuple(make_candidate(micro_batch=size) for size in (4, 2, 1))
KILLED, HUNG, ERROR, MEMORY = Fault.KILLED, Fault.HUNG, Fault.ERROR, Fault.OUT_OF_MEMORY
FIRST = Tried(0, ERROR, 7, 6, cause="a bug")
AGAIN = Tried(0, ERROR, 6, 6, cause="a bug", had_no_chance=True)  # before the first step of a restart
REFUSED = Tried(1, ERROR, 6, 6, is_final=True, had_no_chance=True)
NEXT = {
    "killed": ([Tried(1, KILLED, 7, 6)], 1),
    "hung": ([Tried(1, HUNG, 7, 6)], 1),
    "error": ([Tried(1, ERROR, 7, 6)], 1),
    "an error that only a person can correct": ([Tried(0, ERROR, 7, 6, is_final=True)], None),
    "an error before any step": ([Tried(0, ERROR, 0, 0, had_no_chance=True)], None),
    "another error before the first step of a restart": ([FIRST, AGAIN._replace(cause="another")], 0),
    "the same error before the first step of a restart": ([FIRST, AGAIN], None),
    "twice at one step": ([FIRST, FIRST], 0),
    "three times at one step": ([FIRST, FIRST, FIRST], None),
    "other steps between": ([FIRST, Tried(0, ERROR, 8, 6), FIRST, Tried(0, HUNG, 7, 6)], None),
    "the last restart from one checkpoint": ([Tried(0, KILLED, 7 + n, 6) for n in range(MAX_RESTARTS)], 0),
    "one more": ([Tried(0, KILLED, 7 + n, 6) for n in range(MAX_RESTARTS + 1)], None),
    "always a newer checkpoint": ([Tried(0, KILLED, 7 + 3 * n, 6 + 3 * n) for n in range(4 * MAX_RESTARTS)], 0),
    "twice at each of two steps": ([Tried(0, KILLED, n + 1, n) for n in (6, 6, 8, 8)], 0),
    "out of memory": ([Tried(0, MEMORY, 0, 0)], 1),
    "out of memory twice": ([Tried(0, MEMORY, 0, 0), Tried(1, MEMORY, 3, 0)], 2),
    "out of memory in the last fallback": ([Tried(2, MEMORY, 3, 0)], None),
    "out of host memory": ([Tried(0, Fault.HOST_OUT_OF_MEMORY, 0, 0)], 1),
    "out of memory is no restart": ([Tried(0, MEMORY, 7, 6), Tried(1, KILLED, 7, 6), Tried(1, KILLED, 7, 6)], 1),
    "a fallback that is refused at its start": ([Tried(0, MEMORY, 7, 6), REFUSED], 2),
    "a fallback that trained": ([Tried(0, MEMORY, 7, 6), REFUSED._replace(had_no_chance=False)], None),
    "refused, and memory was not the reason": ([REFUSED], None),
}


@pytest.mark.parametrize(("tried", "expected"), NEXT.values(), ids=NEXT)
def test_what_follows_an_attempt(tried: list[Tried], expected: int | None):
    assert decide(tried, CANDIDATES, lambda _: None).candidate == expected


def test_fallbacks_that_are_no_help_are_passed_over_and_named():
    obstacles = {2: "cannot go on"}
    tried = [Tried(0, MEMORY, 7, 6)]
    assert decide(tried, CANDIDATES, lambda candidate: obstacles.get(candidate.micro_batch)).candidate == 2
    none = decide(tried, CANDIDATES, lambda candidate: "cannot go on")
    assert none.candidate is None and none.is_out_of_fallbacks and "none/fp32/adamw cannot go on" in none.reason


def killed(run_dir: Path, number: int, *, step: int) -> None:
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
    places = ((1, 1), (1, 2), (1, 3), (2, 3), (2, 4), (2, 5))
    lines = [json.dumps({"step": step, "attempt": attempt}) for attempt, step in places]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 6, "att']))
    history = earlier_history(tmp_path)
    assert [(each.number, each.step, each.fault) for each in history] == [(1, 3, Fault.KILLED), (2, 5, Fault.KILLED)]
    assert history[1].resumed_from_step == 2 and 0 <= history[1].duration_s < 60


def test_a_run_that_dies_or_is_stopped_at_one_step_each_time_is_not_started_for_ever(tmp_path):
    refuse_endless_restarts(tmp_path)
    for number in (1, 2):
        killed(tmp_path, number, step=5)
    refuse_endless_restarts(tmp_path)
    killed(tmp_path, 3, step=5)
    with pytest.raises(EnvironmentFaultError, match=r"(?s)step 5.*killed.*attempts/3/logs"):
        refuse_endless_restarts(tmp_path)
    history = [record(1, step=5), record(2, step=5), record(3, step=5, fault=None), record(4, step=5)]
    assert num_at_step(history, 5) == 1, "an orderly end breaks the row"
    assert (num_at_step(history[:2], 5), num_at_step(history, 4)) == (2, 0)
    (tmp_path / "jobs").mkdir()
    records = tuple(record(number, step=7, fault=None) for number in range(1, 12))
    codec.write(tmp_path / "jobs" / "report.json", make_report(history=records[:10]))
    refuse_endless_restarts(tmp_path / "jobs")
    codec.write(tmp_path / "jobs" / "report.json", make_report(history=records))
    with pytest.raises(EnvironmentFaultError, match=r"(?s)10 jobs.*step 7.*slurm\.time"):
        refuse_endless_restarts(tmp_path / "jobs")


SAVED = SavedFacts(step=30, optimizer=Optimizer.ADAMW, precision=Precision.FP32)
ADAPTERS = msgspec.to_builtins(LoraJob())


def candidate(*, method: Method = Method.FULL, **strategy: object) -> Candidate:
    made = make_candidate(method=method)
    return replace(made, strategy=replace(made.strategy, **strategy))


@pytest.mark.parametrize(
    ("saved", "wanted", "obstacle"),
    [
        (SAVED, candidate(), None),
        (SAVED, candidate(optimizer=Optimizer.ADAMW_FUSED, sharding=Sharding.ZERO3), None),
        (SAVED, candidate(optimizer=Optimizer.DEEPSPEED_CPU_ADAM), None),
        (SAVED, candidate(precision=Precision.BF16_MIXED), None),
        (SAVED, candidate(optimizer=Optimizer.ADAMW_8BIT), "adamw"),
        (SAVED, candidate(optimizer=Optimizer.SGD), "adamw"),
        (SAVED, candidate(precision=Precision.BF16), "fp32"),
        (SAVED, candidate(method=Method.LORA), "weights"),
        (replace(SAVED, optimizer=Optimizer.LION), candidate(optimizer=Optimizer.LION), None),
        (replace(SAVED, precision=Precision.BF16), candidate(precision=Precision.BF16), None),
        (replace(SAVED, lora=ADAPTERS), candidate(method=Method.LORA), None),
        (replace(SAVED, lora=ADAPTERS), candidate(method=Method.QLORA), "weights"),
        (None, candidate(optimizer=Optimizer.SGD), None),
    ],
)
def test_a_fallback_goes_on_where_its_state_means_the_same(saved, wanted, obstacle):
    found = obstacle_to_resume(saved, wanted)
    assert found is None if obstacle is None else obstacle in (found or "")


def test_facts_are_read_from_a_manifest_whatever_else_it_holds(tmp_path: Path):
    facts = {"step": 30, "optimizer": "adamw", "precision": "fp32", "run_name": "bot", "later": {"key": 1}}
    (tmp_path / "MANIFEST.json").write_bytes(msgspec.json.encode({"format": 9, "facts": facts, "parameters": {}}))
    assert read_facts(tmp_path) == SAVED
    (tmp_path / "MANIFEST.json").write_text('{"facts": ')
    assert read_facts(tmp_path) is None and read_facts(tmp_path / "nowhere") is None
