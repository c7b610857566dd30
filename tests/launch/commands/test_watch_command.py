"""`shardwise watch` from files alone: runs that wait, run, ended, are broken, or are not there."""

import fcntl
import io
import json
import os
from pathlib import Path

import pytest
from run_factory import metrics_row, write_attempt, write_holder, write_report, write_start, write_submission
from small_terminal import SmallTerminal

from shardwise.launch.commands.follow import run_watch
from shardwise.launch.options import WatchOptions
from shardwise.launch.rundir.lock import LOCK
from shardwise.launch.rundir.state import RunState
from shardwise.launch.show.follow import FOREIGN_SETTLE_S, Look, WatchedRun
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.report import Ending

NO_SLURM = {"PATH": "/nonexistent"}


def watch(run_dir: Path | str, *, once: bool = False, as_json: bool = False) -> str:
    out = io.StringIO()
    options = WatchOptions(str(run_dir), once=once, as_json=as_json)
    code = run_watch(options, Console(out), environment=NO_SLURM, look_s=0.01, settle_s=0.05)
    assert code is ExitCode.DONE
    return out.getvalue()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("runs/one")


@pytest.fixture
def held(run_dir: Path):
    """A run that this process supervises, as far as anybody can tell."""
    run_dir.mkdir(parents=True)
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.write(descriptor, f"{os.getpid()} {os.uname().nodename}\n".encode())
    yield run_dir
    os.close(descriptor)


def test_a_run_that_goes_on_is_followed_through_its_attempts(held: Path):
    """Each look finds what came since the one before."""
    clock = iter(range(1000))
    run = WatchedRun(held, environment=NO_SLURM, clock=lambda: float(next(clock)))
    assert run.look().view.state == "starting" and not run.look().has_ended
    folder = write_attempt(held, 1, steps=[1, 2])
    look = run.look()
    assert (look.view.state, look.view.step, len(look.rows)) == ("training", 2, 2)
    (folder / "status.json").write_text('{"phase": "evaluating", "step": 2}')
    assert run.look().view.state == "evaluating"
    write_report(held, Ending.FAILED, attempt=1, step=2, incidents=("rank 0 was killed; the same again",))
    look = run.look()
    assert look.view.state == "between attempts: failed" and not look.has_ended
    write_attempt(held, 2, steps=[2, 3])
    look = run.look()
    assert (look.view.state, look.view.step, look.view.attempt) == ("training", 3, 2)
    assert look.view.incidents == ("rank 0 was killed; the same again",)
    assert [point.step for point in look.view.curve] == [1, 2, 3]
    write_report(held, Ending.FINISHED, attempt=2, step=3)
    look = run.look()
    assert look.view.state == "ending" and not look.has_ended, "whoever supervises it is still there"
    (held / LOCK).unlink()
    assert run.look().has_ended


def test_a_run_that_another_machine_supervises_is_watched_until_its_report_stays(run_dir: Path):
    """Nobody here can see the time between two of its attempts."""
    now = [0.0]
    run = WatchedRun(run_dir, environment=NO_SLURM, clock=lambda: now[0])
    write_attempt(run_dir, 1, steps=[1])
    write_holder(run_dir, 5, "n3")
    look = run.look()
    assert (look.judged.state, look.view.state, look.has_ended) == (RunState.UNKNOWN, "training", False)
    now[0] += 1000
    assert not run.look().has_ended, "nobody can tell"
    write_report(run_dir, Ending.FAILED, attempt=1, step=1)
    assert not run.look().has_ended
    now[0] += FOREIGN_SETTLE_S - 1
    assert not run.look().has_ended
    write_attempt(run_dir, 2, steps=[2])
    assert run.look().judged.state is RunState.UNKNOWN
    write_report(run_dir, Ending.FAILED, attempt=2, step=2)
    assert not run.look().has_ended
    now[0] += FOREIGN_SETTLE_S - 1
    write_attempt(run_dir, 3, steps=[3])
    write_report(run_dir, Ending.FAILED, attempt=3, step=3)
    assert not run.look().has_ended
    now[0] += 5
    assert not run.look().has_ended, "the third came and went between two looks"
    now[0] += FOREIGN_SETTLE_S
    assert run.look().has_ended


