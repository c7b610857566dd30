"""A run stops ahead of its limits with a checkpoint, and is not resumed until a spent limit is raised."""

import io
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from report_factory import make_report
from run_factory import attempt_record, run_plan, write_attempt, write_report

from shardwise.launch.attempt import limits as spending
from shardwise.launch.attempt.supervisor import StopKind, StopRequest
from shardwise.launch.attempt.watchdog import Watchdog
from shardwise.launch.terminal import Console
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import ExitCode, InputError
from shardwise.trainer.spec.job.sections import Job, Limits
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import AttemptRecord, Ending

HOUR_S = 3600.0


def job(hours: float = 24.0, cost: float | None = None, price: float | None = None) -> Job:
    return Job(limits=Limits(hours=hours, cost=cost), price_per_gpu_hour=price)


def plan(hours: float = 24.0, cost: float | None = None, price: float | None = None) -> Plan:
    return replace(run_plan(num_steps=1000), job=job(hours, cost, price))


def took(*hours: float, num_ranks: int = 1) -> list[AttemptRecord]:
    return [attempt_record(number, duration_s=each * HOUR_S, num_ranks=num_ranks) for number, each in enumerate(hours)]


def test_hours_are_those_of_all_attempts_and_money_is_hours_of_all_ranks_at_their_price():
    (limit,) = spending.limits_of(job(hours=10), took(1.5, 2.5), num_ranks=8)
    assert limit == spending.Limit("limits.hours", 10, 10, 4.0, 1) and limit.left_s == 6 * HOUR_S
    assert all(fact in limit.summary for fact in ("limits.hours", "10 h 00 min", "4 h 00 min"))
    _, limit = spending.limits_of(job(cost=100, price=2.5), [*took(1, num_ranks=8), *took(3, num_ranks=4)], num_ranks=4)
    assert limit == spending.Limit("limits.cost", 100, 40, 20.0, 4) and limit.left_s == 5 * HOUR_S
    assert all(fact in limit.summary for fact in ("limits.cost", " 100,", "50.00", "2.5 a GPU-hour"))
    assert "70.00" in limit.after(2 * HOUR_S).summary
    assert [each.name for each in spending.limits_of(job(cost=100), [])] == ["limits.hours"], "no price, no cost"


def test_the_remedy_follows_from_the_steps_that_were_done():
    hours, cost = spending.Limit("limits.hours", 24, 24, 24.0, 1), spending.Limit("limits.cost", 100, 40, 39.0, 4)
    for words, remedy in ((hours.remedy(700, 1000), "limits.hours=36 "), (cost.remedy(900, 1000), "limits.cost=120 ")):
        assert remedy in words and "--resume" in words
    words = hours.remedy(0, 1000)
    assert "limits.hours" in words and "limits.hours=" not in words, "without a step there is no pace"


def watch_of(run_dir: Path, left_s: float, **limits: float) -> spending.LimitWatch:
    """Of a run that has so many seconds of its ten hours left."""
    return spending.LimitWatch(run_dir, plan(hours=10, **limits), took(10 - left_s / HOUR_S), num_ranks=1)


def watchdog(run_dir: Path, step: int = 0) -> Watchdog:
    dog = Watchdog(write_attempt(run_dir, steps=[step]), num_ranks=1)
    dog._looked_at = float("-inf")
    dog.look()
    assert dog.step == step
    return dog


@pytest.mark.parametrize(
    ("left_s", "step", "stops"),
    [
        (HOUR_S, 0, False),
        (spending.MAX_MARGIN_S * 11, 0, False),
        (-1.0, 0, True),
        (-1.0, 1000, False),  # the last step is done: the run is left to finish
    ],
)
def test_a_limit_that_is_spent_ends_the_run_for_good_once(tmp_path: Path, left_s: float, step: int, stops: bool):
    stop, printed = StopRequest(), io.StringIO()
    limits, dog = watch_of(tmp_path, left_s), watchdog(tmp_path, step)
    for _ in range(2):
        limits.stop_in_time(stop, dog, Console(printed))
    assert stop.kind is (StopKind.INTERRUPT if stops else None)
    assert not stop.is_urgent and stop.num_interrupts == 0, "a Ctrl-C after it is the first"
    lines = printed.getvalue().splitlines()
    assert len(lines) == stops and (tmp_path / spending.SPENT_FILE).exists() is stops
    assert [line.count("10 h 00 min") for line in lines if line.startswith("limits.hours")] == [2] * stops


