"""What the ladder measured, as rows: for a table, for CSV and JSON, for a page. Pure.

The change of a rung is against the last rung below it that ran to its end.
"""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from launch.run.ladder_run import Outcome, RungResult
from trainer.planning.page.content import Page, PairedBars, Section, Sentence, Table, Unit
from trainer.spec.report import Figures
from trainer.spec.units import format_bytes, format_seconds

PHASES = ("forward", "backward", "optimizer")
_HEADER = ("rung", "peak", "predicted", "error", "change", "step", "predicted", "change")
_RIGHT = tuple(range(1, len(_HEADER)))


def ladder_rows(results: Sequence[RungResult]) -> list[dict[str, Any]]:
    """One mapping a rung, with plain figures: bytes, seconds, shares; None where there is no figure."""
    rows: list[dict[str, Any]] = []
    below: dict[str, Any] = {}
    for result in results:
        row = _row(result, below)
        rows.append(row)
        below = row if result.outcome is Outcome.RAN else below
    return rows


def _row(result: RungResult, below: dict[str, Any]) -> dict[str, Any]:
    measured = Figures() if result.report is None else result.report.measured
    is_whole = result.outcome is Outcome.RAN
    peak = measured.memory.peak_allocated_bytes if is_whole else None
    step_s = measured.speed.step_s if is_whole else None
    memory = None if result.candidate is None else result.candidate.memory
    speed = None if result.candidate is None else result.candidate.speed
    predicted = None if memory is None else memory.peak_allocated_bytes
    predicted_s = None if speed is None else speed.step_s
    return {
        "rung": result.rung.name,
        "outcome": str(result.outcome),
        "peak_bytes": peak,
        "predicted_peak_bytes": predicted,
        "peak_error": _change(predicted, peak),
        "peak_change": _change(peak, below.get("peak_bytes")),
        "step_s": step_s,
        "predicted_step_s": predicted_s,
        "step_change": _change(step_s, below.get("step_s")),
        **{f"{phase}_peak_bytes": measured.memory.peaks.get(phase) for phase in PHASES},
        "steady_bytes": measured.memory.steady_allocated_bytes,
        "need_bytes": None if memory is None else memory.need_bytes,
        "limit_bytes": None if memory is None else memory.usable_bytes,
        "exit_code": None if result.report is None else result.report.exit_code,
        "strategy": None if result.candidate is None else result.candidate.strategy.name,
        "micro_batch": None if result.candidate is None else result.candidate.micro_batch,
        "settings": " ".join(f"{path}={value}" for path, value in result.rung.settings.items()),
        "reason": result.reason,
    }


def ladder_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as CSV with a header; what is not known is empty."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(rows[0]) if rows else ["rung"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def ladder_page(title: str, results: Sequence[RungResult], *, common: str) -> Page:
    """The ladder for a terminal and for HTML; `common` says what is the same on every rung."""
    rows = ladder_rows(results)
    seen = [row for row in rows if row["peak_bytes"] is not None or row["outcome"] == Outcome.OUT_OF_MEMORY]
    blocks = (
        Sentence(text=common),
        Table(rows=(_HEADER, *map(_cells, seen)), right=_RIGHT),
        PairedBars(caption="Peak memory", rows=_pairs(seen, "predicted_peak_bytes", "peak_bytes"), unit=Unit.BYTES),
        PairedBars(caption="Step", rows=_pairs(seen, "predicted_step_s", "step_s"), unit=Unit.SECONDS),
    )
    sections = [Section(title="Each technique on top of those above it", blocks=blocks)]
    phases = [row for row in seen if any(row[f"{phase}_peak_bytes"] for phase in PHASES)]
    if phases:
        sections.append(Section(title="Peak by phase of the step", blocks=(_phase_table(phases),)))
    others = tuple(_told(results, rows))
    if others:
        sections.append(Section(title="Not measured", blocks=others))
    return Page(title=title, sections=tuple(sections))


def _pairs(rows: Sequence[dict[str, Any]], predicted: str, measured: str) -> tuple[tuple[str, Any, Any], ...]:
    return tuple((row["rung"], row[predicted], row[measured]) for row in rows)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    is_whole = row["outcome"] == Outcome.RAN
    return (
        row["rung"],
        _bytes(row["peak_bytes"]) if is_whole else "out of memory",
        _bytes(row["predicted_peak_bytes"]),
        _percent(row["peak_error"]),
        _percent(row["peak_change"]),
        _seconds(row["step_s"]),
        _seconds(row["predicted_step_s"]),
        _percent(row["step_change"]),
    )


def _phase_table(rows: Sequence[dict[str, Any]]) -> Table:
    cells = [(row["rung"], *(_bytes(row[f"{phase}_peak_bytes"]) for phase in PHASES)) for row in rows]
    between = [_bytes(row["steady_bytes"]) for row in rows]
    table = [(*row, steady) for row, steady in zip(cells, between, strict=True)]
    return Table(rows=(("rung", *PHASES, "between steps"), *table), right=(1, 2, 3, 4))


def _told(results: Sequence[RungResult], rows: Sequence[dict[str, Any]]) -> Iterator[Sentence]:
    """What a table has no room for."""
    for result, row in zip(results, rows, strict=True):
        if result.outcome is Outcome.OUT_OF_MEMORY:
            yield Sentence(
                text=f"{row['rung']}: ran out of memory, exit code {row['exit_code']}; predicted to need "
                f"{format_bytes(row['need_bytes'])}, {format_bytes(row['limit_bytes'])} are usable"
            )
        elif result.outcome is not Outcome.RAN:
            yield Sentence(text=f"{row['rung']}: {result.outcome}: {result.reason}")


def _change(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base - 1


def _bytes(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"
