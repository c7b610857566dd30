"""What every row of the piece `techniques` says, and the cells that its tables are made of.

A row is a `CaseResult` in plain values and beside it, under `more`, where it was measured and what the plan chose that
a result does not hold. A table is made of rows alone: it says by itself whether it is of a card or of a rehearsal.
"""

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from written_page import markdown_table

from launch.plan_job import PlanInputs
from on_gpu.bench import Bench
from on_gpu.case import Case, CaseResult, Outcome
from on_gpu.pieces import Row
from trainer.planning.gpu_specs import GPU_SPECS
from trainer.spec.data_profile import DataProfile
from trainer.spec.errors import ShardwiseError
from trainer.spec.plan import Candidate, Plan
from trainer.spec.units import format_bytes

MORE = "more"
PLAIN = {  # what a case has that is about something else: state and activations on the device, every weight trained
    "train.method": "full",
    "pin.sharding": "none",
    "pin.offload": "none",
    "pin.activation_offload": "false",
    "pin.attention": "sdpa",
    "pin.loss": "chunked",
    "pin.optimizer": "adamw_fused",
}


def measured_on(bench: Bench) -> dict[str, Any]:
    """Where a row was measured: the device, whether tiny models stood in, the card's dense bf16 peak in FLOP/s."""
    spec = bench.hardware.gpus[0].spec_name if bench.hardware.gpus else None
    peak = GPU_SPECS[spec].bf16_flops_per_s if spec in GPU_SPECS else None
    return {"device": bench.device_name, "is_tiny": bench.is_tiny, "bf16_peak_flops_per_s": peak}


def cases_to_run(bench: Bench, cases: Iterable[Case]) -> Iterator[Case]:
    """All of them on a card. In a rehearsal one that compiles and runs: compiling takes a CPU minutes, each time."""
    has_compiled = False
    for case in cases:
        compiles = case.settings.get("pin.compile") == "true" and case.settings.get("pin.precision") != "fp8"
        if not (bench.is_tiny and compiles and has_compiled):
            yield case
        has_compiled = has_compiled or compiles


def run_case(bench: Bench, case: Case) -> Row:
    """Plans a case, whether it fits or not, and runs it."""
    started = time.monotonic()
    try:
        plan = bench.plan_of(case)
    except ShardwiseError as error:
        return refused_row(bench, case, error)
    return run_plan(bench, case, plan, started=started)


def run_plan(bench: Bench, case: Case, plan: Plan, *, started: float, **more: Any) -> Row:  # noqa: ANN401  # plain values
    """Runs the choice of a plan; `more` is kept beside the result."""
    result = bench.run_planned(case, plan, plan.chosen, started=started)
    return case_row(bench, result, plan.chosen, **more)


def inputs_of(bench: Bench, case: Case) -> tuple[PlanInputs, DataProfile] | Row:
    """What a plan of the case is made from, or its row where the job cannot be read here."""
    try:
        return bench.inputs_of(case)
    except ShardwiseError as error:
        return refused_row(bench, case, error)


def refused_row(bench: Bench, case: Case, error: ShardwiseError) -> Row:
    """The row of a case that cannot be planned here, with the reason."""
    reason = " ".join(str(error).replace("command line: ", "").split())
    return case_row(bench, CaseResult(case=case, outcome=Outcome.REFUSED, reason=reason), None)


def case_row(bench: Bench, result: CaseResult, chosen: Candidate | None, **more: Any) -> Row:  # noqa: ANN401  # plain values
    """A result as a row."""
    plain: Row = msgspec.to_builtins(result)
    return {**plain, MORE: {**measured_on(bench), **_choice(chosen), **more}}


def result_of(row: Row) -> CaseResult:
    """The result that a row holds; a failed one where its step raised."""
    if "error" in row:
        case = Case(name="", model="")
        return CaseResult(case=case, outcome=Outcome.FAILED, reason=row["error"])
    return msgspec.convert({name: value for name, value in row.items() if name != MORE}, CaseResult)


