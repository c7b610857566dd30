"""Part 4: FP8 compared with bf16: the speedup of matrix products of the model's own shapes, and of whole runs.

FP8 has fp32 weights, like bf16-mixed, so bf16-mixed is the baseline. Both are compiled, where FP8 is faster. Recipes of
Transformer Engine and of torchao run if the library is installed; the others are refused.
"""

from collections.abc import Mapping
from functools import partial

import msgspec

from on_gpu.bench import Bench
from on_gpu.case import Case, Outcome, Row, result_of
from on_gpu.models import model_config
from on_gpu.programme import Step, case_step
from on_gpu.tables import bytes_cell, markdown_table, number, percent, ratio
from shardwise.launch.plan.fp8 import time_fp8
from shardwise.trainer.spec.messages.worker_requests import Fp8GainRequest
from shardwise.trainer.spec.strategy import Fp8Recipe

PART = "fp8"
MODEL, MICRO_BATCH, SEQ_LEN = "llama-3.2-3b", 2, 4096  # fp32 weights and states of 36 GiB: fits an 80 GB card
GAIN = "products of"
RECIPES = (Fp8Recipe.TORCHAO_TENSORWISE, Fp8Recipe.TORCHAO_ROWWISE, Fp8Recipe.CURRENT)
BASE = "bf16-mixed"


def case_of(precision: str, recipe: Fp8Recipe | None = None) -> Case:
    """A compiled run in this precision."""
    settings = {
        "train.method": "full",
        "allow": "[fp8, compile, bf16_weights]",
        "pin.sharding": "none",
        "pin.optimizer": "adamw_fused",
        "pin.checkpointing": "full",
        "pin.precision": precision,
        "pin.compile": "true",
    }
    if recipe is not None:
        settings["pin.fp8_recipe"] = str(recipe)
    name = precision if recipe is None else f"{precision} {recipe}"
    return Case(name=name, model=MODEL, settings=settings, seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, num_steps=10)


def steps(bench: Bench) -> list[Step]:
    """bf16-mixed, then for each recipe the products and the run, then bf16."""
    found = [case_step(PART, bench, case_of(BASE), is_timed=True)]
    for recipe in RECIPES:
        found.append(Step(PART, f"{GAIN} {recipe}", partial(_gain_row, bench, recipe), expected_s=45))
        found.append(case_step(PART, bench, case_of("fp8", recipe), is_timed=True))
    return [*found, case_step(PART, bench, case_of("bf16"), is_timed=True)]


def _gain_row(bench: Bench, recipe: Fp8Recipe) -> Row:
    """shardwise's own timing of the model's matrix shapes, or the reason why there is none."""
    request = Fp8GainRequest(
        model_config=model_config(MODEL, is_tiny=bench.is_tiny), tokens=MICRO_BATCH * SEQ_LEN, recipe=recipe
    )
    gain = time_fp8(request, bench.hardware.gpus)
    if gain.problem is not None:
        return {"outcome": str(Outcome.REFUSED), "reason": gain.problem}
    return {"outcome": str(Outcome.RAN), "speedup": gain.speedup, "gain": msgspec.to_builtins(gain)}


def rates(rows: Mapping[str, Row]) -> dict[str, float]:
    """Tokens per second by the name of the run."""
    found = {name: result_of(row) for name, row in rows.items()}
    return {name: result.tokens_per_s for name, result in found.items() if result is not None and result.tokens_per_s}


def summary(rows: Mapping[str, Row]) -> str:
    """One line."""
    found = rates(rows)
    fp8 = {name: rate for name, rate in found.items() if name.startswith("fp8 ")}
    if BASE not in found or not fp8:
        return "no FP8 run to compare"
    best = max(fp8, key=fp8.__getitem__)
    return f"{best}: {fp8[best] / found[BASE]:.2f} x {BASE}"


def table(rows: Mapping[str, Row]) -> str:
    """A Markdown table of runs relative to bf16-mixed, with the speedup of their products alone."""
    base, lines = rates(rows).get(BASE), []
    for name, row in rows.items():
        if name.startswith(GAIN):
            continue
        result = result_of(row)
        gain = rows.get(f"{GAIN} {name.removeprefix('fp8 ')}", {})
        if result is None:
            lines.append((name, str(row.get("error")), *[""] * 5))
            continue
        rate, peak = result.tokens_per_s, result.measured.memory.peak_allocated_bytes
        lines.append((
            name, str(result.outcome) if result.reason is None else f"{result.outcome}: {result.reason}", number(rate),
            ratio(rate, base), ratio(gain.get("speedup"), 1.0), percent(result.speed_difference), bytes_cell(peak),
        ))  # fmt: skip
    return markdown_table(
        ("run", "outcome", "tokens/s", f"of {BASE}", "products alone", "difference from the plan's speed", "peak"),
        lines,
    )
