"""`shardwise status`, `watch`, `logs` and `cancel` from files alone: runs that wait, run, ended, or are elsewhere."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_factory import (
    age,
    append_steps,
    metrics_row,
    write_attempt,
    write_checkpoint,
    write_holder,
    write_report,
    write_start,
    write_submission,
)
from small_terminal import SmallTerminal, TerminalStream
from workplace_factory import wait_for

from shardwise.launch.commands.follow import run_cancel, run_logs, run_status, run_watch
from shardwise.launch.options import CancelOptions, LogsOptions, StatusOptions, WatchOptions
from shardwise.launch.rundir.lock import LOCK, is_cancelled, locked
from shardwise.launch.rundir.state import RunState
from shardwise.launch.show.follow import FOREIGN_SETTLE_S, WatchedRun
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from shardwise.trainer.spec.report import Ending
from shardwise.trainer.spec.units import format_count

NO_SLURM = {"PATH": "/nonexistent"}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("runs/one")


def printed(run: Callable[..., ExitCode], options: Any, **settings: float) -> str:
    out = io.StringIO()
    assert run(options, Console(out), environment=NO_SLURM, **settings) is ExitCode.DONE
    return out.getvalue()


def watch(run_dir: Path, *, as_json: bool = False) -> str:
    return printed(run_watch, WatchOptions(str(run_dir), once=False, as_json=as_json), look_s=0.01, settle_s=0.05)


def at_each_wait(monkeypatch: pytest.MonkeyPatch, *actions: Callable[[], object]) -> None:
    """Between two looks, `watch` and `logs` do the next of these instead of waiting."""
    left = iter(actions)
    sleep = "shardwise.launch.commands.follow.time.sleep"
    monkeypatch.setattr(sleep, lambda _seconds: next(left, lambda: None)())


def finish(held: Path, *steps: int) -> None:
    append_steps(held, steps)
    write_report(held, Ending.FINISHED, step=steps[-1])
    (held / LOCK).unlink()


@pytest.fixture
def held(run_dir: Path):
    """A run that this process supervises, as far as anybody can tell."""
    run_dir.mkdir(parents=True)
    with locked(run_dir):
        yield run_dir


def test_a_run_that_goes_on_is_followed_through_its_attempts(held: Path):
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
    write_report(run_dir, Ending.FAILED, attempt=2, step=2)
    assert not run.look().has_ended
    now[0] += 5
    assert not run.look().has_ended, "the second came and went between two looks"
    now[0] += FOREIGN_SETTLE_S
    assert run.look().has_ended


def test_json_has_the_state_then_each_new_step(held: Path, monkeypatch):
    """What is there before the watching begins is told by the state."""
    write_attempt(held, steps=[1, 2])
    at_each_wait(monkeypatch, lambda: append_steps(held, [3]), lambda: finish(held, 4))
    lines = [json.loads(line) for line in watch(held, as_json=True).splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [("state", 2), ("step", 3), ("step", 4), ("state", 4)]
    assert (lines[0]["state"], lines[0]["phase"], lines[0]["num_steps"]) == ("running", "training", 100)
    assert lines[1] == {"kind": "step", **metrics_row(3)}
    assert (lines[-1]["state"], lines[-1]["has_ended"], lines[-1]["loss"]) == ("finished", True, 4.96)


def test_a_log_ends_with_the_last_step_however_soon_it_comes(held: Path, monkeypatch):
    write_attempt(held, steps=[1, 2])
    at_each_wait(monkeypatch, lambda: append_steps(held, [50]), lambda: finish(held, 100))
    lines = watch(held).splitlines()
    assert [line.partition("  loss")[0][-6:] for line in lines if "loss" in line] == [" 2/100", "00/100"]


def test_a_directory_that_stays_away_is_an_error(held: Path, monkeypatch):
    write_attempt(held, steps=[1])
    at_each_wait(monkeypatch, lambda: held.rename(held.with_name("moved")))
    with pytest.raises(EnvironmentFaultError, match="No such file"):
        watch(held)


def test_ctrl_c_ends_the_watching_and_the_following_alone(held: Path, monkeypatch):
    write_attempt(held, steps=[1])
    at_each_wait(monkeypatch, *2 * [lambda: signal.raise_signal(signal.SIGINT)])
    out = io.StringIO()
    assert run_watch(WatchOptions(str(held)), Console(out), environment=NO_SLURM) is ExitCode.INTERRUPTED
    assert logs(run=str(held), follow=True)[1:] == ["rank 0 did step 1", ""]
    assert not (held / "cancelled").exists()


def test_a_terminal_shows_the_block_and_the_ending_below_it(run_dir: Path):
    write_attempt(run_dir, steps=[1, 100])
    write_report(run_dir, Ending.STOPPED, step=100)
    out = TerminalStream()
    environment = {**NO_SLURM, "TERM": "xterm", "NO_COLOR": "1"}
    assert run_watch(WatchOptions(str(run_dir)), Console(out), environment=environment) is ExitCode.DONE
    terminal = SmallTerminal()
    terminal.write(out.getvalue())
    assert terminal.lines[0].startswith("one: stopped") and "100 of 100" in terminal.lines[0]
    incidents, ending, remedy, _ = terminal.lines[-4:]
    assert incidents.startswith("incidents") and ending.startswith("runs/one: stopped") and "report runs/one" in remedy


def test_a_finished_run_is_shown_with_its_ending(run_dir: Path):
    write_attempt(run_dir, steps=[1, 2, 100])
    rate = write_report(run_dir, Ending.FINISHED, step=100).tokens_per_s
    assert rate is not None
    state, bar, ending, remedy = watch(run_dir).splitlines()
    assert state == "one: finished" and ending.startswith("runs/one: finished")
    speed = f"{format_count(rate)} tokens/s ("
    assert [fact for fact in ("#] 100/100", "4.0000", "0.0003", speed, "7 MiB") if fact not in bar] == []
    assert remedy.strip() == "shardwise report runs/one"
    (run_dir / "plan.json").unlink()
    assert watch(run_dir).splitlines()[-2] == ending, "by its attempts alone"


def logs(**options: object) -> list[str]:
    return printed(run_logs, LogsOptions(**options)).splitlines()  # type: ignore[arg-type] # by name


@pytest.fixture
def logged(run_dir: Path) -> Path:
    write_attempt(run_dir, steps=range(1, 101))
    return run_dir


def test_without_slurm_rank_0_of_the_newest_attempt_is_shown(logged: Path):
    write_attempt(logged, 2, steps=[100, 101])
    title = "==> runs/one/attempts/2/logs/rank-0.log <=="
    assert logs(run=str(logged)) == [title, "rank 0 did step 100", "rank 0 did step 101"]
    assert logs(attempt=1, num_lines=1)[1:] == ["rank 0 did step 100"], "of the newest run"


def test_the_output_of_slurm_comes_first_and_the_last_words_of_launchers_and_agents_after(logged: Path):
    write_submission(logged, "12")
    write_start(logged, "12")
    (logged / "slurm-12.out").write_text("planning\ntraining\n")
    folder = logged / "attempts" / "1" / "logs"
    (folder / "launcher.log").write_text("\n")
    (folder / "launcher-1.log").write_text("".join(f"word {number}\n" for number in range(20)))
    (folder / "agents.log").write_text("srun: error: Node failure on n2\n")
    assert logs(run=str(logged)) == [
        "==> runs/one/slurm-12.out <==",
        "planning",
        "training",
        "==> runs/one/attempts/1/logs/launcher-1.log <==",
        *(f"word {number}" for number in range(15, 20)),
        "==> runs/one/attempts/1/logs/agents.log <==",
        "srun: error: Node failure on n2",
    ]
    assert logs(run=str(logged), rank=0, num_lines=2)[0] == "==> runs/one/attempts/1/logs/rank-0.log <=="


def test_new_lines_are_followed_over_attempts_to_the_end_of_the_run(logged: Path):
    out, codes = io.StringIO(), list[ExitCode]()
    options = LogsOptions(run=str(logged), follow=True, num_lines=1)

    def follow() -> None:
        codes.append(run_logs(options, Console(out), environment=NO_SLURM, look_s=0.01, query_s=0.05))

    def wait_for_line(text: str) -> None:
        wait_for(lambda: text in out.getvalue(), text)

    thread = threading.Thread(target=follow, daemon=True)
    with locked(logged):
        thread.start()
        wait_for_line("did step 100")
        with (logged / "attempts" / "1" / "logs" / "rank-0.log").open("a") as log:
            log.write("one more\n")
        wait_for_line("one more")
        write_report(logged, Ending.FAILED)
        write_attempt(logged, 2, steps=[101])
        wait_for_line("did step 101")
        write_report(logged, Ending.FINISHED, attempt=2, step=101)
        time.sleep(0.1)
        assert "finished" not in out.getvalue(), "it is still supervised"
    thread.join(60)
    assert codes == [ExitCode.DONE]
    lines = out.getvalue().splitlines()
    assert lines[-1] == "runs/one: finished at step 101"
    assert "rank 0 did step 99" not in lines, "only the last line of what was there"
    assert lines.count("rank 0 did step 101") == 1


@pytest.mark.parametrize(
    ("options", "facts"),
    [({"attempt": 3}, r"--attempt 3: runs/one .* 1$"), ({"rank": 8}, r"--rank 8: attempt 1 .*0 to 0")],
)
def test_what_there_is_not_is_said(logged: Path, options, facts):
    with pytest.raises(InputError, match=facts):
        logs(run=str(logged), **options)


SUPERVISOR = """
import sys, time
from pathlib import Path
from shardwise.launch.rundir.lock import locked
from shardwise.launch.attempt.supervisor import StopRequest
stop = StopRequest()
with locked(Path(sys.argv[1])), stop.listening():
    print("runs", flush=True)
    while stop.num_interrupts < int(sys.argv[2]):
        time.sleep(0.01)
    print(stop.kind, flush=True)
