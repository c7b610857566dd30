"""The tables of piece `prediction`: how far each figure is off, what plans said of the card, and every case."""

from collections.abc import Iterable, Mapping, Sequence

from written_page import markdown_table

from on_gpu.case import Outcome
from on_gpu.pieces import Row
from on_gpu.prediction_answers import answers
from on_gpu.prediction_caps import CapRow, cap_rows
from on_gpu.prediction_goals import Scatter, scatter, verdicts
from on_gpu.prediction_rows import (
    DEVICE,
    FIGURES,
    PEAK,
    RESERVED,
    STEADY,
    TOKENS,
    CaseRow,
    Figure,
    case_rows,
    is_rehearsal,
    raised,
)
from trainer.spec.strategy import Method
from trainer.spec.units import format_bytes

_SCATTER_HEAD = ("figure", "of", "cases", "median", "95th percentile", "worst", "which is")
_CASE_HEAD = (
    "model", "rows", "configuration", "peak event", "steady", "peak allocated", "reserved", "device", "tokens/s",
    "fits",
)  # fmt: skip
_CAP_HEAD = ("case", "peak measured", "smallest card that ran", "did not run on", "predicted need", "need / smallest")
_SHOWN = (STEADY, PEAK, RESERVED, DEVICE, TOKENS)
_USUAL = {  # what the configuration of a case leaves out
    "pin.sharding": "none",
    "pin.offload": "none",
    "pin.attention": "sdpa",
    "pin.compile": "false",
    "pin.activation_offload": "false",
    "pin.optimizer_in_backward": "false",
}


def tables(rows: Mapping[str, Row]) -> dict[str, str]:
    """Markdown for the place `prediction`."""
    cases = case_rows(rows)
    if not cases:
        return {"prediction": "Nothing was run yet.\n"}
    caps = cap_rows(rows)
    parts = [
        _introduction(cases, is_tiny=is_rehearsal(rows)),
        _scatter_table(cases),
        _verdicts(cases, caps),
        "### Every case\n\nA cell is predicted / measured, and the error; the largest errors of the peak come first.\n",
        markdown_table(_CASE_HEAD, [_case_cells(row) for row in sorted(cases, key=_badness)]),
        _broken(rows, cases),
        _caps_table(caps, is_tiny=is_rehearsal(rows)),
        answers(rows),
    ]
    return {"prediction": "\n".join(part for part in parts if part)}


def _introduction(cases: Sequence[CaseRow], *, is_tiny: bool) -> str:
    device = cases[0].device
    ran = sum(1 for row in cases if row.outcome is Outcome.RAN)
    if is_tiny:
        where = (
            f"**A rehearsal on a CPU** ({device}) with tiny models and short rows: it proves the script, and that the "
            "bytes which the planner counts are those that a process allocates. A CPU has neither reserved nor device "
            "bytes, what is offloaded stays in the memory that it left, and steps of milliseconds say little of the "
            "speed of anything. Where a CPU multiplies in bf16 itself (avx512_bf16, AMX), its peaks hold the working "
            "space of a product too, which no plan counts: 50 KiB to some MiB, which only models this small feel."
        )
    else:
        where = f"Measured on {device}."
    return (
        f"{where} Of {len(cases)} configurations {ran} ran. Every mechanism of a case is pinned, and its plan is made "
        "before it runs, by the formulas alone: no record of an earlier run corrects it. Steady, peak and time are of "
        "steps after the second; an error is prediction / measurement - 1, and the statistics are of its size.\n"
    )


def _scatter_table(cases: Sequence[CaseRow]) -> str:
    rows = []
    for figure in FIGURES:
        groups: list[tuple[str, Sequence[CaseRow]]] = [("all", cases)]
        groups += [(method, [row for row in cases if row.method is method]) for method in Method]
        for name, group in groups:
            found = scatter(group, figure)
            if found is not None:
                rows.append(_scatter_cells(figure, name, found))
            elif name == "all":
                rows.append((figure.name, name, "0", "-", "-", "-", "not counted by this device"))
    return markdown_table(_SCATTER_HEAD, rows)


def _scatter_cells(figure: Figure, group: str, found: Scatter) -> tuple[str, ...]:
    return (
        figure.name,
        group,
        str(found.num_cases),
        f"{found.median:.2%}",
        f"{found.p95:.2%}",
        f"{found.worst:+.2%}",
        found.worst_name,
    )


