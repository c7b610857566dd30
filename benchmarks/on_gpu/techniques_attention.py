"""Flash against SDPA against eager attention by the length of rows, on one model, with as many tokens in every step.

Nothing is recomputed, so that what a kernel keeps for its backward shows in the peak. Once eager attention has run out
of memory, longer rows of it are not tried: their scores grow with the square of the length.
"""

from collections.abc import Iterator, Mapping
from functools import partial

from on_gpu.bench import Bench
from on_gpu.case import Case, Outcome
from on_gpu.pieces import Row, Step
from on_gpu.techniques_fp8 import SMALL
from on_gpu.techniques_rows import (
    PLAIN,
    largest_difference,
    memory_cells,
    number,
    outcome_words,
    rate_of,
    ratio,
    result_of,
    rows_named,
    run_case,
    section,
    speed_cells,
    times,
)
from trainer.spec.strategy import Attention

PREFIX = "attention"
LENGTHS = (512, 2048, 4096, 8192, 16384, 32768)
TOKENS = 8192  # of a micro batch, or one row where that is longer
KERNELS = (Attention.SDPA, Attention.FLASH, Attention.EAGER)  # the first is what losses are held to


def case_of(kernel: Attention, seq_len: int) -> Case:
    return Case(
        name=f"{PREFIX} {kernel} {seq_len}",
        model=SMALL,
        settings=PLAIN | {"pin.precision": "bf16", "pin.checkpointing": "none", "pin.attention": str(kernel)},
        seq_len=seq_len,
        micro_batch=max(1, TOKENS // seq_len),
    )


def cases() -> tuple[Case, ...]:
    return tuple(case_of(kernel, seq_len) for seq_len in LENGTHS for kernel in KERNELS)


def steps(bench: Bench, done: Mapping[str, Row]) -> Iterator[Step]:
    for seq_len in LENGTHS[::2] if bench.is_tiny else LENGTHS:
        for kernel in KERNELS:
            case = case_of(kernel, seq_len)
            if ran_out_below(done, kernel, seq_len) is None:
                yield Step(case.name, partial(run_case, bench, case), expected_s=35)


def ran_out_below(done: Mapping[str, Row], kernel: Attention, seq_len: int) -> int | None:
    """The shorter length at which this kernel was out of memory already."""
    for shorter in LENGTHS:
        row = done.get(case_of(kernel, shorter).name)
        if shorter < seq_len and row is not None and row.get("outcome") == Outcome.OUT_OF_MEMORY:
            return shorter
    return None


def tables(rows: Mapping[str, Row]) -> str:
    lines = []
    for seq_len in LENGTHS:
        base = rows.get(case_of(KERNELS[0], seq_len).name)
        for kernel in KERNELS:
            line = _line(rows, kernel, seq_len, base)
            if line is not None:
                lines.append(line)
    header = (
        "rows of", "kernel", "tokens/s", "predicted", "error", f"of {KERNELS[0]}", "peak", "predicted", "error",
        "loss, largest difference", "outcome",
    )  # fmt: skip
    about = (
        f"Llama-3.2-1B in bf16, nothing recomputed, {TOKENS:,} tokens a step, or one row where that is longer. The "
        f"difference is the largest of any step's loss from that with {KERNELS[0]}, same rows and weights."
    )
    mine = rows_named(rows, (case.name for case in cases()))
    return section("Attention kernels by length of row", about, header, lines, mine.values())


def _line(rows: Mapping[str, Row], kernel: Attention, seq_len: int, base: Row | None) -> list[str] | None:
    row = rows.get(case_of(kernel, seq_len).name)
    if row is None:
        shorter = ran_out_below(rows, kernel, seq_len)
        if shorter is None:
            return None
        told = f"not tried: out of memory at {shorter:,}"
        return [f"{seq_len:,}", str(kernel), *["-"] * 8, told]
    same = base is not None and base is not row
    difference = largest_difference(result_of(row).losses, result_of(base).losses) if same and base else None
    return [
        f"{seq_len:,}",
        str(kernel),
        *speed_cells(row),
        times(ratio(rate_of(row), None if base is None else rate_of(base))),
        *memory_cells(row),
        number(difference),
        outcome_words(row),
    ]
