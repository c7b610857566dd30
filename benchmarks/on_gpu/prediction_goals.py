"""The goals of piece `prediction`, and the statistics behind them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from accuracy import percentile

from on_gpu.case import Outcome
from on_gpu.goals import Goal
from on_gpu.pieces import Row
from on_gpu.prediction_caps import CapRow, cap_rows
from on_gpu.prediction_rows import DEVICE, PEAK, TOKENS, CaseRow, Figure, case_rows, raised
from trainer.spec.units import format_bytes

PEAK_MEDIAN, PEAK_P95, DEVICE_WORST, TOKENS_MEDIAN = 0.03, 0.08, 0.08, 0.08
LEAST_CASES = 60  # fewer say nothing of a 95th percentile
P95 = 0.95


class Scatter(NamedTuple):
    """How far a figure is off: shares of what was measured."""

    num_cases: int
    median: float  # of the absolute errors
    p95: float
    worst: float  # signed
    worst_name: str


class Verdicts(NamedTuple):
    """What plans said of a card, beside what came of it; names of what they were wrong about."""

    num_fitted: int  # said to fit, and ran
    num_refused: int  # said not to fit, and ran out of memory
    ran_out: tuple[str, ...]  # said to fit
    would_run: tuple[str, ...]  # said not to fit


def scatter(rows: Sequence[CaseRow], figure: Figure) -> Scatter | None:
    """The errors of a figure over the cases that have one; None where none has."""
    errors = {row.name: error for row in rows if (error := figure.error(row)) is not None}
    if not errors:
        return None
    sizes = [abs(error) for error in errors.values()]
    worst = max(errors, key=lambda name: abs(errors[name]))
    return Scatter(len(errors), percentile(sizes, 0.5), percentile(sizes, P95), errors[worst], worst)


def verdicts(cases: Sequence[CaseRow], caps: Mapping[str, Sequence[CapRow]]) -> Verdicts:
    """Of every case as it ran, and of every card that a cap stood for; on a CPU a cap holds the libraries too."""
    told = [
        (row.name, row.result.said_fits, row.outcome is Outcome.RAN)
        for row in cases
        if row.outcome in (Outcome.RAN, Outcome.OUT_OF_MEMORY) and row.result.said_fits is not None
    ]
    told += [
        (f"{name}, on {format_bytes(row.cap_bytes + row.context_bytes)}", row.said_fits, row.has_run)
        for name, capped in caps.items()
        for row in capped
        if row.outcome in (Outcome.RAN, Outcome.OUT_OF_MEMORY) and not row.is_rehearsal
    ]
    return Verdicts(
        num_fitted=sum(1 for _, fits, ran in told if fits and ran),
        num_refused=sum(1 for _, fits, ran in told if not fits and not ran),
        ran_out=tuple(name for name, fits, ran in told if fits and not ran),
        would_run=tuple(name for name, fits, ran in told if not fits and ran),
    )


def goals(rows: Mapping[str, Row]) -> list[Goal]:
    """What is asked of the predictions."""
    cases = case_rows(rows)
    peak, device, tokens = (scatter(cases, figure) for figure in (PEAK, DEVICE, TOKENS))
    found = verdicts(cases, cap_rows(rows))
    num_told = found.num_fitted + found.num_refused + len(found.ran_out) + len(found.would_run)
    broken = _broken(rows, cases)
    return [
        _at_most("peak allocated, median absolute error", peak, peak and peak.median, PEAK_MEDIAN),
        _at_most("peak allocated, 95th percentile of the absolute error", peak, peak and peak.p95, PEAK_P95),
        _at_most("device bytes, worst absolute error", device, device and abs(device.worst), DEVICE_WORST),
        _at_most("tokens/s, median absolute error", tokens, tokens and tokens.median, TOKENS_MEDIAN),
        Goal(
            name='plans that say "fits" and run out of memory',
            wanted="none",
            figure=f"{len(found.ran_out)} of {num_told}" if num_told else None,
            is_met=not found.ran_out if num_told else None,
            reason="; ".join(found.ran_out) or "nothing has run",
            next_step="their events beside the phases that were measured; the margin of the event that ran out",
        ),
        Goal(
            name="configurations that were predicted and measured",
            wanted=f"at least {LEAST_CASES}",
            figure=str(peak.num_cases) if peak else None,
            is_met=peak.num_cases >= LEAST_CASES if peak else None,
            reason="; ".join(broken) or "the other steps have not run yet",
            next_step="`python benchmarks/gpu.py prediction` until nothing is left, with the libraries that are named",
        ),
    ]


def _at_most(name: str, found: Scatter | None, value: float | None, limit: float) -> Goal:
    return Goal(
        name=name,
        wanted=f"at most {limit:.0%}",
        figure=None if found is None or value is None else f"{value:.1%} of {found.num_cases} cases",
        is_met=None if value is None else value <= limit,
        reason=f"the worst is {found.worst_name}, {found.worst:+.1%}" if found else "no case has measured it",
        next_step="the largest errors of the table, part by part; what is wrong is corrected in the formula"
        if found
        else "`make bench-gpu` on a machine with a GPU",
    )


def _broken(rows: Mapping[str, Row], cases: Sequence[CaseRow]) -> list[str]:
    """What kept cases from running, each reason once with how often."""
    reasons = [
        row.result.reason or str(row.outcome) for row in cases if row.outcome in (Outcome.REFUSED, Outcome.FAILED)
    ]
    reasons += raised(rows)
    return [f"{reasons.count(reason)} x {reason}" for reason in dict.fromkeys(reasons)]
