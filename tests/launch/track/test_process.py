"""A tracker that hangs, raises, exits or loses its folder: the supervisor and the other trackers go on, with a line.

Every process here is real; the package named wandb is a stand-in that misbehaves.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from report_factory import make_report
from run_factory import write_submission
from tracker_factory import Trackers, append_steps, logged_plan, tracker_environment, tracker_order, write_program
from wandb_stand_in import write_stand_in
from workplace_factory import wait_for

from shardwise.launch.attempt.supervisor import StopRequest
from shardwise.launch.rundir.process_record import read_state
from shardwise.launch.track import start as track_start
from shardwise.launch.track.start import running_trackers
from shardwise.launch.track.start import tracker_order as order_of
from shardwise.launch.track.tracker import EndNotice
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.job.sections import WandbMode
from shardwise.trainer.spec.report import Ending

pytestmark = pytest.mark.cold  # a warm Python has loaded the real wandb, and its signals and pids are another's
KEEP = "import sys\nopen({path!r}, 'w').write(sys.stdin.read())\n"


@pytest.fixture
def received(tmp_path):
    return tmp_path / "received.json"


def notify(tmp_path, received):
    return (str(write_program(tmp_path, KEEP.format(path=str(received)))),)


def shown_by(trackers):
    """What the console shows after one more look at the process."""
    trackers.process.tick()
    return trackers.stream.getvalue()


def catches(pid, number):
    _, _, rest = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")
    return bool(int(rest.split()[0], 16) >> (number - 1) & 1)


@pytest.mark.parametrize("way", ["raises when a run begins", "ends its process when a run begins"])
def test_a_tracker_that_fails_is_a_line_and_the_others_go_on(way, run_dir, tmp_path, received):
    path = write_stand_in(tmp_path / "stand in", way)
    order = tracker_order(wandb=WandbMode.OFFLINE, notify=notify(tmp_path, received))
    trackers = Trackers(run_dir, order, tracker_environment(tmp_path, PYTHONPATH=str(path)))
    wait_for(lambda: shown_by(trackers), "a line")
    codec.write(run_dir / "report.json", make_report())
    shown = trackers.end(EndNotice(has_report=True))
    assert "wandb" in shown and ("switched off" in shown or "exit code 7, fatal: wandb" in shown)
    assert json.loads(received.read_text())["ending"] == "finished"


def test_a_tracker_that_hangs_is_ended_and_the_others_get_the_end(run_dir, tmp_path, received, monkeypatch):
    monkeypatch.setattr(track_start, "END_S", 4.0)
    path = write_stand_in(tmp_path / "stand in", "hangs when it is loaded")
    order = tracker_order(wandb=WandbMode.ONLINE, notify=notify(tmp_path, received))
    trackers = Trackers(run_dir, order, tracker_environment(tmp_path, PYTHONPATH=str(path)))
    shown = trackers.end()
    facts = ("wandb, notify", " 4 s", "metrics.jsonl", str(run_dir / "logs" / "sinks.log"))
    assert [fact for fact in facts if fact not in shown] == []
    assert json.loads(received.read_text())["name"] == "bot-1"


def test_no_process_remains_after_the_end(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(track_start, "END_S", 2.0)
    pids = f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{os.getppid()}}')"
    program = write_program(tmp_path, f"import os, time\n{pids}\ntime.sleep(60)")
    trackers = Trackers(run_dir, tracker_order(notify=(str(program),)), tracker_environment(tmp_path))
    assert os.getsid(trackers.process._process.pid) == trackers.process._process.pid
    assert "not done" in trackers.end()
    command, parent = map(int, (tmp_path / "pids").read_text().split())
    wait_for(lambda: (read_state(command) or "Z")[0] == "Z", "the end of the command")
    assert read_state(parent) is None


def test_a_process_that_is_killed_is_noticed_while_training_goes_on(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(track_start, "_LOOK_EVERY_S", 0.0)
    trackers = Trackers(run_dir, tracker_order(tensorboard=True), tracker_environment(tmp_path))
    os.kill(trackers.process._process.pid, signal.SIGKILL)
    wait_for(lambda: shown_by(trackers), "a line")
    assert trackers.stream.getvalue().startswith("tensorboard: ")
    assert trackers.stream.getvalue().count("\n") == 1
    assert trackers.end().count("\n") == 1


def test_a_folder_that_cannot_be_made_or_vanishes_affects_no_other_tracker(run_dir, tmp_path, received):
    (run_dir / "logs").write_text("a file of that name")
    trackers = Trackers(run_dir, tracker_order(tensorboard=True), tracker_environment(tmp_path))
    (line,) = trackers.end().splitlines()
    assert line.startswith("tensorboard: ") and "File exists" in line
    (run_dir / "logs").unlink()
    order = tracker_order(notify=notify(tmp_path, received), tensorboard=True)
    trackers = Trackers(run_dir, order, tracker_environment(tmp_path))
    wait_for(lambda: any((run_dir / "tensorboard").glob("*")), "a file")
    shutil.rmtree(run_dir / "tensorboard", ignore_errors=True)
    append_steps(run_dir, range(4, 30))
    assert "not done" not in trackers.end(EndNotice(has_report=False, error="why"))
    assert json.loads(received.read_text())["error"] == "why"


def test_trackers_ignore_stop_requests_and_end_by_themselves_if_the_supervisor_dies(run_dir, tmp_path, received):
    """An earlier report is not that of this supervisor."""
    codec.write(run_dir / "report.json", make_report(ending=Ending.PREEMPTED))
    order = tracker_order(notify=notify(tmp_path, received), first_attempt=2)
    trackers = Trackers(run_dir, order, tracker_environment(tmp_path))
    process, numbers = trackers.process._process, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    wait_for(lambda: all(catches(process.pid, number) for number in numbers), "the handlers")
    for number in numbers:
        os.kill(process.pid, number)
    process.stdin.close()
    assert process.wait(30) == 0
    trackers.process._process = None
    message = json.loads(received.read_text())
    assert message["error"].startswith("the supervisor") and message["ending"] == "failed"
    assert (run_dir / "logs" / "sinks.log").read_text() == ""


def test_a_run_that_cannot_start_is_reported(tmp_path, received):
    run_dir, plan, stop = tmp_path, logged_plan(notify=notify(tmp_path, received)), StopRequest()
    console = Trackers(run_dir, tracker_order(), {}).process._console
    with (
        pytest.raises(EnvironmentFaultError),
        running_trackers(plan, run_dir=run_dir, console=console, environment=tracker_environment(tmp_path), stop=stop),
    ):
        raise EnvironmentFaultError("attempts/1: no space")
    message = json.loads(received.read_text())
    assert (message["ending"], message["step"], message["error"]) == ("failed", 0, "attempts/1: no space")


def test_the_order_follows_the_job_the_sweep_and_the_trial(run_dir, tmp_path):
    log: dict[str, Any] = {"project": "mine", "name": "first", "tensorboard": True, "notify": ("program",)}
    plan = logged_plan(wandb=WandbMode.ONLINE, **log)
    assert order_of(plan, tmp_path / "bot-1", {}) == tracker_order(wandb=WandbMode.ONLINE, **log)
    assert order_of(replace(plan, is_trial=True), tmp_path, {}).names == ()
    assert order_of(logged_plan(), tmp_path / "bot-1", {}).name == "bot-1"
    write_submission(tmp_path / "sweep-1" / "point-3", point=3)
    point = order_of(logged_plan(), tmp_path / "sweep-1" / "point-3", {})
    assert (point.name, point.group) == ("sweep-1 point-3", "sweep-1")
    assert order_of(logged_plan(name="mine"), tmp_path / "sweep-1" / "point-3", {}).name == "mine point-3"
    trackers = Trackers(run_dir, tracker_order(), tracker_environment(tmp_path))
    trackers.process.tick()
    assert trackers.end() == "" and not (run_dir / "logs").exists(), "no process without trackers"


def test_no_secret_of_the_environment_is_in_the_log(run_dir, tmp_path):
    key = "canary-of-wandb-52d1-0123456789"
    path = write_stand_in(tmp_path / "stand in", "raises when a run begins")
    stand_in = path / "wandb" / "__init__.py"
    stand_in.write_text(stand_in.read_text().replace("cannot allocate a run", f"401 for {key}"))
    environment = tracker_environment(tmp_path, PYTHONPATH=str(path), WANDB_API_KEY=key)
    shown = Trackers(run_dir, tracker_order(wandb=WandbMode.OFFLINE), environment).end()
    assert "401 for [redacted]" in shown
    assert key not in (run_dir / "logs" / "sinks.log").read_text()
