"""One run of wandb for one run directory: offline, online, killed, stopped, continued, sent later.

wandb is the real one, in the process of the trackers; its server is a stand-in on this machine.
"""

import os
import re
import signal
import time

import pytest
from msgspec.structs import replace
from report_factory import make_report
from run_factory import attempt_record, run_plan
from tracker_factory import LoggedRun, Trackers, WandbMode, append_steps, tracker_environment, tracker_order, write_plan
from wandb_server import wandb_server
from workplace_factory import wait_for

from shardwise.launch.rundir.state import RunState
from shardwise.launch.terminal import Console
from shardwise.launch.track import offline
from shardwise.launch.track.tracker import EndNotice
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.report import Ending, Fault

KEY = "canary" + "0123456789" * 4
pytestmark = pytest.mark.cold  # they kill the process of the trackers by its pid
FLUSH = "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"


@pytest.fixture
def server():
    with wandb_server() as listening:
        yield listening


def online(tmp_path, server, **more):
    return tracker_environment(tmp_path, WANDB_BASE_URL=server.url, WANDB_API_KEY=KEY, **more)


def supervise(run_dir, environment, *, mode=WandbMode.OFFLINE, attempt=1, has_report=False):
    """One supervisor's part of the run; what its console showed."""
    order = tracker_order(wandb=mode, first_attempt=attempt)
    return Trackers(run_dir, order, environment).end(EndNotice(has_report=has_report))


def rows(history):
    return [(row["_step"], row["step"], row["train/loss"]) for row in history]


def kill_trackers(run_dir, environment, *, mode=WandbMode.OFFLINE):
    """The machine of a supervisor fails once wandb has a folder, and all lines if it writes them at once."""
    before = set(run_dir.glob("wandb/*run-*/*.wandb"))
    process = Trackers(run_dir, tracker_order(wandb=mode), environment).process._process
    wait_for(lambda: len([*run_dir.glob("wandb/*run-*/*.wandb")]) > len(before), "a log")
    time.sleep(1.5)
    (log,) = set(run_dir.glob("wandb/*run-*/*.wandb")) - before
    wait_for(lambda: environment.get(FLUSH) != "0.1" or len(LoggedRun(log).history) == 3, "the lines")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdin.close()


def test_every_line_is_sent_once_under_one_identity(run_dir, tmp_path):
    supervise(run_dir, tracker_environment(tmp_path))
    write_plan(run_dir, 2)
    append_steps(run_dir, [3], attempt=2, loss=1.5)  # it went back to step 2
    append_steps(run_dir, [4], attempt=2, loss=1.5, tokens_per_s=0.0)
    supervise(run_dir, tracker_environment(tmp_path), attempt=2)
    first, second = map(LoggedRun, offline.offline_logs(run_dir))
    assert first.identity == second.identity == offline.read_wandb_run(run_dir).id
    assert rows(first.history) == [(0, 1, 4.99), (1, 2, 4.98), (2, 3, 4.97)]
    assert rows(second.history) == [(3, 3, 1.5), (4, 4, 1.5)]
    assert {metric.step_metric for name, metric in second.metrics.items() if name != "step"} == {"step"}
    assert second.metrics["train/loss"].summary.min and second.metrics["memory/memory_peak_bytes"].summary.max
    assert second.summary["train/loss"] == {"min": 1.5, "last": 1.5}, "of all lines, not of this supervisor's"
    assert second.summary["speed/tokens_per_s"] == {"mean": 1234.0 * 4 / 5, "last": 0.0}