def more_of(row: Row) -> dict[str, Any]:
    """What stands beside the result."""
    found = row.get(MORE)
    return found if isinstance(found, dict) else {}


def rate_of(row: Row | None) -> float | None:
    """Measured tokens a second of one device; None where the case did not run to its end."""
    result = None if row is None else result_of(row)
    if result is None or result.outcome is not Outcome.RAN:
        return None
    return result.measured.speed.tokens_per_s_per_gpu


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """The largest distance of two curves, step by step; None where one is empty or they are of different lengths."""
    if not ours or len(ours) != len(theirs):
        return None
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def _choice(chosen: Candidate | None) -> dict[str, Any]:
    if chosen is None:
        return {}
    return {
        "attention": str(chosen.attention),
        "loss_head": str(chosen.loss),
        "checkpointing": str(chosen.checkpointing),
        "compile": chosen.compile,
        "predicted_host_bytes": chosen.memory.pinned_bytes + chosen.memory.host_bytes,
    }


# Cells.


def outcome_words(row: Row) -> str:
    """`ran`, or what became of it with the reason."""
    result = result_of(row)
    if result.outcome is Outcome.RAN:
        return "ran"
    reason = "" if result.outcome is Outcome.OUT_OF_MEMORY else f": {result.reason}"
    return one_line(f"{result.outcome}{reason}")


def one_line(text: str, longest: int = 160) -> str:
    """Text for a cell of a table."""
    flat = " ".join(text.split()).replace("|", "\\|")
    return flat if len(flat) <= longest else flat[: longest - 1].rstrip() + "…"


def speed_cells(row: Row) -> tuple[str, str, str]:
    """Tokens a second measured and predicted, and the error of the prediction."""
    result = result_of(row)
    measured, predicted = rate_of(row), result.predicted.speed.tokens_per_s_per_gpu
    return number(measured), number(predicted), percent(error_of(predicted, measured))


def memory_cells(row: Row) -> tuple[str, str, str]:
    """Peak allocated bytes measured and predicted, and the error of the prediction."""
    result = result_of(row)
    ran = result.outcome is Outcome.RAN
    measured = result.measured.memory.peak_allocated_bytes if ran else None
    predicted = result.predicted.memory.peak_allocated_bytes
    return size(measured), size(predicted), percent(error_of(predicted, measured))


def error_of(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or not measured else predicted / measured - 1


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


def percent(value: float | None, *, is_change: bool = True) -> str:
    if value is None:
        return "-"
    return f"{value:+.1%}" if is_change else f"{value:.1%}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def median_of(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


# Sections.


def provenance(rows: Iterable[Row]) -> str:
    """Where the figures of a table are from, in a sentence."""
    marks = [found for found in map(more_of, rows) if found]
    tiny = sorted({mark["device"] for mark in marks if mark["is_tiny"]})
    real = sorted({mark["device"] for mark in marks if not mark["is_tiny"]})
    if not marks:
        return "Nothing is measured yet."
    words = [f"Measured on {', '.join(real)}."] if real else []
    if tiny:
        words.append(f"A rehearsal with tiny models and short rows on {', '.join(tiny)}: no figure here is of a card.")
    return " ".join(words)


def section(title: str, about: str, header: Sequence[str], lines: Sequence[Sequence[str]], rows: Iterable[Row]) -> str:
    """A heading, what is compared, where it was measured, and the table; the table is left out while it is empty."""
    table = f"\n{markdown_table(header, lines)}" if lines else ""
    return f"### {title}\n\n{about}\n\n{provenance(rows)}\n{table}"


def rows_named(rows: Mapping[str, Row], names: Iterable[str]) -> dict[str, Row]:
    """Those of the named rows that are there, in the order of the names."""
    return {name: rows[name] for name in names if name in rows}
