"""Part 4: FP8 compared with bf16: the speedup of the blocks of an 8B model, and of whole runs.

FP8 has fp32 weights, like bf16-mixed, so bf16-mixed is the baseline, compiled. torchao's recipes are compiled, and
Transformer Engine's runs eagerly, as the planner has them; all other settings are the same. A recipe runs if its
library is installed; the others are refused. 8-bit moments and updates in the backward keep full training of 8B within
80 GB.
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
from shardwise.trainer.spec.fp8 import FP8_RECIPES
from shardwise.trainer.spec.messages.worker_requests import Fp8GainRequest
from shardwise.trainer.spec.strategy import Fp8Recipe

PART = "fp8"
MODEL, MICRO_BATCH, SEQ_LEN = "llama-3.1-8b", 2, 4096  # fp32 weights and 8-bit moments of 45 GiB
GAIN = "blocks of"
RECIPES = (Fp8Recipe.TORCHAO_TENSORWISE, Fp8Recipe.TORCHAO_ROWWISE, Fp8Recipe.CURRENT)
BASE = "bf16-mixed"


def case_of(precision: str, recipe: Fp8Recipe | None = None) -> Case:
    """A run in this precision, compiled unless the recipe's layers are eager."""
    settings = {
        "train.method": "full",
        "allow": "[fp8, compile, optimizer_8bit, unclipped]",
        "pin.sharding": "none",
        "pin.optimizer": "adamw_8bit",
        "pin.optimizer_in_backward": "true",
        "pin.checkpointing": "full",
        "pin.precision": precision,
        "pin.compile": "true" if recipe is None or FP8_RECIPES[recipe].is_compiled else "false",
    }
    if recipe is not None:
        settings["pin.fp8_recipe"] = str(recipe)
    name = precision if recipe is None else f"{precision} {recipe}"
    return Case(name=name, model=MODEL, settings=settings, seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, num_steps=10)


def steps(bench: Bench) -> list[Step]:
    """bf16-mixed, then for each recipe its blocks and the run."""
    found = [case_step(PART, bench, case_of(BASE), is_timed=True)]
    for recipe in RECIPES:
        found.append(Step(PART, f"{GAIN} {recipe}", partial(_gain_row, bench, recipe), expected_s=120))
        found.append(case_step(PART, bench, case_of("fp8", recipe), is_timed=True))
    return found


def _gain_row(bench: Bench, recipe: Fp8Recipe) -> Row:
    """shardwise's own timing of the model's blocks, or the reason why there is none."""
    request = Fp8GainRequest(
        model_config=model_config(MODEL, is_tiny=bench.is_tiny),
        tokens=MICRO_BATCH * SEQ_LEN,
        seq_len=SEQ_LEN,
        recipes=(recipe,),
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
    """A Markdown table of runs relative to bf16-mixed, with the speedup of their blocks alone."""
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
        ("run", "outcome", "tokens/s", f"of {BASE}", "blocks alone", "difference from the plan's speed", "peak"),
        lines,
    )