def test_the_config_has_job_plan_machine_and_prediction_and_no_secret(tmp_path):
    plan = run_plan()
    hook = ("https://example.org/hook/that-is-secret",)
    job = replace(plan.job, log=replace(plan.job.log, notify=hook, project=f"of {KEY}"))
    write_plan(tmp_path, plan=replace(plan, job=job))
    append_steps(tmp_path, [1])
    agent = {"WANDB_SWEEP_ID": "s", "WANDB_RUN_ID": "of-an-agent"}
    supervise(tmp_path, tracker_environment(tmp_path, WANDB_API_KEY=KEY, **agent))
    assert offline.read_wandb_run(tmp_path).id == "of-an-agent"
    log = LoggedRun(offline.offline_logs(tmp_path)[0])
    chosen = plan.chosen
    assert log.config["plan"]["strategy"] == chosen.strategy.name
    assert log.config["plan"]["micro_batch"] == chosen.micro_batch
    assert log.config["predicted"]["memory/memory_peak_bytes_predicted"] == chosen.memory.peak_allocated_bytes
    assert log.config["predicted"]["memory"]["parts"] == chosen.memory.parts
    assert log.config["predicted"]["speed"]["tokens_per_s_per_gpu"] == chosen.speed.tokens_per_s_per_gpu
    assert log.config["hardware"]["host"]["ram_bytes"] == plan.hardware.host.ram_bytes
    assert log.config["model"]["num_parameters"] == plan.model_shape.num_parameters
    assert log.config["job"]["log"]["notify"] == "[redacted]"
    assert log.config["job"]["log"]["project"] == "of [redacted]"


def test_series_tags_and_console_have_the_names_that_others_look_for(run_dir, tmp_path):
    append_steps(run_dir, [4], eval_loss=3.5, lr=2e-4)
    (run_dir / "console.log").write_text(f"step 4, loss 4.9\nkey {KEY}\n")
    supervise(run_dir, tracker_environment(tmp_path, WANDB_TAGS="mine", WANDB_API_KEY=KEY))
    log, plan = LoggedRun(offline.offline_logs(run_dir)[0]), run_plan()
    row = log.history[-1]
    assert (row["train/global_step"], row["eval/loss"], row["train/learning_rate"]) == (4, 3.5, 2e-4)
    assert row["eval/eval_loss"] == row["eval/loss"] and row["train/lr"] == row["train/learning_rate"]
    assert log.config["learning_rate"] == plan.schedule.lr and log.config["max_steps"] == plan.schedule.num_steps
    assert {"mine", str(plan.chosen.method), plan.model_shape.model_type} <= set(log.of("run")[0].tags)
    printed = "".join(map(str, log.of("output_logger")))
    assert "step 4, loss 4.9" in printed and KEY not in printed


def test_system_metrics_are_of_the_run_and_its_processes(run_dir, tmp_path):
    """This process stands for the supervisor."""
    held = bytearray(b"1") * 2**29
    order = tracker_order(wandb=WandbMode.OFFLINE)
    trackers = Trackers(run_dir, order, tracker_environment(tmp_path, WANDB_X_STATS_SAMPLING_INTERVAL="0.2"))
    time.sleep(2.5)
    trackers.end(EndNotice(has_report=False))
    items = [item for stats in LoggedRun(offline.offline_logs(run_dir)[0]).of("stats") for item in stats.item]
    resident = [float(item.value_json) for item in items if item.key == "proc.memory.rssMB"]
    assert resident and max(resident) > len(held) / 2**20


def test_what_goes_wrong_is_an_alert_and_the_ending_in_the_summary(run_dir, tmp_path):
    append_steps(run_dir, [4], loss=None)
    ended = {"ending": Ending.OUT_OF_MEMORY, "fault": Fault.OUT_OF_MEMORY, "cause": "CUDA out of memory"}
    record = attempt_record(1, step=4, **ended)
    codec.write(run_dir / "report.json", make_report(ending=Ending.OUT_OF_MEMORY, exit_code=5, history=(record,)))
    supervise(run_dir, tracker_environment(tmp_path), has_report=True)
    log = LoggedRun(offline.offline_logs(run_dir)[0])
    (first, loss), (second, memory) = log.alerts
    assert (first, second) == ("non-finite step", "out of memory") and "step 4" in loss
    assert all(fact in memory for fact in ("attempt 1", "step 4", "none/fp32/adamw", "CUDA out of memory"))
    assert log.summary["report/ending"] == "out_of_memory"
    assert log.of("exit")[0].exit_code == 5
    assert "train/loss" not in log.history[3] and log.history[3]["train/lr"] == 3e-4


