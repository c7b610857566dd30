"""The supervisor with stand-in launchers and ranks: real processes, real signals, no torch."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from engine_plan_factory import engine_plan
from network_factory import needs_own_network, without_loopback
from report_factory import make_report

from shardwise.launch.attempt import supervisor as supervision
from shardwise.launch.attempt.end import AttemptEnd
from shardwise.launch.attempt.supervisor import StopKind, StopRequest
from shardwise.launch.attempt.watchdog import Watchdog, WatchLimits
from shardwise.launch.rundir.process_record import read_records, record_of, write_record
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.messages.rank_files import Heartbeat, encode_heartbeat, heartbeat_path
from shardwise.trainer.spec.report import Ending, Fault, Report

# A rank registers, waits for USR1, and then writes the report it was given; its launcher gives it its own session.
RANK = """
import faulthandler, json, os, pathlib, signal, sys, time
folder, report = pathlib.Path(sys.argv[1]), sys.argv[2]
flag = []
signal.signal(signal.SIGUSR1, lambda *_: flag.append(1))
faulthandler.register(signal.SIGUSR2, (folder / "logs" / "rank-0.log").open("w"))
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


def run(
    attempt: Path, report: Report | None, *, seconds: float = 60, stop: StopRequest | None = None,
    on_tick: Callable[[], None] = lambda: None, on_notice: Callable[[str], None] = print,
    watchdog: Watchdog | None = None, argv: Sequence[str] = (),
) -> AttemptEnd:  # fmt: skip
    """The end of an attempt whose rank runs so many seconds, and then writes this report; or of this launcher."""
    scratch = attempt.parent.parent
    path = "" if report is None else str(scratch / "report.json")
    if report is not None:
        codec.write(scratch / "report.json", report)
    usual = [sys.executable, *map(str, (scratch / "launcher.py", scratch / "rank.py", attempt, path, seconds))]
    ranks = supervision.LocalRanks([*argv] or usual, attempt_dir=attempt, environment=os.environ)
    return supervision.watch_attempt(
        ranks, attempt_dir=attempt, stop=stop or StopRequest(), on_tick=on_tick, on_notice=on_notice,
        watchdog=watchdog or Watchdog(attempt, num_ranks=1),
    )  # fmt: skip


def test_a_stop_request_reaches_ranks_in_their_own_session(attempt: Path):
    stop = StopRequest()
    stop.note(signal.SIGTERM, None)
    end = run(attempt, make_report(ending=Ending.PREEMPTED), stop=stop)
    assert end.report.ending is Ending.PREEMPTED and stop.kind is StopKind.REQUEUE


def test_a_rank_that_registers_after_a_stop_request_receives_it(attempt: Path):
    ranks = supervision.LocalRanks(["sleep", "60"], attempt_dir=attempt, environment=os.environ)
    for rank in range(2):
        with subprocess.Popen(["sleep", "60"]) as sleeper:
            record = record_of(sleeper.pid)
            assert record is not None
            write_record(attempt / "pids" / f"rank-{rank}.json", record)
            ranks.request_stop()
            assert sleeper.wait(timeout=30) == -signal.SIGUSR1
    ranks.end()


def test_ranks_that_wait_for_one_out_of_memory_are_ended(attempt: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shardwise.launch.attempt.supervisor.END_GRACE_S", 0.3)

    def report_from_another_rank() -> None:
        if (attempt / "pids" / "rank-0.json").exists():
            codec.write(attempt / "report-rank-1.json", make_report(ending=Ending.OUT_OF_MEMORY))

    assert run(attempt, None, on_tick=report_from_another_rank).fault is Fault.OUT_OF_MEMORY
    assert not read_records(attempt / "pids")["rank-0"].is_alive


# Two ranks of torchrun: the one named first kills itself, and the other does not react to TERM, as in a collective.
PAIR = """
import json, os, pathlib, signal, sys, time
folder, killed, rank = pathlib.Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: None)
start = int(pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
(folder / f"rank-{rank}.json").write_text(json.dumps({"pid": os.getpid(), "start_time": start}))
while len(list(folder.glob("rank-*.json"))) < 2:
    time.sleep(0.02)
if rank == killed:
    os.kill(os.getpid(), int(sys.argv[3]))
time.sleep(60)
"""


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (1, signal.SIGSEGV)])
def test_a_lost_rank_is_named_with_its_signal_though_another_does_not_react(
    attempt: Path, monkeypatch: pytest.MonkeyPatch, rank: int, number: signal.Signals
):
    monkeypatch.setattr("shardwise.launch.attempt.supervisor.END_GRACE_S", 0.5)
    script = attempt.parent.parent / "pair.py"
    script.write_text(PAIR)
    (attempt / "pids").mkdir()
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    argv += map(str, (script, attempt / "pids", rank, int(number)))
    end = run(attempt, None, argv=argv, watchdog=Watchdog(attempt, num_ranks=2))
    assert (end.fault, end.report.error) == (Fault.KILLED, f"rank {rank} was killed by {number.name}")
    assert not any(record.is_alive for record in read_records(attempt / "pids").values())


