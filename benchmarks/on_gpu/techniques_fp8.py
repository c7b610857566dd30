"""FP8 against bf16 end to end: the same micro batch of two models in bf16 and in each kind of FP8, whole and compiled.

FP8 keeps fp32 weights as bf16-mixed does, so bf16-mixed is what a ratio is against; pure bf16 is there for the pace
that a card has at most without FP8. 8B updates each weight inside the backward pass, in every precision alike: fp32
weights, their gradients and Adam's state would leave no room on a card of 141 GB.

The plan's prediction stands beside: as the planner assumes a gain, and after it had one timed on the model's own
shapes, as `shardwise train` does before it takes FP8 unasked.
"""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from launch.measure_fp8 import time_fp8
from launch.model_files import read_preset
from launch.unlimited_plan import plan_regardless
from on_gpu.bench import Bench
from on_gpu.case import Case
from on_gpu.models import model_config
from on_gpu.pieces import Row, Step
from on_gpu.techniques_rows import (
    PLAIN,
    cases_to_run,
    error_of,
    inputs_of,
    memory_cells,
    more_of,
    number,
    outcome_words,
    percent,
    rate_of,
    ratio,
    refused_row,
    result_of,
    rows_named,
    run_plan,
    section,
    times,
)
from trainer.planning.speed import flops_per_token
from trainer.spec.errors import ShardwiseError
from trainer.spec.measurement import Fp8GainRequest
from trainer.spec.model_shape import read_model_shape
from trainer.spec.plan import Fp8Gain, Plan
from trainer.spec.strategy import Fp8Recipe, Method

PREFIX, GAIN_PREFIX = "fp8", "fp8 gain"
LARGE, SMALL = "llama-3.1-8b", "llama-3.2-1b"
RECIPES = (Fp8Recipe.TORCHAO_TENSORWISE, Fp8Recipe.TORCHAO_ROWWISE, Fp8Recipe.CURRENT)
MOST_TIMED_TOKENS = 8192  # as `launch.fp8_store` times


class Setup(NamedTuple):
    """What all runs of a model have in common."""

    model: str
    micro_batch: int
    seq_len: int
    settings: dict[str, str]
    expected_s: float


SETUPS = (
    Setup(LARGE, 4, 4096, {"pin.checkpointing": "full", "pin.optimizer_in_backward": "true"}, 80),
    Setup(SMALL, 8, 2048, {"pin.checkpointing": "none"}, 40),
)


def case_of(setup: Setup, precision: str, recipe: Fp8Recipe | None = None, *, compiled: bool) -> Case:
    """One of the runs that are compared."""
    more = {"pin.precision": precision, "pin.compile": "true" if compiled else "false"}
    if recipe is not None:
        more["pin.fp8_recipe"] = str(recipe)
    words = [PREFIX, setup.model, precision, *([str(recipe)] if recipe else []), *(["compiled"] if compiled else [])]
    return Case(
        name=" ".join(words),
        model=setup.model,
        settings=PLAIN | setup.settings | more,
        seq_len=setup.seq_len,
        micro_batch=setup.micro_batch,
    )


def cases_of(setup: Setup) -> tuple[Case, ...]:
    """Compiled runs first: they are what decides."""
    cases = []
    for compiled in (True, False):
        cases += [case_of(setup, precision, compiled=compiled) for precision in ("bf16-mixed", "bf16")]
        cases += [case_of(setup, "fp8", recipe, compiled=compiled) for recipe in RECIPES]
    return tuple(cases)


def steps(bench: Bench, done: Mapping[str, Row]) -> Iterator[Step]:
    """First what FP8 gains on the model's shapes, as the runs' predictions use it; then the runs."""
    for setup in SETUPS:
        for recipe in RECIPES:
            yield Step(gain_name(setup, recipe), partial(gain_row, bench, setup, recipe), expected_s=45)
        for case in cases_to_run(bench, cases_of(setup)):
            yield Step(case.name, partial(fp8_row, bench, case, gain_in(done, setup, case)), setup.expected_s)


def gain_name(setup: Setup, recipe: Fp8Recipe) -> str:
    return f"{GAIN_PREFIX} {setup.model} {recipe}"


def gain_row(bench: Bench, setup: Setup, recipe: Fp8Recipe) -> Row:
    """What the product's own timing says of a model's matrix shapes, or why it says nothing."""
    request = Fp8GainRequest(
        model_config=model_config(setup.model, is_tiny=bench.is_tiny),
        tokens=min(MOST_TIMED_TOKENS, setup.micro_batch * setup.seq_len),
        recipe=recipe,
    )
    gain = time_fp8(request, bench.hardware.gpus)
    plain: dict[str, Any] = msgspec.to_builtins(gain)
    outcome = "refused" if gain.problem else "ran"
    return {"outcome": outcome, "reason": gain.problem, "gain": plain, "speedup": gain.speedup}


def gain_in(done: Mapping[str, Row], setup: Setup, case: Case) -> Fp8Gain | None:
    """The timing of the case's recipe; None where there is none, or nothing was timed."""
    recipe = case.settings.get("pin.fp8_recipe")
    row = done.get(f"{GAIN_PREFIX} {setup.model} {recipe}", {})
    gain = msgspec.convert(row["gain"], Fp8Gain) if "gain" in row else None
    return gain if gain is not None and gain.problem is None else None


