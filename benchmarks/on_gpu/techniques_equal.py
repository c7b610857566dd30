"""GaLore against LoRA, QLoRA and full training at equal memory: what each learns, and how fast, in what GaLore takes.

1. A model is trained from scratch on the source text of Python's standard library, for all to start from: adapters on
   drawn weights would be no training, and drawn tokens hold nothing to learn.
2. GaLore goes on from there, and the bytes that it takes are the cap for the others.
3. Each other method takes the settings that the planner finds under that cap, the method and the batch of a step alone
   being given. All learn the same rows in the same order, at the rate that the product takes for their method.
"""

import io
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from launch.console import Console
from launch.plan_job import plan_inputs
from launch.prepare_run import TrainOptions
from launch.supervisor import StopKind
from launch.train_job import train
from on_gpu.bench import Bench
from on_gpu.case import Case
from on_gpu.models import model_config
from on_gpu.pieces import Row, Step
from on_gpu.techniques_fp8 import SMALL
from on_gpu.techniques_rows import (
    MORE,
    inputs_of,
    measured_on,
    median_of,
    memory_cells,
    more_of,
    number,
    outcome_words,
    ratio,
    refused_row,
    result_of,
    rows_named,
    run_plan,
    section,
    size,
    speed_cells,
)
from trainer.spec.errors import ShardwiseError
from trainer.spec.report import Ending
from trainer.spec.strategy import Method

PREFIX = "equal memory"
BASE, GALORE = f"{PREFIX} base", f"{PREFIX} galore"
OTHERS = (Method.FULL, Method.LORA, Method.QLORA)
SEQ_LEN, ROWS, MICRO_BATCH = 2048, 8, 4
BASE_STEPS, METHOD_STEPS = 100, 100
FEW = 5  # steps at either end whose mean loss is told
TINY_BASE_STEPS, TINY_METHOD_STEPS = 30, 12
TEXT = {"data.train": "python-stdlib", "data.eval": "none"}
_GALORE = {"train.method": "galore", "pin.optimizer": "adamw", "pin.precision": "bf16", "pin.checkpointing": "full"}
_ALLOWED = "[offload_cpu, optimizer_8bit, optimizer_approx, bf16_weights]"


def case_of(bench: Bench, method: Method, weights: str, *, cap_bytes: int | None = None) -> Case:
    """A method on what the base has learned, at `weights` in the work folder; GaLore's settings alone are given."""
    words = {
        "model.name": str(bench.work / weights),
        **TEXT,
        "data.format": "text",
        "train.seed": "1",
        "allow": _ALLOWED,
    }
    words |= _GALORE if method is Method.GALORE else {"train.method": str(method)}
    return Case(
        name=f"{PREFIX} {method}",
        model=SMALL,
        settings=words,
        seq_len=SEQ_LEN,
        micro_batch=MICRO_BATCH if method is Method.GALORE else None,
        accumulation=ROWS // MICRO_BATCH if method is Method.GALORE else ROWS,
        vram_bytes=cap_bytes,
        num_steps=TINY_METHOD_STEPS if bench.is_tiny else METHOD_STEPS,
    )


def steps(bench: Bench, done: Mapping[str, Row]) -> Iterator[Step]:
    """Each of them needs the one before."""
    yield Step(BASE, partial(base_row, bench), expected_s=200)
    weights = more_of(done.get(BASE, {})).get("weights")
    if weights is None:
        return
    galore = case_of(bench, Method.GALORE, weights)
    yield Step(galore.name, partial(method_row, bench, galore), expected_s=240)
    cap = taken_bytes(done.get(GALORE))
    if cap is None:
        return
    for method in OTHERS:
        case = case_of(bench, method, weights, cap_bytes=cap)
        yield Step(case.name, partial(method_row, bench, case), expected_s=100)


def base_row(bench: Bench) -> Row:
    """Trains what the methods start from; the row says where its weights are and what its loss came to."""
    folder = bench.work / ("equal-tiny" if bench.is_tiny else "equal")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(SMALL, is_tiny=bench.is_tiny)))
    (folder / "job.yaml").write_text("{}\n")
    started = time.monotonic()
    run_dir = folder / "base"
    shutil.rmtree(run_dir, ignore_errors=True)
    options = TrainOptions(job=folder / "job.yaml", overrides=_base_words(bench, folder), run_dir=run_dir)
    environment = {**bench.environment, "XDG_STATE_HOME": str(folder / "state")}  # so that no later plan learns from it
    outcome = train(options, Console(io.StringIO()), environment=environment)
    report = outcome.report
    if report is None or report.ending is not Ending.FINISHED or report.export is None:
        if report is None or report.ending is Ending.STOPPED:
            bench.stop.kind = StopKind.INTERRUPT  # of its own handler: the steps that follow are not begun either
        told = "it was stopped" if report is None else f"{report.ending}: {report.error}"
        return {"error": f"the model that all start from was not trained: {told}"}
    weights = (run_dir / report.export).relative_to(bench.work)
    more: dict[str, Any] = {"weights": str(weights), "loss": report.final_loss, "tokens": report.tokens}
    return {"outcome": "ran", "wall_s": time.monotonic() - started, MORE: {**measured_on(bench), **more}}


