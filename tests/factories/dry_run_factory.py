"""Dry runs in a process of their own: a device that is not there has to be made before the first backward.

    python tests/factories/dry_run_factory.py ROWS.jsonl [--all]     runs the rows without a result, or all of them

In a file of known runs, such as tests/golden/dry_run.jsonl, each line is a request and its result; a line without a
result is still to be run. Tests compare the closed form and the dry run with it.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shardwise.trainer.runtime.run.process import end_with_parent, report_progress
from shardwise.trainer.simulation.__main__ import load_dry_run
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.messages.worker_requests import SimulationRequest
from shardwise.trainer.spec.value import Value


class GoldenResult(Value, frozen=True, kw_only=True):
    """The part of a dry run that does not depend on the machine that ran it."""

    steady_allocated_bytes: int
    peak_allocated_bytes: int
    peak_event: str
    events: dict[str, int]
    parts: dict[str, int]
    peak_reserved_bytes: int
    expandable_reserved_bytes: int
    min_capacity_bytes: int
    pinned_host_bytes: int = 0
    num_parameters: int
    num_trained_parameters: int
    versions: dict[str, str]


class GoldenRow(Value, frozen=True, kw_only=True):
    """One line of the file of known dry runs; without a result, one that is still to be run."""

    name: str
    request: SimulationRequest
    result: GoldenResult | None = msgspec.field(default=None, name="answer")


def run_dry(folder: Path, requests: Mapping[str, SimulationRequest]) -> dict[str, GoldenResult]:
    path = folder / "rows.jsonl"
    rows = [GoldenRow(name=name, request=request) for name, request in requests.items()]
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    ended = subprocess.run([sys.executable, __file__, str(path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return {row.name: row.result for row in read_golden(path) if row.result is not None}


def read_golden(path: Path) -> list[GoldenRow]:
    lines = enumerate(path.read_bytes().splitlines(), start=1)
    return [codec.decode(line, GoldenRow, origin=f"{path}:{number}") for number, line in lines if line.strip()]


def regenerate(path: Path, *, runs_all: bool) -> None:
    simulate = load_dry_run()
    rows = read_golden(path)
    for number, row in enumerate(rows):
        if row.result is not None and not runs_all:
            continue
        found = simulate(row.request)
        result = GoldenResult(**{name: getattr(found, name) for name in GoldenResult.__struct_fields__})
        rows[number] = msgspec.structs.replace(row, result=result)
        codec.write_bytes(path, b"".join(msgspec.json.encode(each) + b"\n" for each in rows))
        report_progress(f"{number + 1} of {len(rows)} {row.name}: {result.peak_allocated_bytes} at {result.peak_event}")


if __name__ == "__main__":
    end_with_parent()
    regenerate(Path(sys.argv[1]), runs_all="--all" in sys.argv[2:])