@pytest.mark.parametrize("flush_s", [pytest.param("0.1", marks=pytest.mark.long), "600"])
def test_a_killed_process_loses_and_doubles_no_line(flush_s, run_dir, tmp_path):
    """Whether what was sent had come to the disk, or had not."""
    kill_trackers(run_dir, tracker_environment(tmp_path, **{FLUSH: flush_s}))
    assert len(LoggedRun(offline.offline_logs(run_dir)[0]).history) == (3 if flush_s == "0.1" else 0)
    append_steps(run_dir, [4, 5])
    supervise(run_dir, tracker_environment(tmp_path))
    logged = [row["_step"] for log in offline.offline_logs(run_dir) for row in LoggedRun(log).history]
    assert logged == [0, 1, 2, 3, 4]


def test_online_a_run_goes_on_where_the_server_has_it(run_dir, tmp_path, server):
    environment = online(tmp_path, server)
    kill_trackers(run_dir, environment, mode=WandbMode.ONLINE)
    shown = supervise(run_dir, environment, mode=WandbMode.ONLINE)
    append_steps(run_dir, [2, 3], attempt=2, loss=2.5)
    write_plan(run_dir, 2)
    supervise(run_dir, environment, mode=WandbMode.ONLINE, attempt=2)
    ((identity, run),) = server.runs.items()
    assert identity == offline.read_wandb_run(run_dir).id
    assert rows(run.rows) == [(0, 1, 4.99), (1, 2, 4.98), (2, 3, 4.97), (3, 2, 2.5), (4, 3, 2.5)]
    assert run.summary["train/loss"] == {"min": 2.5, "last": 2.5}
    assert run.names == {"bot-1"}
    assert f"wandb: {server.url}/somebody/shardwise/runs/{identity}" in shown


def test_what_was_written_offline_is_sent_in_order_and_once(run_dir, tmp_path, server, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    supervise(run_dir, tracker_environment(tmp_path))
    append_steps(run_dir, [4, 5])
    supervise(run_dir, tracker_environment(tmp_path))
    environment = online(tmp_path, server, WANDB_MODE="offline")
    for _ in range(2):
        offline.sync_runs([(run_dir, RunState.FINISHED)], Console(), environment)
    ((identity, run),) = server.runs.items()
    assert identity == offline.read_wandb_run(run_dir).id
    assert [row["_step"] for row in run.rows] == [0, 1, 2, 3, 4]
    assert offline.unsynced_folders(run_dir) == []
    assert "nothing to send" in capfd.readouterr().out
    assert not (tmp_path / "wandb").exists(), "nothing is left where the command was given"
    append_steps(run_dir, [6])
    supervise(run_dir, tracker_environment(tmp_path))
    append_steps(run_dir, [7])
    supervise(run_dir, online(tmp_path, server), mode=WandbMode.ONLINE)
    assert [row["_step"] for row in run.rows] == list(range(7))
    assert offline.unsynced_folders(run_dir) == [], "a run that is online again has sent what was written offline"
    assert not any(KEY.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_what_is_not_sent_is_named_with_its_reason(run_dir, tmp_path, capsys):
    """A folder with the name of an offline one, whose log is no log of wandb."""
    folder = run_dir / "wandb" / "offline-run-20261122_173000-abcd1234"
    folder.mkdir(parents=True)
    (folder / "run-abcd1234.wandb").write_bytes(b"no log of wandb")
    offline.write_wandb_run(run_dir, offline.WandbRun(id="abcd1234", project="shardwise"))
    environment = tracker_environment(tmp_path, WANDB_BASE_URL="http://127.0.0.1:9")
    for key, fact in (({}, "http.*wandb login"), ({"WANDB_API_KEY": KEY}, re.escape(str(run_dir)))):
        with pytest.raises(EnvironmentFaultError, match=fact):
            offline.sync_runs([(run_dir, RunState.FINISHED)], Console(), environment | key)
    assert offline.unsynced_folders(run_dir) == [folder]
    offline.write_wandb_run(run_dir, replace(offline.read_wandb_run(run_dir), writing=folder.name))
    offline.sync_runs([(run_dir, RunState.RUNNING)], Console(), {})
    assert folder.name in capsys.readouterr().out, "it may still be written to"