def test_a_rank_that_falls_silent_is_named_with_where_it_stands_and_ended(attempt: Path):
    now = [0.0]

    def pass_time() -> None:
        if (attempt / "pids" / "rank-0.json").exists():
            now[0] += 4.0

    path = heartbeat_path(attempt, 0)
    path.parent.mkdir()
    path.write_bytes(encode_heartbeat(Heartbeat(step=6, count=1, phase="forward")))
    watchdog = Watchdog(attempt, num_ranks=1, limits=WatchLimits(phase_s=10), clock=lambda: now[0])
    end = run(attempt, None, on_tick=pass_time, watchdog=watchdog)
    error = end.report.error or ""
    assert (end.fault, end.report.step) == (Fault.HUNG, 6)
    assert error.startswith("rank 0 ") and "forward of step 7" in error and "(rank.py, line " in error
    assert not read_records(attempt / "pids")["rank-0"].is_alive


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_anything_has_to_be_saved_breaks_off(number: signal.Signals):
    stop = StopRequest()
    with stop.listening():
        with pytest.raises(supervision.StoppedEarlyError), stop.raising():
            os.kill(os.getpid(), number)
            time.sleep(5)
        os.kill(os.getpid(), number)  # from here on it is only noted
    assert stop.kind is (StopKind.INTERRUPT if number == signal.SIGINT else StopKind.REQUEUE)


def test_the_launcher_ignores_signals_of_a_terminal(attempt: Path):
    disturbed: list[int] = []

    def disturb() -> None:
        launcher = read_records(attempt / "pids").get("launcher")
        if launcher is not None and launcher.is_alive:
            os.killpg(launcher.pid, signal.SIGINT)
            os.killpg(launcher.pid, signal.SIGUSR1)
            disturbed.append(launcher.pid)

    assert run(attempt, make_report(), seconds=1.0, on_tick=disturb).report.ending is Ending.FINISHED
    assert disturbed


ENVIRONMENT_OF_RANKS = {
    "SLURM_JOB_ID": "7", "NCCL_SOCKET_IFNAME": "ib0", "CUDA_VISIBLE_DEVICES": "0,1", "PATH": "/bin",
    "https_proxy": "http://me:swordfish-9@proxy:3128", "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz",
    "WANDB_API_KEY": "1234", "SLURM_JWT_TOKEN": "abc", "MY_DIARY": "private", "LS_COLORS": "rs=0",
    "SHARDWISE_CACHE": "/scratch/canary-canary/x", "BACKUP_PASSWORD": "canary-canary",
}  # fmt: skip


def test_variables_that_ranks_connect_by_are_recorded_without_secrets(tmp_path: Path):
    supervision.write_environment(tmp_path, ENVIRONMENT_OF_RANKS, node_rank=1)
    text = (tmp_path / "environment-1.json").read_text()
    assert re.search("swordfish|hf_abc|canary|1234|abc", text) is None
    variables = json.loads(text)["variables"]
    names = "CUDA_VISIBLE_DEVICES NCCL_SOCKET_IFNAME PATH SHARDWISE_CACHE SLURM_JOB_ID https_proxy"
    assert list(variables) == names.split() and variables["SLURM_JOB_ID"] == "7"
    assert variables["https_proxy"] == "http://[redacted]@proxy:3128"


def test_a_launcher_or_a_rank_that_is_stopped_is_named_with_the_command_that_continues_it(attempt: Path, monkeypatch):
    monkeypatch.setattr(supervision, "STOPPED_S", 0.3)
    notices: list[str] = []

    def stop_both() -> None:
        records = read_records(attempt / "pids")
        if not notices and records.keys() >= {"launcher", "rank-0"}:
            for name in ("launcher", "rank-0"):
                records[name].send(signal.SIGSTOP)

    def continue_it(notice: str) -> None:
        notices.append(notice)
        os.kill(int(notice.partition("-CONT ")[2].split()[0]), signal.SIGCONT)

    end = run(attempt, make_report(ending=Ending.FINISHED), seconds=3, on_tick=stop_both, on_notice=continue_it)
    assert end.report.ending is Ending.FINISHED
    assert {notice.partition(" is stopped")[0] for notice in notices} == {"the launcher", "rank 0"}


PRINTING = """
import os, sys
from shardwise.launch.attempt import supervisor
from shardwise.trainer.spec.secrets import redacted_output

supervisor.UNREAD_S = 0.3
stop = supervisor.StopRequest()
with redacted_output(), stop.listening():
    while stop.kind is None:
        print("x" * 1000, flush=True)
    print("the end", flush=True)
sys.exit(75)
"""


def _context_switches(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


@pytest.mark.cold
def test_a_supervisor_whose_output_is_not_read_ends_at_term():
    with subprocess.Popen([sys.executable, "-c", PRINTING], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)  # the handlers are there
        before = -1
        while before != (before := _context_switches(process.pid)):  # until it waits in its write
            time.sleep(0.3)
        process.terminate()
        assert process.wait(timeout=60) == 75


@needs_own_network
@pytest.mark.parametrize(
    ("sharding", "ranks", "names"),
    [
        (Sharding.DDP, range(2), "ranks 0 to 1 cannot reach each other"),
        (Sharding.FSDP, range(6, 8), "ranks 6 to 7 cannot reach each other"),
        (Sharding.ZERO3, range(1), "rank 0 cannot reach its launcher"),
        (Sharding.NONE, range(1), None),
    ],
)
def test_a_loopback_that_is_down_is_named_before_the_ranks_start(sharding: Sharding, ranks: range, names: str | None):
    plan = engine_plan(sharding, num_ranks=ranks.stop)
    supervision.check_loopback(plan, ranks)
    if names is None:
        without_loopback(lambda: supervision.check_loopback(plan, ranks))
        return
    with pytest.raises(EnvironmentFaultError) as raised:
        without_loopback(lambda: supervision.check_loopback(plan, ranks))
    first, remedy = str(raised.value).splitlines()
    assert first.startswith(names) and "127.0.0.1" in first
    assert remedy == "sudo ip link set lo up"
