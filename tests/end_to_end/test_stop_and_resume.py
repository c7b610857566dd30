"""A stop saves, a resumption goes on with the same losses, and nothing survives a kill."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from workplace_factory import Workplace, make_workplace, read_metrics

from launch.process_record import ProcessRecord, descendants, read_records, record_of
from trainer.spec import codec
from trainer.spec.report import Ending, Report

STEPS = 60


@pytest.fixture
def long_job(workplace: Workplace) -> Workplace:
    workplace.write_job(train={"steps": STEPS}, checkpoint={"every": "1000 steps"}, eval={"every": "1000 steps"})
    return workplace


def wait_for(condition: Callable[[], object], what: str, *, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def num_steps_done(place: Workplace) -> int:
    files = list(place.folder.glob("runs/*/metrics.jsonl"))
    return len(files[0].read_text().splitlines()) if files else 0


def start_and_wait(place: Workplace, *, steps: int) -> subprocess.Popen[str]:
    process = place.start("train", "job.yaml")
    wait_for(lambda: num_steps_done(place) >= steps or process.poll() is not None, f"{steps} steps")
    assert process.poll() is None, process.communicate()[0]
    return process


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for _, row in sorted(read_metrics(run_dir).items())]


@pytest.mark.parametrize(
    ("number", "code", "ending"),
    [
        (signal.SIGINT, 130, Ending.STOPPED),
        (signal.SIGTERM, 75, Ending.PREEMPTED),
        (signal.SIGUSR1, 75, Ending.PREEMPTED),
    ],
)
def test_a_stopped_run_resumes_with_the_losses_of_an_uninterrupted_one(long_job, tmp_path, number, code, ending):
    process = start_and_wait(long_job, steps=5)
    process.send_signal(number)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == code, output
    run_dir = long_job.only_run()
    stopped = codec.read(run_dir / "report.json", Report)
    assert stopped.ending is ending and 5 <= stopped.step < STEPS and stopped.checkpoint is not None

    long_job.run("train", "job.yaml", "--resume")
    resumed = codec.read(run_dir / "report.json", Report)
    assert resumed.ending is Ending.FINISHED and resumed.resumed_from_step == stopped.step

    straight = make_workplace(tmp_path / "straight")
    straight.write_job(train={"steps": STEPS}, checkpoint={"every": "1000 steps"}, eval={"every": "1000 steps"})
    straight.run("train", "job.yaml")
    assert losses(run_dir) == losses(straight.only_run()), "not bitwise equal"


def everything_below(process: subprocess.Popen[str]) -> list[ProcessRecord]:
    record = record_of(process.pid)
    assert record is not None
    return [record, *descendants(process.pid)]


@pytest.mark.parametrize("victim", ["shardwise", "launcher"])
def test_a_kill_leaves_no_process_behind(long_job, victim):
    process = start_and_wait(long_job, steps=3)
    family = everything_below(process)
    assert len(family) >= 3
    pids = read_records(long_job.only_run() / "attempts" / "1" / "pids")
    os.kill(process.pid if victim == "shardwise" else pids["launcher"].pid, signal.SIGKILL)
    process.communicate(timeout=60)
    wait_for(lambda: not any(member.is_alive for member in family), "every process to end", seconds=20)
    assert process.returncode == (-signal.SIGKILL if victim == "shardwise" else 4)


def test_a_second_interrupt_ends_at_once(long_job):
    process = start_and_wait(long_job, steps=3)
    family = everything_below(process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not any(member.is_alive for member in family)


def test_an_interrupt_while_libraries_load_trains_nothing_or_stops_in_order(long_job):
    process = long_job.start("train", "job.yaml")
    wait_for(lambda: list(long_job.folder.glob("runs/*/attempts/1/pids/launcher.json")), "the launcher")
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 130, output
    assert num_steps_done(long_job) <= 1


def test_a_memory_cap_leads_to_a_fallback_at_the_same_global_batch_or_to_exit_code_5(workplace):
    """A cap that the plan fits but the process does not: the data limit makes a real out-of-memory."""
    workplace.write_job(
        model={"config": "model", "tokenizer": "train"},
        train={"steps": 4, "seq_len": 128, "tokens_per_step": 8192},
        pin={"loss": "eager"},
    )
    plan = json.loads(workplace.run("plan", "job.yaml", "--json").stdout)
    need = plan["candidates"][0]["memory"]["need_bytes"]
    answer = workplace.run("train", "job.yaml", f"--vram={need + 2**20}", check=False)
    assert answer.returncode in (0, 5), answer.stdout + answer.stderr
    report = codec.read(workplace.only_run() / "report.json", Report)
    if answer.returncode == 0:
        attempts = sorted((workplace.only_run() / "attempts").iterdir())
        batches = {
            (candidate["micro_batch"] * candidate["accumulation"])
            for candidate in (json.loads((path / "plan.json").read_text())["candidates"][0] for path in attempts)
        }
        assert len(batches) == 1 and report.attempts == len(attempts)
    else:
        assert report.ending is Ending.OUT_OF_MEMORY
