"""Run directories, and the process of their trackers, as the supervisor starts it."""

import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from run_factory import metrics_row, run_plan

from shardwise.launch.attempt.supervisor import StopRequest
from shardwise.launch.terminal import Console
from shardwise.launch.track.start import TrackerProcess
from shardwise.launch.track.tracker import EndNotice, TrackerOrder
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.job.sections import LogJob, WandbMode
from shardwise.trainer.spec.plan import Plan


def logged_plan(**log: Any) -> Plan:
    plan = run_plan()
    return replace(plan, job=replace(plan.job, log=LogJob(**log)))


def write_plan(run_dir: Path, attempt: int = 1, plan: Plan | None = None) -> None:
    folder = run_dir / "attempts" / str(attempt)
    folder.mkdir(parents=True)
    codec.write(folder / "plan.json", plan or run_plan())


def append_steps(run_dir: Path, steps: Sequence[int], *, attempt: int = 1, **fields: Any) -> None:
    with (run_dir / "metrics.jsonl").open("a") as stream:
        for step in steps:
            stream.write(json.dumps({**metrics_row(step, attempt), **fields}) + "\n")


def tracker_order(**changes: Any) -> TrackerOrder:
    return TrackerOrder(**{"name": "bot-1", "project": "shardwise", "first_attempt": 1, **changes})


def tracker_environment(home: Path, **more: str) -> dict[str, str]:
    """With a home of its own, in which nobody is logged in."""
    retained = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "SLURM"))}
    return {**retained, "HOME": str(home), **more}


class Trackers:
    """The trackers of a run directory, and what their supervisor's console shows."""

    def __init__(self, run_dir: Path, order: TrackerOrder, environment: dict[str, str]) -> None:
        self.stream = io.StringIO()
        self.stop = StopRequest()
        self.process = TrackerProcess(order, run_dir, Console(self.stream), environment)

    def end(self, word: EndNotice = EndNotice(has_report=False)) -> str:  # noqa: B008  # it never changes
        self.process.end(word, self.stop)
        return self.stream.getvalue()


def write_program(folder: Path, text: str) -> Path:
    """A program of a person's own, that is run by this Python."""
    path = folder / "program"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


__all__ = [
    "EndNotice", "Trackers", "WandbMode", "append_steps", "logged_plan", "tracker_environment", "tracker_order",
    "write_plan", "write_program",
]  # fmt: skip
