"""Answers to what published measurements left open about memory, each from rows of piece `prediction`.

Every question is there, whether it has an answer or not: what is not measured yet says by which step it would be, and
what takes several GPUs is named as that.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from written_page import markdown_table

from on_gpu.case import Outcome
from on_gpu.pieces import Row
from on_gpu.prediction_rows import ALLOCATOR, DEVICE, PEAK, PROBE, RESERVED, CaseRow, case_rows
from trainer.spec.strategy import Optimizer
from trainer.spec.units import MIB, format_bytes

SEVERAL_GPUS = "takes several GPUs: not measured here"
NOT_YET = "not measured yet"
_HEAD = ("question", "measured", "predicted")
_PAGED = (Optimizer.PAGED_ADAMW, Optimizer.PAGED_ADAMW_8BIT)
_8_BIT = (Optimizer.ADAMW_8BIT, Optimizer.PAGED_ADAMW_8BIT)

Line = tuple[str, str, str]
Reading = Callable[[CaseRow], float | None]


def answers(rows: Mapping[str, Row]) -> str:
    """A table of the questions, with a line for each thing that was asked of the device."""
    cases = [row for row in case_rows(rows) if row.outcome is Outcome.RAN]
    probes = {name: row for name, row in rows.items() if row.get("kind") == PROBE}
    lines = [
        *_several_gpus(),
        *_loss_heads(_probe(probes, "loss")),
        *_compiled(cases),
        *_allocator(cases, [row for row in case_rows(rows, ALLOCATOR) if row.outcome is Outcome.RAN]),
        *_context(cases, _probe(probes, "context")),
        *_eight_bit(cases),
        *_paged(cases),
        *_loading([row for name, row in probes.items() if name.startswith(f"{PROBE}: load")]),
        *_cublas(_probe(probes, "context")),
    ]
    words = "### What published figures left open\n\nBytes a logit are of tokens of a micro batch x vocabulary.\n"
    return f"{words}\n{markdown_table(_HEAD, lines)}"


def _probe(probes: Mapping[str, Row], name: str) -> Row | None:
    return probes.get(f"{PROBE}: {name}")


def _several_gpus() -> Iterator[Line]:
    yield "what frozen blocks retain under FSDP, 4h bytes a token or not", SEVERAL_GPUS, "-"
    yield "blocks that FSDP2 gathers ahead, its reduce-scatter buffers", SEVERAL_GPUS, "-"
    yield "bytes of NCCL, by number of groups", SEVERAL_GPUS, "-"
    yield "load under FSDP, rank 0 sending to the others", SEVERAL_GPUS, "-"


def _loss_heads(row: Row | None) -> Iterator[Line]:
    """Bytes a logit: the slope over the vocabulary, so that what the blocks hold is not in it."""
    found: Mapping[str, Any] = {} if row is None else row.get("variants", {})
    if row is None or not found:
        yield "loss heads, bytes a logit", _why(row), "-"
        return
    for variant, answer in found.items():
        peaks = answer.get("peaks")
        measured = _slopes(peaks, row) if peaks else f"{NOT_YET}: {answer['reason']}"
        predicted = row["predicted"].get(variant)
        yield (
            f"loss head `{variant}`, bytes a logit in the forward, in the backward",
            measured,
            _slopes(predicted, row) if isinstance(predicted, list) else predicted or "no head of ours",
        )


def _slopes(peaks: Sequence[Mapping[str, int]], row: Row) -> str:
    large, small = peaks
    num_logits = row["tokens"] * (row["vocabularies"][0] - row["vocabularies"][1])
    return ", ".join(f"{(large[phase] - small[phase]) / num_logits:.2f}" for phase in ("forward", "backward"))


def _compiled(cases: Sequence[CaseRow]) -> Iterator[Line]:
    mine = [row for row in cases if row.result.case.settings.get("pin.compile") == "true"]
    if not mine:
        yield "compiled blocks, peak allocated", NOT_YET, "-"
    for row in mine:
        yield f"compiled blocks, peak allocated of {row.name}", _bytes(PEAK.measured(row)), _bytes(PEAK.predicted(row))


def _allocator(cases: Sequence[CaseRow], others: Sequence[CaseRow]) -> Iterator[Line]:
    ours = {row.name: row for row in cases}
    pairs = [(ours[row.name], row) for row in others if row.name in ours]
    if not pairs:
        yield "reserved / allocated, with and without expandable segments", NOT_YET, "-"
    for expandable, plain in pairs:
        yield (
            f"reserved / allocated of {expandable.name}, with and without expandable segments",
            f"{_ratio(expandable, measured=True)}, {_ratio(plain, measured=True)}",
            _ratio(expandable, measured=False),
        )


def _ratio(row: CaseRow, *, measured: bool) -> str:
    reserved, peak = (figure.measured(row) if measured else figure.predicted(row) for figure in (RESERVED, PEAK))
    return f"{reserved / peak:.3f}" if reserved and peak else "not counted by this device"


def _context(cases: Sequence[CaseRow], row: Row | None) -> Iterator[Line]:
    """What a device has beside what torch reserved; paged state is there too, and is left out."""
    plain = [each for each in cases if _optimizer(each) not in _PAGED]
    every = (_beside(each, DEVICE.measured, RESERVED.measured) for each in plain)
    beside = [num_bytes for num_bytes in every if num_bytes is not None]
    predicted = _bytes(plain[0].context_bytes) if plain and beside else "-"
    if beside:
        spread = f"{_bytes(min(beside))} to {_bytes(max(beside))}, median {_bytes(median(beside))}"
    else:
        spread = "not counted by this device" if plain else NOT_YET
    yield "device bytes beside what is reserved, over all cases", spread, predicted
    stages = (row or {}).get("stages")
    if not stages:
        yield "context of a bare process", _why(row), "-"
        return
    before = row["predicted"]["used_before"] if row is not None else None
    for stage in stages:
        outside = stage["used"] - stage["reserved"] - (before or 0)
        yield f"device bytes beside what is reserved, after {stage['stage']}", _bytes(outside), "-"


def _cublas(row: Row | None) -> Iterator[Line]:
    """What stays allocated that no tensor of ours is."""
    stages = {stage["stage"]: stage for stage in (row or {}).get("stages", ())}
    if row is None or "a backward" not in stages:
        yield "workspaces of cuBLAS, one a thread that multiplies", _why(row), "-"
        return
    held = stages["tensors"]["allocated"]
    grown = [stages[name]["allocated"] - held for name in ("a product", "a product with a bias", "a backward")]
    yield (
        "workspaces of cuBLAS: after a product, one with a bias, a backward",
        ", ".join(f"{num_bytes / MIB:.1f} MiB" for num_bytes in grown),
        f"{row['predicted']['cublas_handle'] / MIB:.1f} MiB a thread",
    )


def _eight_bit(cases: Sequence[CaseRow]) -> Iterator[Line]:
    mine = [row for row in cases if _optimizer(row) in _8_BIT and "optimizer" in row.result.measured.memory.peaks]
    if not mine:
        yield "8-bit optimizer step, peak allocated", NOT_YET, "-"
    for row in mine:
        measured = row.result.measured.memory.peaks["optimizer"]
        yield f"8-bit optimizer step of {row.name}, peak", _bytes(measured), _bytes(row.events.get("optimizer_step"))


def _paged(cases: Sequence[CaseRow]) -> Iterator[Line]:
    mine = [row for row in cases if _optimizer(row) in _PAGED and DEVICE.measured(row) is not None]
    if not mine:
        yield "where paged state is: device bytes beside what is reserved", NOT_YET, "-"
    for row in mine:
        measured = _beside(row, DEVICE.measured, RESERVED.measured)
        predicted = _beside(row, DEVICE.predicted, RESERVED.predicted)
        yield f"paged state and context of {row.name}", _bytes(measured), _bytes(predicted)


def _beside(row: CaseRow, device_of: Reading, reserved_of: Reading) -> float | None:
    """Device bytes that torch has not reserved."""
    device, reserved = device_of(row), reserved_of(row)
    return None if device is None or reserved is None else device - reserved


def _loading(rows: Sequence[Row]) -> Iterator[Line]:
    if not rows:
        yield "the most that is allocated while a model loads", NOT_YET, "-"
    for row in rows:
        peak = row.get("peak")
        predicted = row.get("predicted")
        yield (
            f"the most that is allocated while {row.get('case', 'a model')} loads, and what stays",
            _why(row) if peak is None else f"{_bytes(peak)}, {_bytes(row['held'])}",
            "-" if predicted is None else _bytes(predicted["load"]),
        )


def _optimizer(row: CaseRow) -> Optimizer:
    return Optimizer(row.result.case.settings["pin.optimizer"])


def _why(row: Row | None) -> str:
    """Why there is no answer."""
    words = (row or {}).get("error") or (row or {}).get("reason")
    return f"{NOT_YET}: {words}" if words else NOT_YET


def _bytes(value: float | None) -> str:
    return "-" if value is None else format_bytes(round(value))
