"""Piece `techniques`: FP8, the ladder, attention kernels, recomputation, offload, and methods at equal memory."""

from collections.abc import Iterator, Mapping

from on_gpu import (
    techniques_attention,
    techniques_equal,
    techniques_fp8,
    techniques_gemm,
    techniques_ladder,
    techniques_memory,
)
from on_gpu.bench import Bench
from on_gpu.goals import Goal, at_least
from on_gpu.pieces import Piece, Row, Step
from on_gpu.techniques_rows import outcome_words, percent, ratio, result_of

LEAST_FP8_RATIO = 1.28
LEAST_MFU, MFU_PEAK_FLOPS_PER_S = 0.58, 989e12  # dense bf16 of an H100 or H200
# In the order of the steps: what goals are asked of comes first.
PARTS = (
    techniques_gemm, techniques_fp8, techniques_memory, techniques_ladder, techniques_attention, techniques_equal
)  # fmt: skip


def steps(bench: Bench, done: Mapping[str, Row]) -> Iterator[Step]:
    """Those of every part."""
    for part in PARTS:
        yield from part.steps(bench, done)


def tables(rows: Mapping[str, Row]) -> dict[str, str]:
    return {"techniques": "\n" + "\n".join(part.tables(rows) for part in PARTS)}


def goals(rows: Mapping[str, Row]) -> tuple[Goal, ...]:
    """What FP8 and 8B are held to, on one card."""
    return (_fp8_goal(rows), _mfu_goal(rows))


def _fp8_goal(rows: Mapping[str, Row]) -> Goal:
    setup = techniques_fp8.SETUPS[0]
    fp8, bf16 = (techniques_fp8.best_rate(rows, setup, is_fp8=is_fp8) for is_fp8 in (True, False))
    gain = ratio(fp8[1], bf16[1]) if fp8 and bf16 else None
    figure = f"{gain:.2f}x: {fp8[0]} over {bf16[0]}" if gain is not None and fp8 and bf16 else None
    return Goal(
        name=f"FP8 against bf16, {setup.model}, tokens/s of the fastest of each",
        wanted=f"at least {LEAST_FP8_RATIO}x",
        figure=figure,
        is_met=at_least(gain, LEAST_FP8_RATIO),
        reason=_why_no_fp8(rows, setup) if gain is None else "the matrix products alone gain as the shapes above say",
        next_step="larger micro batches, or the recipe that the table of shapes has first",
    )


def _why_no_fp8(rows: Mapping[str, Row], setup: techniques_fp8.Setup) -> str:
    """What became of the FP8 runs, where none of them gave a figure."""
    found = {outcome_words(row) for name, row in rows.items() if name.startswith(f"fp8 {setup.model} fp8")}
    return "; ".join(sorted(found)) or "no FP8 run was made"


def _mfu_goal(rows: Mapping[str, Row]) -> Goal:
    best = techniques_memory.best_with_checkpointing(rows, peak_flops_per_s=MFU_PEAK_FLOPS_PER_S)
    name, share = best or ("", None)
    predicted = result_of(rows[name]).predicted.speed.mfu if best else None
    return Goal(
        name="bf16, every weight of 8B, with checkpointing: MFU of 989 TFLOP/s, FLOPs of attention not causal",
        wanted=f"at least {LEAST_MFU:.0%}",
        figure=None if share is None else f"{share:.1%}: {name}",
        is_met=at_least(share, LEAST_MFU),
        reason="no such run was made" if share is None else f"the plan says {percent(predicted, is_change=False)}",
        next_step="where the step's time goes: the parts of a step, and the ceilings of the card",
    )


PIECE = Piece(
    name="techniques",
    about="FP8, the ladder, attention, recomputation, offload, methods",
    steps=steps,
    tables=tables,
    goals=goals,
)
