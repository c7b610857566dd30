"""The supervisor with stand-in launchers and ranks: real processes, real signals, no torch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from report_factory import make_report

from launch.process_record import read_records
from launch.supervisor import (
    AttemptCutShortError,
    StopKind,
    StopRequest,
    collect_report,
    killed_rank,
    last_words,
    run_attempt,
)
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.report import Ending, Report

# A rank registers, waits for USR1, and then writes the report it was given; its launcher gives it its own session.
RANK = """
import json, os, pathlib, signal, sys, time
folder, report = pathlib.Path(sys.argv[1]), sys.argv[2]
flag = []
signal.signal(signal.SIGUSR1, lambda *_: flag.append(1))
(folder / "pids").mkdir(exist_ok=True)
start = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
(folder / "pids" / "rank-0.json").write_text(json.dumps({"pid": os.getpid(), "start_time": start}))
deadline = time.monotonic() + float(sys.argv[3])
while not flag and time.monotonic() < deadline:
    time.sleep(0.02)
if report and (flag or float(sys.argv[3]) < 5):
    (folder / "report.json").write_text(pathlib.Path(report).read_text())
"""
LAUNCHER = """
import subprocess, sys
sys.exit(subprocess.Popen([sys.executable, *sys.argv[1:]], start_new_session=True).wait())
"""


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    folder = tmp_path / "attempts" / "1"
    folder.mkdir(parents=True)
    return folder


def launcher_argv(attempt: Path, report: Report | None, *, seconds: float) -> list[str]:
    scratch = attempt.parent.parent
    path = ""
    if report is not None:
        codec.write(scratch / "report.json", report)
        path = str(scratch / "report.json")
    return [sys.executable, str(scratch / "launcher.py"), str(scratch / "rank.py"), str(attempt), path, str(seconds)]


def run(argv: list[str], attempt: Path, stop: StopRequest, on_tick=lambda: None) -> Report:
    return run_attempt(argv, attempt_dir=attempt, environment=os.environ, stop=stop, on_tick=on_tick)


def test_an_attempt_returns_the_report_of_its_ranks(attempt: Path):
    assert run(launcher_argv(attempt, make_report(), seconds=0.1), attempt, StopRequest()) == make_report()


def test_a_stop_request_reaches_ranks_in_their_own_session(attempt: Path):
    stop = StopRequest()
    stop.note(signal.SIGTERM, None)
    report = run(launcher_argv(attempt, make_report(ending=Ending.STOPPED), seconds=60), attempt, stop)
    assert report.ending is Ending.STOPPED and stop.kind is StopKind.REQUEUE


def test_a_second_interrupt_ends_everything_at_once(attempt: Path):
    stop = StopRequest()
    ranks = []

    def press_twice() -> None:
        ranks[:] = read_records(attempt / "pids").values()
        if (attempt / "pids" / "rank-0.json").exists():
            stop.num_interrupts = 2
            stop.kind = StopKind.INTERRUPT

    with pytest.raises(AttemptCutShortError, match="nothing was trained"):
        run(launcher_argv(attempt, None, seconds=60), attempt, stop, press_twice)
    assert ranks and not any(rank.is_alive for rank in ranks)


def test_a_rank_that_leaves_no_report_is_a_failed_run_with_its_last_words(attempt: Path):
    (attempt / "logs").mkdir()
    (attempt / "logs" / "rank-0.log").write_text("starting\nValueError: the sky fell\nbye\n")
    with pytest.raises(EnvironmentFaultError, match="ValueError: the sky fell"):
        run(launcher_argv(attempt, None, seconds=0.1), attempt, StopRequest())


def test_out_of_memory_on_one_rank_outweighs_the_failure_it_causes_on_another(attempt: Path):
    codec.write(attempt / "report.json", make_report(ending=Ending.FAILED))
    codec.write(attempt / "report-rank-1.json", make_report(ending=Ending.OUT_OF_MEMORY))
    assert collect_report(attempt, 1, StopRequest()).ending is Ending.OUT_OF_MEMORY


# Two ranks of torchrun: one is killed as the kernel kills, the other loses it and reports what its library says.
KILLED_RANK = """
import os, pathlib, signal, sys, time
folder, report = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), getattr(signal, sys.argv[3]))
if report.name != "none":
    (folder / "report.json").write_text(report.read_text())
    sys.exit(1)
