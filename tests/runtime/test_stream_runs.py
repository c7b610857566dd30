"""Ranks that train on a stream: killed in the middle of a window, a run goes on with the same losses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from rank_factory import write_attempt
from stream_factory import prepared_stream, stream_plan, write_files

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Ending, Report

LAST_STEP = 14  # by then the stream has begun again
ENDLESS = 100_000  # steps: more than a rank can run before it is stopped
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    write_files(folder / "rows", rows_of_file=30)
    return prepared_stream(folder / "rows", cache_root=folder / "cache")


def start(plan_path: Path) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with plan_path.with_name("output.txt").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "shardwise.trainer", str(plan_path)],
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
        )


def attempt(run_dir: Path, profile, *, number: int = 1, resume: bool = False) -> Path:
    plan = stream_plan(profile, num_steps=ENDLESS, checkpoint_every_steps=3, eval_every_steps=6)
    return write_attempt(run_dir, msgspec.structs.replace(plan, resume=resume), number=number)


def lines_of(run_dir: Path) -> dict[int, dict[str, float]]:
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line for line in lines}


def stopped_after(plan_path: Path, step: int) -> Report:
    """Runs a rank until it has done this step, and has it stop as before a preemption."""
    process = start(plan_path)
    wait_until(lambda: step in lines_of(plan_path.parents[2]), process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(TIMEOUT_S) == 0, plan_path.with_name("output.txt").read_text()
    report = codec.read(plan_path.with_name("report.json"), Report)
    assert report.ending is Ending.PREEMPTED
    return report


def folders_of_runs(profile) -> list[Path]:
    return list(Path(profile.cache_dir).parent.parent.glob("streams/run-*"))


def wait_until(condition, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)


def test_a_run_that_was_killed_goes_on_with_the_losses_of_one_that_was_not(profile, tmp_path):
    process = start(attempt(tmp_path / "killed", profile))
    wait_until(lambda: len(lines_of(tmp_path / "killed")) >= 5, process)
    (folder,) = folders_of_runs(profile)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + TIMEOUT_S
    while folder.exists():
        assert time.monotonic() < deadline, "the producer outlived its rank"
        time.sleep(0.02)

    last = max(max(lines_of(tmp_path / "killed")) + 6, LAST_STEP)
    resumed = stopped_after(attempt(tmp_path / "killed", profile, number=2, resume=True), last)
    assert resumed.resumed_from_step is not None and resumed.resumed_from_step >= 3

    straight = stopped_after(attempt(tmp_path / "straight", profile), last)
    assert [incident for incident in straight.incidents if "began again" in incident]
    assert [evaluation.step for evaluation in straight.evaluations[:2]] == [6, 12]
    lines, expected = lines_of(tmp_path / "killed"), lines_of(tmp_path / "straight")
    steps = range(1, last + 1)
    assert [lines[step]["loss"] for step in steps] == [expected[step]["loss"] for step in steps], "not bitwise equal"
    assert all("epoch" not in line for line in lines.values())
    assert folders_of_runs(profile) == []
