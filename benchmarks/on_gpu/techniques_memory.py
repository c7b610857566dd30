"""What is recomputed, and what lives in host RAM: tokens a second and peak bytes of one model, one change at a time.

Three comparisons: the checkpointing variants on 1B, with and without activations in host RAM; the same on 8B, where a
share of the card's peak is asked for; and on 3B what offload of state costs and saves on one device.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from on_gpu.bench import Bench
from on_gpu.case import Case
from on_gpu.pieces import Row, Step
from on_gpu.techniques_fp8 import LARGE, SMALL, mfu_of
from on_gpu.techniques_rows import (
    PLAIN,
    cases_to_run,
    memory_cells,
    more_of,
    outcome_words,
    percent,
    rate_of,
    ratio,
    result_of,
    rows_named,
    run_case,
    section,
    size,
    speed_cells,
    times,
)
from trainer.spec.strategy import Checkpointing

MIDDLE = "llama-3.2-3b"


class Comparison(NamedTuple):
    """Cases that differ in one thing; the first is what the others are held to."""

    title: str
    about: str
    cases: tuple[Case, ...]
    expected_s: float


def _cases(prefix: str, common: Case, changes: Mapping[str, Mapping[str, str]]) -> tuple[Case, ...]:
    """`common` with each change of its settings, named after it."""
    return tuple(
        replace(common, name=f"{prefix} {common.model} {name}", settings={**common.settings, **change})
        for name, change in changes.items()
    )


def _recomputed(kind: Checkpointing, *, compiled: bool = False, offloaded: bool = False) -> dict[str, str]:
    change = {"pin.checkpointing": str(kind), "pin.compile": "true" if compiled else "false"}
    return change | ({"pin.activation_offload": "true"} if offloaded else {})


def recomputation() -> Comparison:
    """The variants on a small model, where their memory is easiest to tell apart."""
    common = Case(name="", model=SMALL, settings=PLAIN | {"pin.precision": "bf16-mixed"}, seq_len=4096, micro_batch=4)
    changes = {str(kind): _recomputed(kind) for kind in Checkpointing}
    for kind in (Checkpointing.NONE, Checkpointing.FULL):
        changes[f"{kind}, activations in host RAM"] = _recomputed(kind, offloaded=True)
    return Comparison(
        "What is recomputed",
        "Llama-3.2-1B, bf16-mixed, four rows of 4,096 tokens a step; `every_n` recomputes every second block. The "
        "first line keeps everything.",
        _cases("recompute", common, changes),
        35,
    )


def large_recomputation() -> Comparison:
    """8B with every weight trained in bf16; the planner chooses attention kernel and loss head."""
    settings = {key: value for key, value in PLAIN.items() if key not in ("pin.attention", "pin.loss")}
    common = Case(name="", model=LARGE, settings=settings | {"pin.precision": "bf16"}, seq_len=4096, micro_batch=4)
    kinds = (
        Checkpointing.FULL, Checkpointing.ATTENTION, Checkpointing.EVERY_N, Checkpointing.SELECTIVE, Checkpointing.NONE
    )  # fmt: skip
    cases = _cases("recompute", common, {f"{kind} compiled": _recomputed(kind, compiled=True) for kind in kinds})
    longer = replace(common, seq_len=8192)
    cases += _cases("recompute", common, {"full": _recomputed(Checkpointing.FULL)})
    cases += _cases("recompute", longer, {"full compiled, 8k": _recomputed(Checkpointing.FULL, compiled=True)})
    return Comparison(
        "8B, every weight trained in bf16",
        "Llama-3.1-8B in pure bf16 with AdamW, four rows of 4,096 tokens a step (8,192 where it says 8k), attention "
        "kernel and loss head as the planner chooses. MFU counts 6 N + 12 L q s FLOPs a token, attention as if it were "
        "not causal, what is recomputed not at all, against the card's dense bf16 peak.",
        cases,
        80,
    )


def offload() -> Comparison:
    """State in host RAM on one device."""
    settings = PLAIN | {"pin.precision": "bf16-mixed", "pin.checkpointing": "full"}
    common = Case(name="", model=MIDDLE, settings=settings, seq_len=2048, micro_batch=4, num_steps=5)
    ours = {"pin.optimizer": "deepspeed_cpu_adam"}
    changes = {
        "all on the device": {},
        "ZeRO-2, optimizer": {"pin.sharding": "zero2", "pin.offload": "optimizer", **ours},
        "ZeRO-3, optimizer": {"pin.sharding": "zero3", "pin.offload": "optimizer", **ours},
        "ZeRO-3, optimizer and parameters": {"pin.sharding": "zero3", "pin.offload": "optimizer+params", **ours},
        "FSDP2, optimizer and parameters": {"pin.sharding": "fsdp", "pin.offload": "optimizer+params"},
    }
    return Comparison(
        "State in host RAM",
        "Llama-3.2-3B, bf16-mixed, full checkpointing, four rows of 2,048 tokens a step, one device. Host bytes are "
        "those of the rank that no file backs, beside what the plan says of the node, pinned and pageable.",
        _cases("offload", common, changes),
        75,
    )


COMPARISONS = (large_recomputation(), recomputation(), offload())


def steps(bench: Bench, _done: Mapping[str, Row]) -> Iterator[Step]:
    for comparison in COMPARISONS:
        for case in cases_to_run(bench, comparison.cases):
            yield Step(case.name, partial(run_case, bench, case), comparison.expected_s)


def tables(rows: Mapping[str, Row]) -> str:
    return "\n".join(_table(rows, comparison) for comparison in COMPARISONS)


def _table(rows: Mapping[str, Row], comparison: Comparison) -> str:
    mine = rows_named(rows, (case.name for case in comparison.cases))
    base = rows.get(comparison.cases[0].name)
    lines = []
    for case in comparison.cases:
        row = mine.get(case.name)
        if row is None:
            continue
        measured = result_of(row).measured.memory
        lines.append([
            case.name.split(" ", 2)[2],
            *speed_cells(row),
            times(ratio(rate_of(row), None if base is None else rate_of(base))),
            percent(mfu_of(row), is_change=False),
            *memory_cells(row),
            size(measured.host_bytes),
            size(more_of(row).get("predicted_host_bytes")),
            outcome_words(row),
        ])  # fmt: skip
    header = (
        "", "tokens/s", "predicted", "error", "of the first", "MFU", "peak", "predicted", "error", "host", "predicted",
        "outcome",
    )  # fmt: skip
    return section(comparison.title, comparison.about, header, lines, mine.values())


def best_with_checkpointing(
    rows: Mapping[str, Row], *, peak_flops_per_s: float | None = None
) -> tuple[str, float] | None:
    """The 8B case with recomputation that has the largest MFU, and that MFU; None where none ran on a card."""
    found = {}
    for case in large_recomputation().cases:
        share = mfu_of(rows[case.name], peak_flops_per_s) if case.name in rows else None
        if share is not None and case.settings["pin.checkpointing"] != Checkpointing.NONE:
            found[case.name] = share
    return max(found.items(), key=lambda one: one[1], default=None)
