"""Run directories, and the process of their trackers, as the supervisor starts it."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from run_factory import append_steps, run_plan

from shardwise.launch.attempt.supervisor import StopRequest
from shardwise.launch.terminal import Console
from shardwise.launch.track.offline import read_records
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


def tracker_order(**changes: Any) -> TrackerOrder:
    return TrackerOrder(**{"name": "bot-1", "project": "shardwise", "first_attempt": 1, **changes})


def tracker_environment(home: Path, **more: str) -> dict[str, str]:
    retained = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "SLURM"))}
    return {**retained, "HOME": str(home), **more}


class Trackers:
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


class LoggedRun:
    """What wandb wrote offline: the records of one log, read back by its own messages."""

    def __init__(self, log: Path) -> None:
        self.records = [_parsed(record) for record in read_records(log)]

    def of(self, kind: str) -> list[Any]:
        return [getattr(record, kind) for record in self.records if record.WhichOneof("record_type") == kind]

    @property
    def identity(self) -> str:
        return str(self.of("run")[0].run_id)

    @property
    def config(self) -> dict[str, Any]:
        return {item.key: json.loads(item.value_json) for item in self.of("run")[0].config.update}

    @property
    def history(self) -> list[dict[str, Any]]:
        return [_items(row.item) for row in self.of("history")]

    @property
    def metrics(self) -> dict[str, Any]:
        return {metric.name: metric for metric in self.of("metric") if metric.name}

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = {}
        for update in self.of("summary"):
            summary.update(_items(update.update))
        return summary

    @property
    def alerts(self) -> list[tuple[str, str]]:
        return [(alert.title, alert.text) for alert in self.of("alert")]


def _parsed(record: bytes) -> Any:
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]  # protobuf makes it at run time

    parsed = Record()
    parsed.ParseFromString(record)
    return parsed


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


__all__ = ["EndNotice", "WandbMode", "append_steps"]  # that tests import from here