"""


def cancel(run_dir: Path, *, now: bool = False) -> str:
    return printed(run_cancel, CancelOptions(str(run_dir), now))


@pytest.mark.cold
@pytest.mark.parametrize("now", [False, True])
def test_the_supervisor_of_this_machine_is_interrupted_and_for_now_twice(tmp_path: Path, now: bool):
    write_attempt(tmp_path, steps=[1])
    argv = [sys.executable, "-c", SUPERVISOR, str(tmp_path), str(1 + now)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "runs\n"
            text = cancel(tmp_path, now=now)
            assert process.stdout.readline() == "interrupt\n"
        finally:
            process.kill()
    assert f"process {process.pid}" in text and is_cancelled(tmp_path)


def test_a_supervisor_of_another_machine_is_named_with_what_to_do_there(tmp_path: Path):
    write_attempt(tmp_path, steps=[1])
    write_holder(tmp_path, os.getpid(), "n3")
    with pytest.raises(EnvironmentFaultError, match=f"n3.*kill -INT {os.getpid()}"):
        cancel(tmp_path)
    assert is_cancelled(tmp_path)


def status(run: str | None = None, *, as_json: bool = False) -> str:
    return printed(run_status, StatusOptions(run, as_json))


@pytest.fixture
def runs(tmp_path: Path, run_dir: Path) -> Path:
    return tmp_path / run_dir.parent


def test_a_run_is_shown_with_all_that_its_files_tell(runs: Path):
    run_dir = runs / "one"
    write_attempt(run_dir, 1, steps=[1, 2])
    write_report(run_dir, Ending.FAILED, step=2, incidents=("step 2: a rank was killed; the same again",))
    write_attempt(run_dir, 2, steps=[2, 3])
    write_checkpoint(run_dir, 2)
    write_holder(run_dir, 5, "n3")
    lines = status("runs/one").splitlines()
    assert lines[0].startswith("runs/one: unknown") and "3 of 100" in lines[0] and "process 5 on n3" in lines[1]
    facts = (
        "none+none/fp32", "loss 4.9700", "0.0003", "1.23k tokens/s", "7 MiB", "2 attempts, 1 incident",
        "    step 2: a rank was killed; the same again", "runs/one/checkpoints/step-00000002", "rank 0 did step 3",
        "runs/one/attempts/2/logs",
    )  # fmt: skip
    assert [fact for fact in facts if fact not in "\n".join(lines)] == []


def test_all_runs_of_a_folder_the_newest_first(runs: Path):
    assert f"no runs in {runs}" in status() and json.loads(status(as_json=True)) == []
    for name, hour in (("old", 1), ("new", 3), ("middle", 2)):
        write_submission(runs / name, name, submitted=f"2026-11-22T0{hour}:00:00Z")
    write_attempt(runs / "local", steps=[4])
    age(runs / "local" / "plan.json", 10**9)
    (runs / "notes").mkdir()
    lines = status().splitlines()
    assert [line.split()[0] for line in lines[:4]] == [f"runs/{name}" for name in ("new", "middle", "old", "local")]
    assert "4/100" in lines[3] and "no Slurm here" in lines[4]


def test_points_of_a_sweep_have_a_line_each_with_what_they_vary(runs: Path):
    script = str(runs / "sweep" / "train.sbatch")
    write_submission(runs / "sweep", "20", script=script)
    for number in (1, 2, 10):
        folder = runs / "sweep" / f"point-{number}"
        write_submission(folder, f"20_{number}", script=script, overrides=(f"train.lr={number}e-4",))
        write_attempt(folder, steps=[number])
        write_report(folder, Ending.FINISHED, step=number)
    lines = status("runs/sweep").splitlines()
    assert [line.split()[0] for line in lines] == [f"runs/sweep/point-{number}" for number in (1, 2, 10)]
    assert all(line.split()[1] == "finished" and line.endswith("e-4") for line in lines)
    assert lines == status("20").splitlines(), "by the id of the array too"
    assert [line.split()[0] for line in status().splitlines()[:3]] == [line.split()[0] for line in lines]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_runs_of_others_are_counted_and_shown_when_named(runs: Path):
    write_attempt(runs / "mine", steps=[1])
    write_attempt(runs / "theirs", steps=[1])
    os.chown(runs / "theirs", 12345, -1)
    text = status()
    assert "runs/mine" in text and "runs/theirs" not in text
    (others,) = [line for line in text.splitlines() if "others" in line]
    assert ": 1" in others
    assert "runs/theirs: lost" in status("runs/theirs")
