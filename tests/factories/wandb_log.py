"""What wandb wrote offline, read back from its own log of records by its own messages."""

import json
from pathlib import Path
from typing import Any

from shardwise.launch.track.offline import read_records


class LoggedRun:
    """The records of one log."""

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
        """The definition of each series, by its name."""
        return {metric.name: metric for metric in self.of("metric") if metric.name}

    @property
    def summary(self) -> dict[str, Any]:
        """As the updates leave it."""
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