def _verdicts(cases: Sequence[CaseRow], caps: Mapping[str, Sequence[CapRow]]) -> str:
    found = verdicts(cases, caps)
    lines = [
        'Plans that said "fits" and ran: '
        f'{found.num_fitted}; that said "fits" and ran out of memory: {len(found.ran_out)}; that said "does not fit" '
        f"and ran out: {found.num_refused}; that said so and ran: {len(found.would_run)}.",
        *(f'- said "fits" and ran out: {name}' for name in found.ran_out),
        *(f'- said "does not fit" and ran: {name}' for name in found.would_run),
    ]
    return "\n".join([lines[0], "", *lines[1:]] if lines[1:] else lines) + "\n"


def _badness(row: CaseRow) -> tuple[bool, float]:
    error = PEAK.error(row)
    return error is None, -abs(error or 0.0)


def _case_cells(row: CaseRow) -> tuple[str, ...]:
    case, said = row.result.case, row.result.said_fits
    verdict = "-" if said is None else "yes" if said else "no"
    outcome = "" if row.outcome is Outcome.RAN else f", {row.outcome}"
    return (
        case.model,
        f"{case.micro_batch}x{case.seq_len}",
        configuration(row),
        row.peak_event or "-",
        *(_figure_cell(row, figure) for figure in _SHOWN),
        verdict + outcome,
    )


def configuration(row: CaseRow) -> str:
    """What a case pins, without what most cases have."""
    settings = row.result.case.settings
    named = [value for key, value in settings.items() if key != "allow" and key not in _USUAL]
    return ", ".join([*named, *_unusual(settings)])


def _unusual(settings: Mapping[str, str]) -> Iterable[str]:
    for key, usual in _USUAL.items():
        if settings.get(key, usual) != usual:
            name = key.removeprefix("pin.")
            yield name if settings[key] == "true" else f"{name} {settings[key]}"


def _figure_cell(row: CaseRow, figure: Figure) -> str:
    predicted, measured, error = figure.predicted(row), figure.measured(row), figure.error(row)
    if predicted is None:
        return "-"
    words = _bytes if figure.is_bytes else _count
    if measured is None:
        return f"{words(predicted)} / -" if figure in (STEADY, PEAK) else "-"
    both = f"{words(predicted)} / {words(measured)}"
    return both if error is None else f"{both}, {error:+.1%}"


def _bytes(value: float) -> str:
    return format_bytes(round(value))


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _broken(rows: Mapping[str, Row], cases: Sequence[CaseRow]) -> str:
    lines = [
        f"- {row.name}: {row.outcome}, {row.result.reason or 'no reason was given'}"
        for row in cases
        if row.outcome in (Outcome.REFUSED, Outcome.FAILED)
    ]
    lines += [f"- {words}" for words in raised(rows)]
    return "Not run:\n\n" + "".join(f"{line}\n" for line in lines) if lines else ""


def _caps_table(caps: Mapping[str, Sequence[CapRow]], *, is_tiny: bool) -> str:
    if not caps:
        return ""
    on_cpu = (
        "A CPU's cap is on the data of a process, so it also meets what PEFT, bitsandbytes, GaLore and DeepSpeed load "
        "after it was set: where no card is named, that alone was more than a model of some MiB leaves.\n"
    )
    words = (
        "### The smallest card\n\nThe allocator is held to ever less, beginning with what the plan asks for; a card is "
        "the cap and the context that the plan counts. What a plan asks for beyond the smallest card is its margin.\n"
    )
    words += on_cpu if is_tiny else ""
    return f"{words}\n{markdown_table(_CAP_HEAD, [_cap_cells(name, runs) for name, runs in caps.items()])}"


def _cap_cells(name: str, runs: Sequence[CapRow]) -> tuple[str, ...]:
    first = runs[0]
    cards = [(row.cap_bytes + row.context_bytes, row) for row in runs]
    ran = [card for card, row in cards if row.has_run]
    stopped = [card for card, row in cards if row.outcome is Outcome.OUT_OF_MEMORY]
    others = [f"{row.outcome}: {row.reason}" for row in runs if row.outcome in (Outcome.REFUSED, Outcome.FAILED)]
    smallest = min(ran, default=None)
    return (
        name,
        format_bytes(first.peak_bytes),
        "none" if smallest is None else format_bytes(smallest),
        format_bytes(max(stopped)) if stopped else "; ".join(others) or "none smaller was tried",
        format_bytes(first.need_bytes),
        "-" if smallest is None else f"{first.need_bytes / smallest:.3f}",
    )
