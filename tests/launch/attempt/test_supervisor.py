"""The supervisor with stand-in launchers and ranks: real processes, real signals, no torch."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_plan_factory import engine_plan
from report_factory import make_report

from shardwise.launch.attempt import supervisor
from shardwise.launch.attempt.end import AttemptEnd
from shardwise.launch.attempt.supervisor import (
    LocalRanks,
    StopKind,
    StoppedEarlyError,
    StopRequest,
    watch_attempt,
    write_environment,
)
from shardwise.launch.attempt.watchdog import Watchdog, WatchLimits
from shardwise.launch.rundir.process_record import ProcessRecord, read_records, record_of, write_record
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.report import Ending, Fault, Report

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
    codec.write(folder / "plan.json", engine_plan(Sharding.NONE))
    return folder


def launcher_argv(attempt: Path, report: Report | None, *, seconds: float) -> list[str]:
    scratch = attempt.parent.parent
    path = ""
    if report is not None:
        codec.write(scratch / "report.json", report)
        path = str(scratch / "report.json")
    return [sys.executable, str(scratch / "launcher.py"), str(scratch / "rank.py"), str(attempt), path, str(seconds)]


def run(
    argv: list[str],
    attempt: Path,
    stop: StopRequest,
    on_tick=lambda: None,
    on_notice=print,
    limits: WatchLimits | None = None,
    num_ranks: int = 1,
) -> AttemptEnd:
    watchdog = Watchdog(attempt, num_ranks=num_ranks, limits=limits or WatchLimits())
    ranks = LocalRanks(argv, attempt_dir=attempt, environment=os.environ)
    return watch_attempt(ranks, attempt_dir=attempt, stop=stop, on_tick=on_tick, on_notice=on_notice, watchdog=watchdog)


def test_a_stop_request_reaches_ranks_in_their_own_session(attempt: Path):
    stop = StopRequest()
    stop.note(signal.SIGTERM, None)
    end = run(launcher_argv(attempt, make_report(ending=Ending.PREEMPTED), seconds=60), attempt, stop)
    assert end.report.ending is Ending.PREEMPTED and stop.kind is StopKind.REQUEUE


def test_a_rank_that_registers_after_a_stop_request_receives_it(attempt: Path):
    ranks = LocalRanks(["sleep", "60"], attempt_dir=attempt, environment=os.environ)
    sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        for rank, sleeper in enumerate(sleepers):
            record = record_of(sleeper.pid)
            assert record is not None
            write_record(attempt / "pids" / f"rank-{rank}.json", record)
            ranks.request_stop()
            assert sleeper.wait(timeout=30) == -signal.SIGUSR1
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
        ranks.end()


def test_a_second_interrupt_ends_everything_at_once(attempt: Path):
    stop = StopRequest()
    ranks: list[ProcessRecord] = []

    def press_twice() -> None:
        ranks[:] = read_records(attempt / "pids").values()
        if (attempt / "pids" / "rank-0.json").exists():
            stop.num_interrupts = 2
            stop.kind = StopKind.INTERRUPT

    end = run(launcher_argv(attempt, None, seconds=60), attempt, stop, press_twice)
    assert end.fault is Fault.KILLED and "second Ctrl-C" in (end.report.error or "")
    assert ranks and not any(rank.is_alive for rank in ranks)


# Two ranks of torchrun: one is killed as the kernel kills, the other loses it and reports what its library says.
KILLED_RANK = """
import os, pathlib, signal, sys, time
folder, report = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
dying = pathlib.Path(sys.argv[0]).with_suffix(".dying")
if os.environ["RANK"] == "1":
    dying.touch()
    os.kill(os.getpid(), getattr(signal, sys.argv[3]))
while not dying.exists():  # before the other is there, nobody has lost it
    time.sleep(0.05)
time.sleep(0.5)
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