def fp8_row(bench: Bench, case: Case, gain: Fp8Gain | None) -> Row:
    """The run of a case; beside it what was predicted without a timing, and with one."""
    started = time.monotonic()
    found = inputs_of(bench, case)
    if isinstance(found, dict):
        return found
    inputs, data = found
    try:
        assumed = plan_regardless(inputs, data, environment=bench.environment)
        timed = None
        if gain is not None:
            timed = plan_regardless(inputs._replace(fp8_gain=gain), data, environment=bench.environment)
    except ShardwiseError as error:
        return refused_row(bench, case, error)
    return run_plan(
        bench,
        case,
        timed or assumed,
        started=started,
        assumed_tokens_per_s=_predicted(assumed),
        timed_tokens_per_s=None if timed is None else _predicted(timed),
    )


def _predicted(plan: Plan) -> float:
    return plan.chosen.speed.tokens_per_s_per_gpu


def flops_of(preset: str, seq_len: int) -> float:
    """FLOPs of a trained token, 6 N + 12 L q s: attention counts as if nothing of it were masked."""
    return flops_per_token(read_model_shape(read_preset(preset)), seq_len, Method.FULL)


def mfu_of(row: Row, peak_flops_per_s: float | None = None) -> float | None:
    """Share of the card's dense bf16 peak, or of the one given; None of a rehearsal."""
    rate, more, case = rate_of(row), more_of(row), result_of(row).case
    peak = peak_flops_per_s or more.get("bf16_peak_flops_per_s")
    if rate is None or peak is None or more["is_tiny"]:
        return None
    return rate * flops_of(case.model, case.seq_len) / float(peak)


def best_rate(rows: Mapping[str, Row], setup: Setup, *, is_fp8: bool) -> tuple[str, float] | None:
    """The fastest run of a model in FP8, or in bf16, with its tokens a second; None where none ran."""
    mine = rows_named(rows, (case.name for case in cases_of(setup)))
    rates = {name: rate_of(row) for name, row in mine.items() if ("pin.fp8_recipe" in _settings(row)) is is_fp8}
    return max(((name, rate) for name, rate in rates.items() if rate is not None), key=lambda one: one[1], default=None)


def _settings(row: Row) -> dict[str, str]:
    return result_of(row).case.settings


def tables(rows: Mapping[str, Row]) -> str:
    """A table a model."""
    return "\n".join(_table(rows, setup) for setup in SETUPS)


def _table(rows: Mapping[str, Row], setup: Setup) -> str:
    mine = rows_named(rows, (case.name for case in cases_of(setup)))
    lines = []
    for name, row in mine.items():
        is_compiled = _settings(row).get("pin.compile") == "true"
        base_row = rows.get(case_of(setup, "bf16-mixed", compiled=is_compiled).name)
        more, rate = more_of(row), rate_of(row)
        predicted = more.get("timed_tokens_per_s") or more.get("assumed_tokens_per_s")
        peak, peak_predicted, _ = memory_cells(row)
        lines.append([
            name.removeprefix(f"{PREFIX} {setup.model} "),
            number(rate),
            number(predicted),
            percent(error_of(predicted, rate)),
            times(ratio(rate, rate_of(base_row))),
            times(_predicted_ratio(row, base_row, "assumed_tokens_per_s")),
            times(_predicted_ratio(row, base_row, "timed_tokens_per_s")),
            percent(mfu_of(row), is_change=False),
            peak,
            peak_predicted,
            outcome_words(row),
        ])  # fmt: skip
    about = (
        f"Rows of {setup.seq_len:,} tokens, {setup.micro_batch} in a micro batch, one micro batch a step; "
        f"{', '.join(f'{key} {value}' for key, value in setup.settings.items())}. A ratio is against bf16-mixed, "
        "compiled or not as the run itself; the plan's is what it assumes, and what it says after it timed the model's "
        "shapes. MFU counts 6 N + 12 L q s FLOPs a token against the card's dense bf16 peak, in FP8 too."
    )
    header = (
        "run", "tokens/s", "predicted", "error", "of bf16-mixed", "plan, assumed", "plan, timed", "MFU", "peak",
        "predicted", "outcome",
    )  # fmt: skip
    text = section(f"FP8 against bf16, end to end: {setup.model}", about, header, lines, mine.values())
    return f"{text}\n{_gain_words(rows, setup)}"


def _predicted_ratio(row: Row, base: Row | None, name: str) -> float | None:
    return ratio(more_of(row).get(name), None if base is None else more_of(base).get("assumed_tokens_per_s"))


def _gain_words(rows: Mapping[str, Row], setup: Setup) -> str:
    """What was timed of the model's matrix shapes, a line a recipe."""
    lines = []
    for recipe in RECIPES:
        row = rows.get(gain_name(setup, recipe))
        if row is not None:
            gain = msgspec.convert(row["gain"], Fp8Gain) if "gain" in row else None
            lines.append(f"- {recipe} {gain.words if gain else row.get('error')}")
    return "\n".join([*lines, ""])
