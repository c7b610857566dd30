"""The smallest card a case still runs on: its runs are capped ever lower, by halves.

A cap is what PyTorch's allocator may take (on a CPU, what the process may hold beside its libraries); the card that it
stands for is larger by the context. The first cap is what the plan asks for, so that it is put to the test; nothing
smaller than the measured peak can run.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from on_gpu.bench import Bench
from on_gpu.case import Case, Outcome
from on_gpu.pieces import Row, Step
from on_gpu.prediction_cases import CAPPED
from on_gpu.prediction_rows import CAP, CaseRow, case_rows, row_of
from on_gpu.prediction_runs import expected_s, run_case
from trainer.spec.units import MIB
from trainer.spec.value import Value

MOST_RUNS = 5
RESOLUTION = 0.005  # of the cap: what is nearer is one
BEYOND = 1.1  # times a cap that did not run, where none has yet
NUM_STEPS = 4  # the state is there from the first on, and what is left of a step's memory from the second
ROUNDING_BYTES = 2 * MIB  # the allocator takes its memory in such pieces


class CapRow(Value, frozen=True, kw_only=True):
    """One capped run."""

    kind: str = CAP
    outcome: Outcome
    name: str  # of the case
    reason: str | None = None
    is_rehearsal: bool
    cap_bytes: int  # of the allocator
    context_bytes: int
    need_bytes: int  # predicted, context included
    peak_bytes: int  # measured without a cap

    @property
    def has_run(self) -> bool:
        return self.outcome is Outcome.RAN

    @property
    def said_fits(self) -> bool:
        """What a plan says of the card that the cap stands for."""
        return self.need_bytes <= self.cap_bytes + self.context_bytes


def steps(bench: Bench, done: Mapping[str, Row]) -> Iterator[Step]:
    """For each capped case that ran, one run after the other, each at a cap that follows from those before it."""
    for case in CAPPED:
        known = {row.name: row for row in case_rows(done)}.get(case.name)
        if known is None or known.outcome is not Outcome.RAN:
            continue
        tried: list[CapRow] = []
        for number in range(1, MOST_RUNS + 1):
            cap = next_cap(known, tried)
            if cap is None:
                break
            name = f"smallest card {number}: {case.name}"
            yield Step(name, partial(_capped_row, bench, known, cap), expected_s(bench, _short(case, cap)))
            if name not in done or "error" in done[name]:
                break
            tried.append(cap_row(done[name]))


def next_cap(known: CaseRow, tried: Sequence[CapRow]) -> int | None:
    """The cap to try next; None where the smallest that runs is known as closely as it is asked for."""
    least = known.result.measured.memory.peak_allocated_bytes
    need = known.result.need_bytes
    if least is None or need is None:
        return None
    if not tried:
        return max(least, need - known.context_bytes) + ROUNDING_BYTES
    running = [row.cap_bytes for row in tried if row.has_run]
    stopped = max([least, *(row.cap_bytes for row in tried if not row.has_run)])
    if not running:
        return round(BEYOND * stopped)
    if min(running) - stopped <= max(RESOLUTION * min(running), ROUNDING_BYTES):
        return None
    return (min(running) + stopped) // 2


def cap_row(row: Row) -> CapRow:
    """A row of the log as a value."""
    return msgspec.convert(row, CapRow)


def cap_rows(rows: Mapping[str, Row]) -> dict[str, tuple[CapRow, ...]]:
    """The capped runs by the name of their case, in order."""
    found: dict[str, list[CapRow]] = {}
    for row in rows.values():
        if row.get("kind") == CAP and "error" not in row:
            value = cap_row(row)
            found.setdefault(value.name, []).append(value)
    return {name: tuple(values) for name, values in found.items()}


def _capped_row(bench: Bench, known: CaseRow, cap_bytes: int) -> Row:
    beside = 0 if bench.is_tiny else known.context_bytes  # which --vram counts on a GPU
    ran = run_case(bench, _short(known.result.case, cap_bytes + beside), kind=CAP)
    return row_of(
        CapRow(
            outcome=ran.outcome,
            reason=ran.result.reason,
            name=known.name,
            is_rehearsal=bench.is_tiny,
            cap_bytes=cap_bytes,
            context_bytes=known.context_bytes,
            need_bytes=known.result.need_bytes or 0,
            peak_bytes=known.result.measured.memory.peak_allocated_bytes or 0,
        )
    )


def _short(case: Case, cap_bytes: int) -> Case:
    return replace(case, vram_bytes=cap_bytes, num_steps=NUM_STEPS)
