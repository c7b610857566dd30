"""The ladder of `shardwise ladder` on 1B and 8B: its own rungs, planned and run by its own functions, a step a rung.

A ladder of nine rungs on 8B takes longer than a call may, so each rung is climbed by itself, on top of the settings of
those below it that ran or ran out of memory, which is what the command does in one go. In a rehearsal the first few are
climbed.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from launch.ladder import LADDER_STEPS
from launch.ladder_run import Climb, Outcome, climb
from launch.ladder_rungs import Rung, default_rungs, parse_rungs
from launch.ladder_table import ladder_rows
from launch.plan_job import read_inputs
from launch.prepare_data import prepare_data
from on_gpu.bench import Bench
from on_gpu.case import Case
from on_gpu.pieces import Row, Step
from on_gpu.techniques_fp8 import LARGE, SMALL
from on_gpu.techniques_rows import (
    MORE,
    error_of,
    measured_on,
    number,
    one_line,
    percent,
    rows_named,
    section,
    size,
)

PREFIX = "ladder"
CASES = (
    Case(name=SMALL, model=SMALL, seq_len=2048, micro_batch=4, num_steps=LADDER_STEPS),
    Case(name=LARGE, model=LARGE, seq_len=2048, micro_batch=2, num_steps=LADDER_STEPS),
)
EXPECTED_S = {SMALL: 40.0, LARGE: 80.0}
_REHEARSED = "fp32,bf16-mixed,full,lora"


def rungs_of(bench: Bench) -> tuple[Rung, ...]:
    """Those that the command climbs here by itself."""
    return parse_rungs(_REHEARSED) if bench.is_tiny else default_rungs(bench.hardware)


def step_name(case: Case, rung_name: str) -> str:
    return f"{PREFIX} {case.model} {rung_name}"


def steps(bench: Bench, done: Mapping[str, Row]) -> Iterator[Step]:
    """From the lowest rung up. One that stands on a rung which is left for the next call is left as well."""
    for case in CASES:
        below: dict[str, str] = {}
        is_reached = True
        for rung in rungs_of(bench):
            name = step_name(case, rung.name)
            stacked = Rung(name=rung.name, settings=below | rung.settings)
            expected_s = EXPECTED_S[case.model] if is_reached else math.inf
            yield Step(name, partial(rung_row, bench, case, stacked), expected_s)
            is_reached = is_reached and name in done
            if done.get(name, {}).get("is_climbed"):
                below = stacked.settings


def rung_row(bench: Bench, case: Case, rung: Rung) -> Row:
    """What the ladder says of one rung."""
    words = bench.job_words(case)
    job = _job_file(bench.work)
    inputs = read_inputs(job, words, environment=bench.environment)
    data = prepare_data(inputs.request, on_progress=lambda _: None)
    around = Climb(job, words, inputs, data, case.num_steps, bench.console, bench.stop, bench.environment)
    results = climb(around, [rung])
    if not results:
        return {"error": "stopped"}
    found: Row = ladder_rows(results)[0]
    return {**found, "is_climbed": results[0].is_climbed, MORE: measured_on(bench)}


def _job_file(work: Path) -> Path:
    """A job file that says nothing: the words of the command line say all."""
    path = work / "ladder.yaml"
    path.write_text("{}\n")
    return path


def tables(rows: Mapping[str, Row]) -> str:
    return "\n".join(_table(rows, case) for case in CASES)


def _table(rows: Mapping[str, Row], case: Case) -> str:
    mine = rows_of(rows, case)
    lines: list[list[str]] = []
    below: Row = {}
    for name, row in mine.items():
        error = row.get("error")
        lines.append([
            name.removeprefix(step_name(case, "")),
            size(row.get("peak_bytes")),
            size(row.get("predicted_peak_bytes")),
            percent(row.get("peak_error")),
            percent(_change(row, below, "peak_bytes")),
            number(row.get("step_s")),
            number(row.get("predicted_step_s")),
            percent(error_of(row.get("predicted_step_s"), row.get("step_s"))),
            percent(_change(row, below, "step_s")),
            one_line(error or (f"{row['outcome']}: {row['reason']}" if row["reason"] else row["outcome"])),
        ])  # fmt: skip
        below = row if row.get("outcome") == Outcome.RAN else below
    header = (
        "rung", "peak", "predicted", "error", "change", "step, s", "predicted", "error", "change", "outcome"
    )  # fmt: skip
    about = (
        f"`shardwise ladder` with rows of {case.seq_len:,} tokens, {case.micro_batch} in a micro batch, one micro "
        "batch a step. Each rung is on top of those above it; a change is against the last one that ran to its end."
    )
    return section(f"The ladder on {case.model}", about, header, lines, mine.values())


def rows_of(rows: Mapping[str, Row], case: Case) -> dict[str, Row]:
    """The rungs of a model that were climbed, from the lowest up."""
    return rows_named(rows, (name for name in rows if name.startswith(step_name(case, ""))))


def _change(row: Row, below: Row, name: str) -> float | None:
    value, base = row.get(name), below.get(name)
    return None if value is None or not base else value / base - 1