time.sleep(60)
"""


def torchrun_argv(attempt: Path, signal_name: str, *, report: Report | None) -> list[str]:
    scratch = attempt.parent.parent
    (scratch / "killed.py").write_text(KILLED_RANK)
    path = scratch / ("none" if report is None else "report.json")
    if report is not None:
        codec.write(path, report)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    return [*torchrun, str(scratch / "killed.py"), str(attempt), str(path), signal_name]


def test_a_rank_that_the_kernel_killed_is_the_reason_and_not_what_the_others_say_of_it(attempt: Path):
    lost = make_report(ending=Ending.FAILED, error="RuntimeError: Connection closed by peer [127.0.0.1]:29500")
    report = run(torchrun_argv(attempt, "SIGKILL", report=lost), attempt, StopRequest())
    assert report.ending is Ending.FAILED
    assert report.error == "rank 1 was killed by SIGKILL, often out of host memory"


def test_a_killed_rank_is_named_where_no_rank_could_report(attempt: Path):
    with pytest.raises(EnvironmentFaultError, match=r"the run failed: rank 1 was killed by SIGSEGV\nlast words: "):
        run(torchrun_argv(attempt, "SIGSEGV", report=None), attempt, StopRequest())


def test_a_lone_rank_that_was_killed_is_named(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    words = "subprocess.CalledProcessError: Command '[...]' died with <Signals.SIGKILL: 9>."
    (tmp_path / "logs" / "launcher.log").write_text(words)
    assert killed_rank(tmp_path) == "rank 0 was killed by SIGKILL, often out of host memory"


def test_a_rank_that_failed_by_itself_was_not_killed(attempt: Path):
    (attempt / "logs").mkdir()
    (attempt / "logs" / "launcher.log").write_text("  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 7)\n")
    failed = make_report(ending=Ending.FAILED, error="ValueError: the sky fell")
    codec.write(attempt / "report.json", failed)
    assert collect_report(attempt, 1, StopRequest()) == failed


def test_a_damaged_report_is_passed_over(attempt: Path):
    (attempt / "report.json").write_text('{"ending": ')
    with pytest.raises(EnvironmentFaultError, match="no rank left a report"):
        collect_report(attempt, 3, StopRequest())


def test_ranks_that_wait_for_one_out_of_memory_are_ended(attempt: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("launch.supervisor.OOM_GRACE_S", 0.3)
    argv = launcher_argv(attempt, None, seconds=60)

    def report_from_another_rank() -> None:
        if (attempt / "pids" / "rank-0.json").exists():
            codec.write(attempt / "report-rank-1.json", make_report(ending=Ending.OUT_OF_MEMORY))

    assert run(argv, attempt, StopRequest(), report_from_another_rank).ending is Ending.OUT_OF_MEMORY
    assert not read_records(attempt / "pids")["rank-0"].is_alive


def test_a_program_that_does_not_exist_is_an_environment_fault(attempt: Path):
    with pytest.raises(EnvironmentFaultError, match="cannot be started"):
        run(["/nowhere/python"], attempt, StopRequest())


def test_last_words_without_any_output(tmp_path: Path):
    assert last_words(tmp_path) == "(no output)"


def test_signals_are_noted_and_the_handlers_given_back():
    before = signal.getsignal(signal.SIGUSR1)
    stop = StopRequest()
    with stop.listening():
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.kind is StopKind.REQUEUE and not stop.is_urgent
    assert signal.getsignal(signal.SIGUSR1) is before


SUPERVISOR = """
import os, sys
from pathlib import Path
from launch.supervisor import StopRequest, run_attempt
folder, stop = Path(sys.argv[1]), StopRequest()
run_attempt(sys.argv[2:], attempt_dir=folder, environment=os.environ, stop=stop, on_tick=lambda: None)
"""


def test_killing_the_supervisor_kills_the_launcher(attempt: Path):
    argv = launcher_argv(attempt, None, seconds=60)
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(attempt), *argv])
    deadline = time.monotonic() + 30
    while not (attempt / "pids" / "launcher.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    launcher = read_records(attempt / "pids")["launcher"]
    assert launcher.is_alive
    supervisor.kill()
    supervisor.wait()
    deadline = time.monotonic() + 10
    while launcher.is_alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not launcher.is_alive
    rank = read_records(attempt / "pids").get("rank-0")
    if rank is not None:  # the stand-in rank does not ask to die with its launcher; the real one does (end to end)
        rank.send(signal.SIGKILL)


def test_the_launcher_ignores_what_a_terminal_sends(attempt: Path):
    """INT and USR1 to the launcher's group leave the attempt running."""
    disturbed = []

    def disturb() -> None:
        launcher = read_records(attempt / "pids").get("launcher")
        if launcher is not None and launcher.is_alive:
            os.killpg(launcher.pid, signal.SIGINT)
            os.killpg(launcher.pid, signal.SIGUSR1)
            disturbed.append(launcher.pid)

    argv = launcher_argv(attempt, make_report(), seconds=1.0)
    assert run(argv, attempt, StopRequest(), disturb).ending is Ending.FINISHED
    assert disturbed
