"""The file of known dry runs: one JSON line each, a request and its result.

Tests hold the closed form and the dry run itself to it. The file is its own list of requests: a line without a result
is still to be run.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.messages.simulation import GoldenResult, GoldenRow, Simulation, SimulationRequest


def read_golden(path: Path) -> list[GoldenRow]:
    """The rows of a file."""
    return [codec.decode(line, GoldenRow, origin=f"{path}:{number}") for number, line in _lines(path)]


def golden_result(simulation: Simulation) -> GoldenResult:
    """The stored part of a dry run."""
    return GoldenResult(**{name: getattr(simulation, name) for name in GoldenResult.__struct_fields__})


def regenerate(
    path: Path,
    simulate: Callable[[SimulationRequest], Simulation],
    report: Callable[[str], None],
    *,
    runs_all: bool,
) -> None:
    """Runs the rows of a file that have no result, or all of them, and writes the file after each one."""
    rows = read_golden(path)
    for number, row in enumerate(rows):
        if row.result is not None and not runs_all:
            continue
        result = golden_result(simulate(row.request))
        rows[number] = msgspec.structs.replace(row, result=result)
        codec.write_bytes(path, b"".join(msgspec.json.encode(each) + b"\n" for each in rows))
        report(f"{number + 1} of {len(rows)} {row.name}: {result.peak_allocated_bytes} at {result.peak_event}")


def _lines(path: Path) -> list[tuple[int, bytes]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    return [(number, line) for number, line in enumerate(content.splitlines(), start=1) if line.strip()]