def _base_words(bench: Bench, folder: Path) -> list[str]:
    seq_len = bench.seq_len_of(Case(name=BASE, model=SMALL, seq_len=SEQ_LEN))
    words = {
        "model.config": str(folder / "config.json"),
        "model.tokenizer": "train",
        **TEXT,
        "train.method": "full",
        "train.seq_len": str(seq_len),
        "train.tokens_per_step": str(ROWS * seq_len),
        "train.steps": str(TINY_BASE_STEPS if bench.is_tiny else BASE_STEPS),
        "checkpoint.every": "100000 steps",
    }
    return [f"{key}={value}" for key, value in words.items()]


def method_row(bench: Bench, case: Case) -> Row:
    """Runs a method with the planner's settings; refused where it says that nothing fits under the cap."""
    started = time.monotonic()
    found = inputs_of(bench, case)
    if isinstance(found, dict):
        return found
    try:
        plan = plan_inputs(*found, environment=bench.environment)
    except ShardwiseError as error:
        return refused_row(bench, case, error)
    return run_plan(bench, case, plan, started=started, lr=plan.schedule.lr)


def taken_bytes(row: Row | None) -> int | None:
    """What a run took of the device; of a CPU, which has no such counter, what the plan asked for it."""
    if row is None or row.get("outcome") != "ran":
        return None
    result = result_of(row)
    return result.measured.memory.device_bytes or result.need_bytes


def whole_rate(row: Row) -> float | None:
    """Tokens a second over every step, the first and GaLore's new projections among them."""
    result = result_of(row)
    measured = result.measured.speed
    if not result.step_s or measured.step_s is None or measured.tokens_per_s_per_gpu is None:
        return None
    tokens = measured.tokens_per_s_per_gpu * measured.step_s
    return ratio(tokens * len(result.step_s), sum(result.step_s))


def tables(rows: Mapping[str, Row]) -> str:
    mine = rows_named(rows, (f"{PREFIX} {method}" for method in (Method.GALORE, *OTHERS)))
    lines = []
    for name, row in mine.items():
        result = result_of(row)
        peak, peak_predicted, _ = memory_cells(row)
        rate, predicted, _ = speed_cells(row)
        batch = "-" if result.micro_batch is None else f"{result.micro_batch} x {result.accumulation}"
        lines.append([
            name.removeprefix(f"{PREFIX} "),
            result.strategy or "-",
            more_of(row).get("checkpointing", "-"),
            batch,
            rate,
            predicted,
            number(whole_rate(row)),
            number(more_of(row).get("lr")),
            number(median_of(result.losses[:FEW])),
            number(median_of(result.losses[-FEW:])),
            peak,
            peak_predicted,
            size(taken_bytes(row)),
            outcome_words(row),
        ])  # fmt: skip
    header = (
        "method", "strategy", "recomputed", "micro batch", "tokens/s", "predicted", "whole run", "rate",
        "loss at first", "at last", "peak", "predicted", "taken", "outcome",
    )  # fmt: skip
    return section("At equal memory", _about(rows), header, lines, [*mine.values(), *rows_named(rows, [BASE]).values()])


def _about(rows: Mapping[str, Row]) -> str:
    cap, base = taken_bytes(rows.get(GALORE)), more_of(rows.get(BASE, {}))
    begun = f" That model had learned {base['tokens']:,} tokens, to a loss of {base['loss']:.2f}." if base else ""
    held = f" The cap of the others is what GaLore took, {size(cap)}." if cap is not None else ""
    return (
        "Llama-3.2-1B, trained from scratch for a short while on the source text of Python's standard library, goes on "
        f"by each method with the same rows in the same order.{begun}{held} The planner chooses what is not GaLore's; "
        f"a loss is the median of {FEW} steps, a rate the product's own for the method; `whole run` counts every step, "
        "those with a new projection among them. What is taken is the whole device's, of a CPU what the plan asks for."
    )
