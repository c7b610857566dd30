"""Piece `prediction`: what was predicted of each configuration, beside what it came to.

Its steps, in order: twenty cases that stand for all, single questions to the device (`prediction_probes`), the other
cases, and the smallest cards (`prediction_caps`). A case is planned as anyone's job is and runs a few steps, whether it
fits or not.
"""

from collections.abc import Iterator, Mapping
from functools import partial

from on_gpu import prediction_caps, prediction_probes
from on_gpu.bench import Bench, by_name
from on_gpu.case import Case
from on_gpu.pieces import Piece, Row, Step
from on_gpu.prediction_cases import FIRST, MORE
from on_gpu.prediction_goals import goals
from on_gpu.prediction_rows import row_of
from on_gpu.prediction_runs import expected_s, run_case
from on_gpu.prediction_tables import tables


def steps(bench: Bench, done: Mapping[str, Row]) -> Iterator[Step]:
    """The cases and the questions, the most informative first."""
    yield from _case_steps(bench, FIRST)
    yield from prediction_probes.steps(bench, done)
    yield from _case_steps(bench, MORE)
    yield from prediction_caps.steps(bench, done)


def _case_steps(bench: Bench, cases: tuple[Case, ...]) -> Iterator[Step]:
    for name, case in by_name(cases):
        yield Step(name, partial(_case_row, bench, case), expected_s(bench, case))


def _case_row(bench: Bench, case: Case) -> Row:
    return row_of(run_case(bench, case))


PIECE = Piece(
    name="prediction",
    about="predicted beside measured, on many configurations",
    steps=steps,
    tables=tables,
    goals=goals,
    version=2,
)
