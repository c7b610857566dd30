"""Dry runs in a process of their own: a device that is not there has to be made before the first backward."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shardwise.trainer.simulation.__main__ import read_golden
from shardwise.trainer.spec.messages.worker_requests import GoldenResult, GoldenRow, SimulationRequest


def run_dry(folder: Path, requests: Mapping[str, SimulationRequest]) -> dict[str, GoldenResult]:
    """The results of named requests, run one after the other in one process."""
    path = folder / "rows.jsonl"
    rows = [GoldenRow(name=name, request=request) for name, request in requests.items()]
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    command = [sys.executable, "-m", "shardwise.trainer.simulation", "--golden", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return {row.name: row.result for row in read_golden(path) if row.result is not None}
