"""A run that is started with `accelerate launch` by hand is a run: every command finds it, and its end is reported."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from export_factory import IDLE, write_idle_base
from tracker_factory import LoggedRun
from workplace_factory import LIMIT_S, SENTENCES, TINY_CONFIG, Workplace, make_workplace, read_metrics, wait_for

from shardwise.launch.attempt.supervisor import StopRequest, watch_attempt
from shardwise.launch.attempt.watchdog import Watchdog
from shardwise.launch.run.by_hand import RanksByHand
from shardwise.launch.rundir.process_record import record_of, write_record
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Ending, Report

TWO = ("--hardware", "2xCPU", "pin.sharding=ddp")
RANKS = [(), pytest.param(TWO, marks=[pytest.mark.long, pytest.mark.kills])]


def start(place: Workplace, run: Path, number: int) -> "subprocess.Popen[bytes]":
    """The launcher of a prepared attempt, once a step of it is done; its output goes to FOLDER/hand.log."""
    steps = 0 if number == 1 else max(read_metrics(run))
    with (place.folder / "hand.log").open("ab") as output:
        process = subprocess.Popen(
            place.by_hand(run / "attempts" / str(number)), cwd=place.folder, env=place.environment,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    wait_for(lambda: (run / "metrics.jsonl").exists() and max(read_metrics(run), default=0) > steps, "a step", process)
    return process


def status(place: Workplace, run: Path) -> str:
    return place.run("status", run).stdout


def report_of(run: Path) -> Report:
    return codec.read(run / "report.json", Report)


def test_a_fault_of_the_process_that_watches_leaves_the_ranks_running(tmp_path: Path):
    """The supervisor, whose part it plays, would end them with itself."""
    with subprocess.Popen(["sleep", "60"]) as rank:
        record = record_of(rank.pid)
        write_record(tmp_path / "pids" / "rank-0.json", record)
        ranks = RanksByHand(tmp_path, None, num_ranks=1)

        def tick() -> None:
            raise OSError("the screen is gone")

        with pytest.raises(OSError, match="the screen is gone"):
            watch_attempt(
                ranks, attempt_dir=tmp_path, stop=StopRequest(), on_tick=tick, on_notice=print,
                watchdog=Watchdog(tmp_path, num_ranks=1),
            )  # fmt: skip
        assert rank.poll() is None
        ranks.end()
        assert rank.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("words", RANKS, ids=["one rank", "two ranks"])
def test_a_run_by_hand_is_seen_cancelled_resumed_stopped_and_reported(tmp_path: Path, words: tuple[str, ...]):
    place, run = make_workplace(tmp_path), tmp_path / "run"
    job: dict[str, Any] = {"train": {"steps": 40_000}}
    if words:  # adapters, some of which learn nothing
        write_idle_base(tmp_path / "base", TINY_CONFIG, SENTENCES)
        job["model"] = {"config": None, "tokenizer": None, "name": "base"}
        job["train"]["method"] = "lora"
    place.write_job(**job, checkpoint={"every": "1000 steps"}, log={"wandb": "offline"})
    prepared = place.run("train", "job.yaml", *words, "--run-dir", run, "--dry-run").stdout
    assert "by hand:\n  accelerate launch" in prepared and ": not started" in status(place, run)

    process = start(place, run, 1)
    assert ": running" in status(place, run)
    again = place.execute(*place.by_hand(run / "attempts" / "1"))
    assert again.returncode != 0 and "runs already: its rank " in again.stderr
    resumed = place.run("train", "job.yaml", *words, "--run-dir", run, "--resume", check=False)
    assert resumed.returncode == 4 and "is in use by process" in resumed.stderr
    wait_for(lambda: list((run / "wandb").glob("offline-run-*")), "a tracker", process)
    watching = place.start("watch", run)
    live = f"step 5: {IDLE}" if words else ""
    wait_for(lambda: live in (tmp_path / "hand.log").read_text(), "the idle adapters", process)
    assert "requested" in place.run("cancel", run).stdout
    process.wait(LIMIT_S)
    wait_for((run / "report.json").exists, "the report")
    first = report_of(run)
    assert (first.ending, first.exit_code) == (Ending.STOPPED, 130) and first.checkpoint is not None
    assert ": stopped" in status(place, run)
    watched = watching.communicate(timeout=LIMIT_S)[0]
    assert watching.returncode == 0 and "/40000  loss " in watched and "shardwise report " in watched, watched

    place.run("train", "job.yaml", *words, "--run-dir", run, "--resume", "--dry-run")
    process = start(place, run, 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.wait(LIMIT_S)
    wait_for(lambda: report_of(run).attempts == 2, "the second report")
    second = report_of(run)
    assert (second.ending, second.resumed_from_step) == (Ending.STOPPED, first.step) and second.step > first.step
    assert second.checkpoint == f"checkpoints/step-{second.step:08d}"
    steps = [line["step"] for line in map(json.loads, (run / "metrics.jsonl").read_bytes().splitlines())]
    assert steps == sorted(set(steps)), "one trainer at a time"
    printed = place.folder / "hand.log"
    wait_for(lambda: f"checkpoints/step-{second.step:08d}" in printed.read_text(), "the end of the report")
    assert f"stopped by request at step {second.step} of 40000" in printed.read_text()
    assert "lr 0.0" in printed.read_text()
    assert f"stopped by request at step {second.step} of 40000" in place.run("report", run).stdout
    logs = [LoggedRun(log) for log in sorted((run / "wandb").glob("offline-run-*/*.wandb"))]
    assert len({log.identity for log in logs}) == 1
    assert sorted(row["step"] for log in logs for row in log.history) == steps
