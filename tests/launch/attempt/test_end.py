"""The files of an attempt give one cause of its end, whatever else is true at once."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from engine_plan_factory import engine_plan
from msgspec.structs import replace
from report_factory import make_report

from shardwise.launch.attempt.end import AttemptEnd, Observed, attempt_end, killed_rank
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.report import Ending, Fault

ENDED = "failed (exitcode: {code}) local_rank: 1 (pid: 77) of binary: python"
CLOSED = "RuntimeError: Connection closed by peer"


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    codec.write(tmp_path / "plan.json", engine_plan(Sharding.DDP, num_ranks=2))
    return tmp_path


def write_report(attempt: Path, rank: int, *, age_s: int = 0, **changes: object) -> None:
    path = attempt / ("report.json" if rank == 0 else f"report-rank-{rank}.json")
    codec.write(path, make_report(**changes))
    os.utime(path, (1_000_000 - age_s, 1_000_000 - age_s))


def end_of(attempt: Path, *, return_code: int = 1, **seen: Any) -> AttemptEnd:
    return attempt_end(attempt, Observed(return_code, **seen))


def write_log(attempt: Path, name: str, words: str) -> None:
    (attempt / "logs" / f"{name}.log").write_text(words)


def test_a_rank_without_a_whole_report_fails_the_run_with_its_last_line(attempt: Path):
    (attempt / "report.json").write_text('{"ending": ')
    assert "code 3" in (end_of(attempt, return_code=3).report.error or "")
    write_log(attempt, "rank-0", "starting\nValueError: the sky fell\nbye\n")
    end = end_of(attempt)
    assert end.fault is Fault.ERROR and not end.has_trained and not end.has_report
    assert "ValueError: the sky fell" in (end.report.error or "")
    assert (end.report.ending, end.report.plan.num_ranks, end.report.num_steps) == (Ending.FAILED, 2, 2)


def test_out_of_memory_on_one_rank_outweighs_the_failure_it_causes_on_another(attempt: Path):
    write_report(attempt, 0, ending=Ending.FAILED, age_s=5)
    write_report(attempt, 1, ending=Ending.OUT_OF_MEMORY)
    assert end_of(attempt).fault is Fault.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("number", "kills", "words", "fault", "fact"),
    [
        (9, 0, "", Fault.KILLED, "SIGKILL"),
        (9, 1, "", Fault.HOST_OUT_OF_MEMORY, "host memory"),
        (6, 0, "what():  std::bad_alloc", Fault.OUT_OF_MEMORY, "memory"),
        (6, 0, "memory allocation of 12345 bytes failed", Fault.OUT_OF_MEMORY, "memory"),
        (6, 0, "Assertion `x' failed", Fault.KILLED, "SIGABRT"),
    ],
)
def test_a_signal_is_out_of_memory_only_with_evidence(attempt: Path, number, kills, words, fault, fact):
    write_log(attempt, "launcher", ENDED.format(code=-number))
    write_log(attempt, "rank-1", words)
    write_report(attempt, 0, ending=Ending.FAILED, error=CLOSED)
    end = end_of(attempt, num_oom_kills=kills)
    assert end.fault is fault and "rank 1" in (end.report.error or "") and fact in (end.report.error or "")
    assert end.report.ending is (Ending.OUT_OF_MEMORY if fault.is_memory else Ending.FAILED)
    assert not end.is_final, "a signal may not come again"


def test_the_cause_is_the_error_that_was_reported_first_and_the_rest_is_rank_0s_who_measures(attempt: Path):
    write_report(attempt, 0, ending=Ending.FAILED, error=CLOSED, exit_code=1, step=9)
    write_report(attempt, 1, ending=Ending.FAILED, error="ValueError: injected", exit_code=1, age_s=2)
    report = end_of(attempt).report
    assert (report.error, report.step) == ("rank 1: ValueError: injected", 9)


@pytest.mark.parametrize(
    ("exit_code", "step", "error", "expected"),
    [
        (1, 3, "ValueError: injected", (False, False, False)),  # before the first step of this attempt
        (1, 3, "DistNetworkError: The server socket has failed to listen", (False, False, True)),
        (2, 5, "extensions: loss raised ValueError", (True, True, False)),
    ],
)
def test_an_error_is_final_where_a_person_has_to_mend_it(attempt: Path, exit_code, step, error, expected):
    write_report(attempt, 0, ending=Ending.FAILED, error=error, exit_code=exit_code, step=step, resumed_from_step=3)
    end = end_of(attempt)
    assert (end.is_final, end.has_trained, end.is_transient) == expected


@pytest.mark.parametrize("cap", [2**20, None])
def test_a_rank_that_may_start_no_thread_is_out_of_memory_under_a_cap_alone(attempt: Path, cap):
    plan = engine_plan(Sharding.DDP, num_ranks=2)
    codec.write(attempt / "plan.json", replace(plan, hardware=replace(plan.hardware, vram_cap_bytes=cap)))
    write_log(attempt, "launcher", ENDED.format(code=1))
    write_log(attempt, "rank-1", "libgomp: Thread creation failed: Resource temporarily unavailable")
    write_report(attempt, 0, ending=Ending.FAILED, error=CLOSED)
    end = end_of(attempt, step=4)
    assert end.fault is (Fault.OUT_OF_MEMORY if cap else Fault.ERROR)
    assert cap or re.match("rank 1 ended with code 1.*libgomp", end.report.error or "", re.DOTALL)


def test_a_launcher_that_was_killed_or_a_machine_that_was_lost_is_no_rank_that_failed(attempt: Path):
    end = end_of(attempt, return_code=-9, step=2)
    assert (end.fault, end.report.step) == (Fault.KILLED, 2)
    assert "launcher" in (end.report.error or "") and "SIGKILL" in (end.report.error or "")
    write_report(attempt, 0, ending=Ending.FAILED, error=CLOSED)
    end = end_of(attempt, lost="n2 (node 1) was lost")
    assert (end.is_machine_lost, end.fault, end.report.error) == (True, Fault.KILLED, "n2 (node 1) was lost")
    end = end_of(attempt, hung="rank 1 hung", lost="n2 (node 1) was lost")
    assert (end.fault, end.report.error) == (Fault.HUNG, "rank 1 hung"), "also if its silence outlasts its machine"


@pytest.mark.parametrize(
    ("words", "killed"),
    [
        ("CalledProcessError: Command '[...]' died with <Signals.SIGKILL: 9>.", (0, signal.SIGKILL)),
        ("  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 7)\n", None),
        (
            "Sending process 77 closing signal SIGTERM\n  rank : 1 (local_rank: 1)\n  exitcode : -15 (pid: 77)\n"
            "  rank      : 0 (local_rank: 0)\n  exitcode  : -11 (pid: 76)\n",
            (0, signal.SIGSEGV),
        ),
    ],
)
def test_the_killed_rank_is_the_one_that_the_launcher_did_not_end(attempt: Path, words: str, killed):
    write_log(attempt, "launcher", words)
    assert killed_rank(attempt) == killed


def test_a_lost_rank_is_killed_whatever_the_launcher_says(attempt: Path):
    """Of ranks that a signal ended, the cause is one that was gone before the supervisor killed the others."""
    end = end_of(attempt, return_code=None, lost_ranks=(1,))
    assert (end.fault, end.is_final) == (Fault.KILLED, False)
    assert "rank 1 ended without a report" in str(end.report.error)
    listed = "  rank      : {0} (local_rank: {0})\n  exitcode  : -{1} (pid: 7{0})\n"
    write_log(attempt, "launcher", listed.format(0, 9) + listed.format(1, 9))
    end = end_of(attempt, lost_ranks=(1,), num_oom_kills=1)
    assert end.fault is Fault.HOST_OUT_OF_MEMORY
    assert end.report.error == "the kernel killed rank 1 for lack of host memory"


def test_a_rank_that_exited_is_the_cause_also_where_the_launcher_saw_another_fail_first(attempt: Path):
    """torchrun looks every tenth of a second, and names the lowest of those that failed meanwhile."""
    listed = "  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 7{rank})\n"
    words = "failed (exitcode: 1) local_rank: 0 (pid: 70) of binary: python\n" + listed.format(rank=1, code=3)
    write_log(attempt, "launcher", words + listed.format(rank=0, code=1))
    write_report(attempt, 0, ending=Ending.FAILED, error=CLOSED)
    error = end_of(attempt).report.error or ""
    assert "rank 1" in error and "code 3" in error


@pytest.mark.parametrize(("code", "fault", "fact"), [(-9, Fault.KILLED, "SIGKILL"), (3, Fault.ERROR, "code 3")])
def test_of_several_machines_each_launcher_counts_its_own_ranks_from_0(attempt: Path, code, fault, fact):
    codec.write(attempt / "plan.json", engine_plan(Sharding.DDP, num_ranks=4))
    write_log(attempt, "launcher", "")
    write_log(attempt, "launcher-1", ENDED.format(code=code))
    end = end_of(attempt)
    assert end.fault is fault and "rank 3" in (end.report.error or "") and fact in (end.report.error or "")