def test_a_run_that_waits_in_a_queue_is_waited_for(run_dir: Path, tmp_path: Path):
    """As squeue tells of a job: it waits, runs, waits to go on after a preemption, runs again, is gone."""
    (tmp_path / "bin").mkdir()
    squeue = tmp_path / "bin" / "squeue"
    squeue.write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/answer\n")
    squeue.chmod(0o755)
    write_submission(run_dir, "12")
    asked = iter(range(1000))
    environment = {"PATH": str(tmp_path / "bin")}
    run = WatchedRun(run_dir, environment=environment, clock=lambda: float(next(asked)), query_s=0.5, settle_s=1.5)

    def look(state: str | None) -> Look:
        row = f"12|{state}|N/A|1:00:00|1|cpu|N/A||None|{run_dir.absolute()}/train.sbatch\n"
        (tmp_path / "answer").write_text("" if state is None else row)
        return run.look()

    assert look("PENDING").view.state.startswith("waiting: job 12")
    assert look("RUNNING").view.state == "starting"
    write_start(run_dir, "12")
    write_attempt(run_dir, 1, steps=[1])
    assert look("RUNNING").view.state == "training"
    write_report(run_dir, Ending.PREEMPTED, attempt=1, step=1)
    assert look("COMPLETING").view.state == "between attempts: preempted"
    assert look("PENDING").view.state.startswith("waiting: job 12")
    write_attempt(run_dir, 2, steps=[2])
    assert look("RUNNING").view.state == "training"
    write_report(run_dir, Ending.PREEMPTED, attempt=2, step=2)
    gone = look(None)
    assert gone.judged.state is RunState.PREEMPTED and not gone.has_ended, "a new job may be on its way"
    assert not look(None).has_ended and look(None).has_ended


def test_json_has_the_state_then_each_new_step(held: Path, monkeypatch):
    """What is there before the watching begins is told by the state."""
    write_attempt(held, steps=[1, 2])
    looks = iter(range(10))

    def sleep(_seconds: float) -> None:
        look = next(looks)
        if look == 0:
            with (held / "metrics.jsonl").open("a") as stream:
                stream.writelines(json.dumps(metrics_row(step)) + "\n" for step in (3, 4))
        if look == 1:
            write_report(held, Ending.FINISHED, step=4)
            (held / LOCK).unlink()

    monkeypatch.setattr("shardwise.launch.commands.follow.time.sleep", sleep)
    lines = [json.loads(line) for line in watch(held, as_json=True).splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [("state", 2), ("step", 3), ("step", 4), ("state", 4)]
    assert (lines[0]["state"], lines[0]["phase"], lines[0]["num_steps"]) == ("running", "training", 100)
    assert lines[1] == {"kind": "step", **metrics_row(3)}
    assert (lines[-1]["state"], lines[-1]["has_ended"], lines[-1]["loss"]) == ("finished", True, 4.96)


def test_ctrl_c_ends_the_watching_alone(held: Path, monkeypatch):
    write_attempt(held, steps=[1])

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.launch.commands.follow.time.sleep", interrupt)
    out = io.StringIO()
    assert run_watch(WatchOptions(str(held)), Console(out), environment=NO_SLURM) is ExitCode.INTERRUPTED
    assert not (held / "cancelled").exists()


def test_a_terminal_shows_the_block_and_the_ending_below_it(run_dir: Path):
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    write_attempt(run_dir, steps=[1, 100])
    write_report(run_dir, Ending.STOPPED, step=100)
    out = Terminal()
    environment = {**NO_SLURM, "TERM": "xterm", "NO_COLOR": "1"}
    assert run_watch(WatchOptions(str(run_dir)), Console(out), environment=environment) is ExitCode.DONE
    terminal = SmallTerminal()
    terminal.write(out.getvalue())
    assert terminal.lines[0].startswith("one: stopped") and "100 of 100" in terminal.lines[0]
    incidents, ending, remedy, _ = terminal.lines[-4:]
    assert incidents.startswith("incidents") and ending.startswith("runs/one: stopped") and "report runs/one" in remedy


def test_a_finished_run_is_shown_with_its_ending(run_dir: Path):
    write_attempt(run_dir, steps=[1, 2, 100])
    write_report(run_dir, Ending.FINISHED, step=100)
    state, bar, ending, remedy = watch(run_dir).splitlines()
    assert state == "one: finished" and ending.startswith("runs/one: finished")
    assert [fact for fact in ("#] 100/100", "4.0000", "0.0003", "1.23k", "121%", "7 MiB") if fact not in bar] == []
    assert remedy.strip() == "shardwise report runs/one"
