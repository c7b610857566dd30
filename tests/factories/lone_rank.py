"""One rank in a process of its own, as `accelerate launch` starts it, and the files that it writes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.messages.rank_files import SUPERVISED
from shardwise.trainer.spec.report import Ending, Report

TIMEOUT_S = 300
POLL_S = 0.02
ENDLESS = 100_000  # steps: more than a rank can run before it is stopped, however slow the machine


def start_rank(plan_path: Path, *arguments: str, python: str | None = None) -> "subprocess.Popen[bytes]":
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", SUPERVISED: "1"}
    argv = [python or sys.executable, "-m", "shardwise.trainer", str(plan_path), *arguments]
    with plan_path.with_name("output.txt").open("wb") as output:
        return subprocess.Popen(argv, env=environment, stdout=output, stderr=output)


def run_rank(plan_path: Path, *arguments: str, expected_code: int = 0, python: str | None = None) -> str:
    code = start_rank(plan_path, *arguments, python=python).wait(timeout=TIMEOUT_S)
    output = plan_path.with_name("output.txt").read_text()
    assert code == expected_code, output
    return output


def report_of(plan_path: Path) -> Report:
    return codec.read(plan_path.with_name("report.json"), Report)


def lines_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line for line in lines}


def losses_of(run_dir: Path) -> dict[int, float]:
    return {step: line["loss"] for step, line in lines_of(run_dir).items()}


def wait_for_step(run_dir: Path, step: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while step not in lines_of(run_dir):
        assert process.poll() is None, "the rank ended before this step"
        assert time.monotonic() < deadline, "the rank made no progress"
        time.sleep(POLL_S)


def stop_after_step(plan_path: Path, step: int) -> Report:
    """Runs a rank until it has done this step, and has it stop as Slurm does before a preemption."""
    rank = start_rank(plan_path)
    wait_for_step(plan_path.parents[2], step, rank)
    rank.send_signal(signal.SIGUSR1)
    assert rank.wait(timeout=TIMEOUT_S) == 0, plan_path.with_name("output.txt").read_text()
    report = report_of(plan_path)
    assert report.ending is Ending.PREEMPTED
    return report