def test_the_stop_comes_with_room_for_an_end(tmp_path: Path, monkeypatch):
    stop, limits, dog = StopRequest(), watch_of(tmp_path, HOUR_S), watchdog(tmp_path)
    margin_s, printed = time.monotonic() + HOUR_S - spending.MAX_MARGIN_S, io.StringIO()
    for late_s, kind in ((-60, None), (1, StopKind.INTERRUPT)):
        monkeypatch.setattr(time, "monotonic", lambda late_s=late_s: margin_s + late_s)
        limits.stop_in_time(stop, dog, Console(printed))
        assert stop.kind is kind
    assert "9 h 59 min" in printed.getvalue() and "45 s" in printed.getvalue()


def test_the_report_names_the_limit_that_ended_the_run(tmp_path: Path):
    limits = spending.LimitWatch(tmp_path, plan(cost=50, price=2), took(25.1), num_ranks=1)
    assert limits.incidents(make_report(ending=Ending.STOPPED)) == (), "somebody else stopped it"
    limits.stop_in_time(StopRequest(), watchdog(tmp_path, step=500), Console(io.StringIO()))
    (first,) = limits.incidents(make_report(ending=Ending.STOPPED, step=500, num_steps=1000))
    facts = ("24 h 00 min", "25 h 06 min", "step 500 of 1000", "--resume", "limits.hours=53 ")
    assert [fact for fact in facts if fact not in first] == []
    assert limits.incidents(make_report(ending=Ending.FINISHED)) == ()


def write_stopped(run_dir: Path, **changes: float) -> None:
    write_attempt(run_dir, steps=[500])
    report = write_report(run_dir, Ending.STOPPED, step=500)
    codec.write(run_dir / "report.json", replace(report, history=(replace(report.history[0], **changes),)))


def test_a_spent_limit_is_refused_until_it_is_raised(tmp_path: Path):
    write_stopped(tmp_path, duration_s=10 * HOUR_S, num_ranks=4)
    spending.refuse_spent(tmp_path, plan(hours=11))
    codec.write(tmp_path / spending.SPENT_FILE, spending.SpentLimit(limit="limits.cost", allowed_hours=100))
    spending.refuse_spent(tmp_path, plan(hours=11))
    (tmp_path / spending.SPENT_FILE).unlink()
    for hours in (10, 9.5):
        with pytest.raises(InputError) as refused:
            spending.refuse_spent(tmp_path, plan(hours=hours))
    facts = (str(tmp_path), "9 h 30 min", "10 h 00 min", "step 500", "--resume", "limits.hours=21 ")
    assert [fact for fact in facts if fact not in str(refused.value)] == []
    assert refused.value.exit_code is ExitCode.INPUT
    spending.refuse_spent(tmp_path, plan(cost=101, price=2.5))
    with pytest.raises(InputError, match=r"limits\.cost.* 99,.*100\.00.*step 500"):
        spending.refuse_spent(tmp_path, plan(cost=99, price=2.5))


def test_the_limit_that_ended_a_run_is_spent_although_seconds_of_it_are_left(tmp_path: Path):
    write_stopped(tmp_path, duration_s=10 * HOUR_S - 20)
    spending.refuse_spent(tmp_path, plan(hours=10))
    dog = Watchdog(tmp_path / "attempts" / "1", num_ranks=1)
    watch_of(tmp_path, 0).stop_in_time(StopRequest(), dog, Console(io.StringIO()))
    with pytest.raises(InputError, match=r"limits\.hours.*9 h 59 min"):
        spending.refuse_spent(tmp_path, plan(hours=10))
    spending.refuse_spent(tmp_path, plan(hours=10.5))
    (tmp_path / spending.SPENT_FILE).write_text("{")
    spending.refuse_spent(tmp_path, plan(hours=10))


@pytest.mark.parametrize(("left_s", "stops"), [(1000, False), (40, True), (-5, True)])
def test_the_stop_comes_when_the_margin_is_all_that_is_left_which_is_short_of_a_short_job(tmp_path, left_s, stops):
    stop, printed, watchdog = StopRequest(), io.StringIO(), Watchdog(tmp_path, num_ranks=1)
    for job_s, margin_s in ((60, 6), (3600, spending.MAX_MARGIN_S)):
        deadline = spending.Deadline.in_seconds(job_s)
        assert deadline.margin_s == margin_s and deadline.moment_s == pytest.approx(time.monotonic() + job_s, abs=5)
    deadline = spending.Deadline(time.monotonic() + left_s, margin_s=45)
    for _ in range(2):
        deadline.stop_in_time(stop, watchdog, Console(printed))
    assert (stop.kind is StopKind.REQUEUE) is stops
    assert printed.getvalue().count("checkpoint") == stops
