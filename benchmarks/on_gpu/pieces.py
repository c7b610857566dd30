"""Pieces of the benchmark, each a list of steps that take minutes at most, and how they are gone through.

What a step came to is a line of `steps.jsonl` in the work folder, so that whoever is stopped, or has used up the
minutes, goes on with the next step. A step is done again with --again, or where its piece's `version` has moved.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from on_gpu.bench import Bench
from on_gpu.goals import Goal

Row = dict[str, Any]  # plain values: what JSON holds


class Step(NamedTuple):
    """One thing that is measured."""

    name: str  # its own among those of the piece
    run: Callable[[], Row]
    expected_s: float = 60.0  # on a GPU; what is not left of the minutes is left for the next call


class Piece(NamedTuple):
    """One question, its steps, and the tables of its answers."""

    name: str
    about: str  # one line
    steps: Callable[[Bench, Mapping[str, Row]], Iterable[Step]]  # later steps may depend on the rows of earlier ones
    tables: Callable[[Mapping[str, Row]], dict[str, str]]  # Markdown by the name of its place in docs/benchmarks.md
    version: int = 1
    goals: Callable[[Mapping[str, Row]], Sequence[Goal]] = lambda _rows: ()  # what it promised, and what that came to


class StepLog:
    """The rows of every step that is done, by piece and step; appended to as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[dict[str, Any]] = list(_read_lines(path))

    def rows(self, piece: Piece) -> dict[str, Row]:
        """The rows of a piece by the name of their step, the newest of each."""
        mine = (line for line in self._lines if (line["piece"], line["version"]) == (piece.name, piece.version))
        return {line["step"]: line["row"] for line in mine}

    def add(self, piece: Piece, step: str, row: Row) -> None:
        line = {"piece": piece.name, "version": piece.version, "step": step, "row": row}
        self._lines.append(line)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")


class Progress(NamedTuple):
    """How far a piece is."""

    num_done: int
    num_left: int
    num_new: int = 0  # done by this call


def go_through(
    piece: Piece,
    bench: Bench,
    log: StepLog,
    *,
    until_s: float,
    is_again: bool = False,
    most: int | None = None,
    only: str = "",
) -> Progress:
    """Runs the steps that are not done, in order, while minutes are left; `until_s` is of the monotonic clock.

    A step that raises is a row with its error: the others go on.
    """
    done = {} if is_again else log.rows(piece)
    num_left = num_new = 0
    for number, step in enumerate(piece.steps(bench, done)):
        if step.name in done or not re.search(only, step.name):
            continue
        is_late = time.monotonic() + step.expected_s > until_s
        if bench.stop.kind is not None or is_late or (most is not None and number >= most):
            num_left += 1
            continue
        started = time.monotonic()
        try:
            row = step.run()
        except Exception as error:  # noqa: BLE001  # whatever it is, the other steps are worth their answer
            row = {"error": f"{type(error).__name__}: {error}"}
        if bench.stop.kind is not None:
            num_left += 1
            continue
        row = without_folders(row, (bench.work, Path(sys.prefix), Path.home()))
        done[step.name] = row
        num_new += 1
        log.add(piece, step.name, row)
        took = time.monotonic() - started
        bench.console.line(
            f"{piece.name}: {step.name}: {row.get('error') or row.get('outcome', 'done')} ({took:.0f} s)"
        )
    return Progress(len(done), num_left, num_new)


def without_folders(row: Row, folders: Sequence[Path]) -> Row:
    """The row with each of these folders of the machine written as `...`."""
    text = json.dumps(row)
    for folder in (each for each in folders if len(each.parts) > 1):
        text = text.replace(json.dumps(str(folder))[1:-1], "...")
    plain: Row = json.loads(text)
    return plain


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text()
    except OSError:
        return
    for line in text.splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off by a kill