def test_a_killed_rank_is_the_cause_in_spite_of_the_others_errors(attempt: Path):
    lost = make_report(ending=Ending.FAILED, error="RuntimeError: Connection closed by peer [127.0.0.1]:29500")
    end = run(torchrun_argv(attempt, "SIGKILL", report=lost), attempt, StopRequest(), num_ranks=2)
    assert end.fault is Fault.KILLED and end.report.ending is Ending.FAILED
    assert all(fact in (end.report.error or "") for fact in ("rank 1", "SIGKILL"))


def test_ranks_that_wait_for_one_out_of_memory_are_ended(attempt: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shardwise.launch.attempt.supervisor.END_GRACE_S", 0.3)
    argv = launcher_argv(attempt, None, seconds=60)

    def report_from_another_rank() -> None:
        if (attempt / "pids" / "rank-0.json").exists():
            codec.write(attempt / "report-rank-1.json", make_report(ending=Ending.OUT_OF_MEMORY))

    assert run(argv, attempt, StopRequest(), report_from_another_rank).fault is Fault.OUT_OF_MEMORY
    assert not read_records(attempt / "pids")["rank-0"].is_alive


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_anything_has_to_be_saved_breaks_off(number: signal.Signals):
    stop = StopRequest()
    with stop.listening():
        with pytest.raises(StoppedEarlyError), stop.raising():
            os.kill(os.getpid(), number)
            time.sleep(5)
        os.kill(os.getpid(), number)  # from here on it is only noted
    assert stop.kind is (StopKind.INTERRUPT if number == signal.SIGINT else StopKind.REQUEUE)


# Two ranks that give signs of life as the real ones do; the second stops in the forward of step 6.
SILENT_RANK = """
import os, pathlib, sys, time
from datetime import UTC, datetime
from shardwise.trainer.runtime.run import process
from shardwise.trainer.runtime.run.state import ReportWriter, run_paths
rank = int(os.environ["RANK"])
paths = run_paths(pathlib.Path(sys.argv[1]) / "plan.json", started_at=datetime.now(UTC))
process.dump_stacks_on_request()
process.redirect_output(paths.attempt_dir / "logs", rank=rank)
process.write_pid_record(paths.attempt_dir, rank=rank)
writer = ReportWriter(paths, rank=rank)

def all_reduce():
    while True:
        time.sleep(0.1)

def forward():
    while True:
        time.sleep(0.1)

for step in range(100):
    writer.beat("forward", step=step)
    if rank == 1 and step == 5:
        forward()
    writer.beat("backward", step=step)
    if step == 5:
        all_reduce()
    writer.beat("optimizer", step=step)
    writer.write_status("training", step=step + 1)
    time.sleep(0.6)
"""


def test_ranks_that_fall_silent_are_named_with_where_they_stand_and_ended(attempt: Path):
    program = attempt.parent.parent / "silent.py"
    program.write_text(SILENT_RANK)
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", str(program)]
    limits = WatchLimits(phase_s=60.0, least_step_s=6.0, times_usual_step=1.0)
    end = run([*argv, str(attempt)], attempt, StopRequest(), limits=limits, num_ranks=2)
    assert end.fault is Fault.HUNG and end.report.step == 5 and end.report.ending is Ending.FAILED
    error = end.report.error or ""
    assert error.startswith("rank 1 ") and "forward of step 6" in error and "forward (silent.py, line " in error
    assert "Current thread" in (attempt / "logs" / "rank-0.log").read_text(), "every rank says where it is"
    assert not any(record.is_alive for record in read_records(attempt / "pids").values())


SUPERVISOR = """
import os, sys
from pathlib import Path
from shardwise.launch.attempt.supervisor import LocalRanks
from shardwise.launch.attempt.supervisor import StopRequest, watch_attempt
from shardwise.launch.attempt.watchdog import Watchdog
folder, stop = Path(sys.argv[1]), StopRequest()
watchdog = Watchdog(folder, num_ranks=1)
ranks = LocalRanks(sys.argv[2:], attempt_dir=folder, environment=os.environ)
watch_attempt(ranks, attempt_dir=folder, stop=stop, on_tick=lambda: None, on_notice=print, watchdog=watchdog)
"""


def test_killing_the_supervisor_kills_the_launcher(attempt: Path):
    argv = launcher_argv(attempt, None, seconds=60)
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(attempt), *argv])
    deadline = time.monotonic() + 60
    while not (attempt / "pids" / "launcher.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    launcher = read_records(attempt / "pids")["launcher"]
    assert launcher.is_alive
    supervisor.kill()
    supervisor.wait()
    deadline = time.monotonic() + 60
    while launcher.is_alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not launcher.is_alive
    rank = read_records(attempt / "pids").get("rank-0")
    if rank is not None:  # the stand-in rank does not ask to die with its launcher; the real one does (end to end)
        rank.send(signal.SIGKILL)


def test_a_launcher_or_a_rank_that_is_stopped_is_named_with_the_command_that_continues_it(attempt: Path, monkeypatch):
    monkeypatch.setattr(supervisor, "STOPPED_S", 0.3)
    notices: list[str] = []

    def stop_both() -> None:
        records = read_records(attempt / "pids")
        if not notices and records.keys() >= {"launcher", "rank-0"}:
            for name in ("launcher", "rank-0"):
                records[name].send(signal.SIGSTOP)

    def continue_it(notice: str) -> None:
        notices.append(notice)
        os.kill(int(notice.partition("-CONT ")[2].split()[0]), signal.SIGCONT)

    argv = launcher_argv(attempt, make_report(ending=Ending.FINISHED), seconds=3)
    end = run(argv, attempt, StopRequest(), stop_both, continue_it)
    assert end.report.ending is Ending.FINISHED
    assert {notice.partition(" is stopped")[0] for notice in notices} == {"the launcher", "rank 0"}


def test_the_launcher_ignores_signals_of_a_terminal(attempt: Path):
    """INT and USR1 to the launcher's group leave the attempt running."""
    disturbed = []

    def disturb() -> None:
        launcher = read_records(attempt / "pids").get("launcher")
        if launcher is not None and launcher.is_alive:
            os.killpg(launcher.pid, signal.SIGINT)
            os.killpg(launcher.pid, signal.SIGUSR1)
            disturbed.append(launcher.pid)

    argv = launcher_argv(attempt, make_report(), seconds=1.0)
    assert run(argv, attempt, StopRequest(), disturb).report.ending is Ending.FINISHED
    assert disturbed


ENVIRONMENT_OF_RANKS = {
    "SLURM_JOB_ID": "7",
    "NCCL_SOCKET_IFNAME": "ib0",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "PATH": "/bin",
    "https_proxy": "http://me:swordfish-9@proxy:3128",
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz",
    "WANDB_API_KEY": "1234",
    "SLURM_JWT_TOKEN": "abc",
    "MY_DIARY": "private",
    "LS_COLORS": "rs=0",
    "SHARDWISE_CACHE": "/scratch/canary-canary/x",
    "BACKUP_PASSWORD": "canary-canary",
}


def test_variables_that_ranks_connect_by_are_recorded_without_secrets(tmp_path: Path):
    write_environment(tmp_path, ENVIRONMENT_OF_RANKS, node_rank=1)
    text = (tmp_path / "environment-1.json").read_text()
    for secret in ("swordfish", "hf_abc", "canary", "1234", "abc"):
        assert secret not in text
    variables = json.loads(text)["variables"]
    assert list(variables) == [
        "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "PATH", "SHARDWISE_CACHE", "SLURM_JOB_ID", "https_proxy",
    ]  # fmt: skip
    assert variables["https_proxy"] == "http://[redacted]@proxy:3128" and variables["SLURM_JOB_ID"] == "7"
