"""Part 2: predictions and measurements of 60 configurations; and caps: does a card of the predicted size work?

Every setting of a case is pinned, so that its plan is this case. The first twenty represent all the others. Cases of
`TIMED` run alone on the card, so that their speed is compared too; for the others only memory is.

Each case of `CAPPED` has two more runs under `--vram`: one with the predicted memory, which must run, and one with 3 %
less, which must run out of memory. The first fails if the prediction is too low, the second if it is too high.
"""

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from on_gpu.bench import Bench
from on_gpu.case import Case, CaseResult, Outcome, Row, result_of
from on_gpu.programme import Step, case_step
from on_gpu.tables import bytes_cell, markdown_table, number, percent

PART, CAPS = "predicted", "caps"
LESS = 0.97  # of the need of a plan
NUM_STEPS, NUM_STEPS_LONG, CAP_STEPS, LONG_ROWS = 8, 5, 4, 16384
_ALLOW = "[offload_cpu, bf16_weights, optimizer_8bit, optimizer_approx, fp8, compile]"
Q05, Q15, Q3 = "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"
L1, L3, L8 = "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b"
_ON_HOST = {"sharding": "zero2", "offload": "optimizer"}
_ALL_ON_HOST = {"sharding": "zero3", "offload": "optimizer+params"}


def case_of(line: str, **pins: str) -> Case:
    """A case from "model method precision optimizer checkpointing loss rows"; `pins` are other settings.

    Rows are "4x2048": the sequences of a micro batch and the tokens of each.
    """
    model, method, precision, optimizer, checkpointing, loss, rows = line.split()
    micro_batch, _, seq_len = rows.partition("x")
    pinned = {
        "precision": precision, "optimizer": optimizer, "checkpointing": checkpointing, "loss": loss,
        "sharding": "none", "offload": "none", "attention": "sdpa", "compile": "false",
        "activation_offload": "false", "optimizer_in_backward": "false",
    } | pins  # fmt: skip
    return Case(
        name=" ".join([line, *(f"{name}={value}" for name, value in pins.items())]),
        model=model,
        settings={"train.method": method, "allow": _ALLOW, **{f"pin.{name}": each for name, each in pinned.items()}},
        seq_len=int(seq_len),
        micro_batch=int(micro_batch),
        num_steps=NUM_STEPS_LONG if int(seq_len) >= LONG_ROWS else NUM_STEPS,
    )


CASES: tuple[Case, ...] = (
    # Twenty that represent all: every model, method, loss head, precision and offload, short and long rows.
    case_of(f"{Q05} full bf16-mixed adamw_fused none eager 4x2048"),
    case_of(f"{L1} full bf16 adamw_fused full fused 4x2048"),
    case_of(f"{L1} lora bf16-mixed adamw_fused none chunked 4x2048"),
    case_of(f"{Q15} full bf16-mixed adamw full chunked 4x4096"),
    case_of(f"{L8} lora bf16-mixed adamw_fused full fused 2x4096"),
    case_of(f"{L8} qlora bf16-mixed paged_adamw_8bit full fused 2x2048"),
    case_of(f"{Q3} full bf16-mixed adamw_fused selective chunked 2x4096"),
    case_of(f"{L8} full bf16 adamw_fused full chunked 1x4096"),
    case_of(f"{L1} full fp32 adamw_fused none eager 2x1024"),
    case_of(f"{Q05} full bf16 adafactor none fused 16x512"),
    case_of(f"{L1} full bf16 adamw_fused full chunked 1x32768"),
    case_of(f"{L1} full bf16-mixed adamw_8bit full chunked 4x2048"),
    case_of(f"{Q15} galore bf16 adamw none chunked 4x2048"),
    case_of(f"{Q3} full bf16-mixed deepspeed_cpu_adam full chunked 2x2048", **_ON_HOST),
    case_of(f"{Q15} full bf16-mixed deepspeed_cpu_adam full chunked 2x2048", **_ALL_ON_HOST),
    case_of(f"{L3} full fp8 adamw_fused full fused 4x2048"),
    case_of(f"{L3} full bf16 adamw_fused full fused_linear 2x8192"),
    case_of(f"{Q3} lora bf16 adamw_fused selective eager 8x1024"),
    case_of(f"{L3} full bf16-mixed adamw_fused none chunked 2x2048"),
    case_of(f"{Q05} full bf16-mixed adamw_fused none eager 8x2048"),
    # Loss heads and recomputation on one model, everything else equal.
    *(case_of(f"{Q05} full bf16-mixed adamw_fused none {loss} 4x2048") for loss in ("chunked", "fused")),
    case_of(f"{Q05} full bf16-mixed adamw_fused none fused_linear 4x2048"),
    case_of(f"{Q05} full bf16-mixed adamw_fused none chunked 4x2048", compiled_head="true"),
    case_of(f"{Q05} full bf16-mixed adamw_fused full eager 4x2048"),
    *(case_of(f"{Q05} full bf16-mixed adamw_fused {each} chunked 4x2048")
      for each in ("full", "selective", "attention", "every_n")),
    # Optimizers, where the step is the peak and where it is not.
    case_of(f"{Q15} full bf16-mixed adamw full chunked 1x1024"),
    case_of(f"{Q15} full bf16-mixed adamw_fused full chunked 1x1024"),
    case_of(f"{Q15} full bf16 adamw_8bit full chunked 1x1024"),
    case_of(f"{Q15} full bf16 paged_adamw_8bit full chunked 1x1024"),
    case_of(f"{Q15} full bf16 paged_adamw full chunked 1x1024"),
    case_of(f"{L1} full bf16 adafactor full chunked 1x1024"),
    case_of(f"{L1} full bf16 adamw_8bit none eager 4x1024"),
    case_of(f"{L3} full bf16 adafactor full chunked 1x2048"),
    case_of(f"{L1} full bf16 lomo full chunked 2x2048"),
    case_of(f"{Q15} full bf16-mixed adamw_fused full chunked 2x2048", optimizer_in_backward="true"),
    # Precisions.
    *(case_of(f"{L1} full {each} adamw_fused none chunked 4x2048") for each in ("bf16-mixed", "bf16", "fp8")),
    case_of(f"{Q05} full fp32 adamw full chunked 4x1024"),
    case_of(f"{Q15} full fp32 adamw_fused none fused 2x2048"),
    # Lengths.
    case_of(f"{Q05} full bf16-mixed adamw_fused full chunked 1x32768"),
    case_of(f"{Q15} full bf16 adamw_fused selective chunked 1x16384"),
    case_of(f"{Q3} full bf16 adamw_fused full chunked 1x32768"),
    case_of(f"{L3} full bf16-mixed adamw_fused selective fused 4x4096"),
    case_of(f"{L8} lora bf16-mixed adamw_fused full chunked 1x32768"),
    # Adapters.
    case_of(f"{Q05} lora bf16-mixed adamw_fused none eager 8x2048"),
    case_of(f"{Q3} lora bf16-mixed adamw full chunked 4x2048"),
    case_of(f"{L3} lora bf16 adamw_fused none fused 2x4096"),
    case_of(f"{L8} lora bf16 adamw_fused none chunked 2x2048"),
    case_of(f"{L1} qlora bf16-mixed adamw_fused none eager 4x2048"),
    case_of(f"{Q3} qlora bf16-mixed paged_adamw full chunked 4x2048"),
    case_of(f"{L8} qlora bf16 adamw_8bit full chunked 1x16384"),
    *(case_of(f"{L1} {each} bf16-mixed adamw_fused full chunked 4x2048", fused_adapters=fused)
      for each in ("lora", "qlora") for fused in ("false", "true")),
    # GaLore.
    case_of(f"{L1} galore bf16 adamw_8bit full fused 4x2048"),
    case_of(f"{L3} galore bf16 adafactor full chunked 2x2048"),
    # State in host RAM.
    case_of(f"{L1} full bf16-mixed deepspeed_cpu_adam none chunked 4x2048", **_ON_HOST),
    # Attention and compiled blocks.
    case_of(f"{L1} full bf16 adamw_fused none chunked 4x2048", attention="eager"),
    case_of(f"{L1} full bf16-mixed adamw_fused none chunked 4x2048", compile="true"),
    case_of(f"{L1} full bf16 adamw_fused none chunked 4x4096", activation_offload="true"),
)  # fmt: skip
NUM_FIRST = 20
TIMED = CASES[:8]
# The peak has a different cause in each: logits, the optimizer's step, the backward of a block, adapters, 8-bit state,
# saved activations, projections, 4-bit weights.
CAPPED: tuple[Case, ...] = (
    CASES[0], CASES[1], CASES[2], CASES[3], CASES[5], CASES[11], CASES[12],
    next(case for case in CASES if case.name == f"{Q05} full bf16-mixed adamw_fused full chunked 4x2048"),
)  # fmt: skip


def steps(bench: Bench) -> list[Step]:
    """The first twenty cases, the caps, and the other cases."""
    found = [case_step(PART, bench, case, is_timed=case in TIMED) for case in CASES]
    return [*found[:NUM_FIRST], *_cap_steps(bench), *found[NUM_FIRST:]]


def _cap_steps(bench: Bench) -> list[Step]:
    found = []
    for case in CAPPED:
        for share, name in ((1.0, "as predicted"), (LESS, f"{1 - LESS:.0%} less")):
            capped = replace(case, name=f"{case.name}, {name}", cap_share=share, num_steps=CAP_STEPS)
            found.append(case_step(CAPS, bench, capped, judge=partial(judge_cap, share)))
    return found


def judge_cap(share: float, row: Row) -> Row:
    """True if a capped run behaved as the plan predicts for a card of this size."""
    result = result_of(row)
    assert result is not None
    facts: Row = {"cap_bytes": None if result.need_bytes is None else round(share * result.need_bytes)}
    if result.outcome not in (Outcome.RAN, Outcome.OUT_OF_MEMORY):
        return facts
    is_right = (result.outcome is Outcome.RAN) == (share >= 1.0)
    return facts | {"verdict": f"{result.outcome}, {'as predicted' if is_right else 'against the prediction'}"}


def results_in(rows: Mapping[str, Row]) -> list[CaseResult]:
    """The results of the cases that ran."""
    found = (result_of(row) for row in rows.values())
    return [result for result in found if result is not None and result.outcome is Outcome.RAN]


def summary(rows: Mapping[str, Row]) -> str:
    """One line."""
    results = results_in(rows)
    errors = [abs(result.peak_error) for result in results if result.peak_error is not None]
    speeds = [abs(result.speed_error) for result in results if result.speed_error is not None]
    parts = [f"{len(results)} of {len(rows)} ran"]
    if errors:
        parts.append(f"peak off by {statistics.median(errors):.1%} (median), {max(errors):.1%} (worst)")
    if speeds:
        parts.append(f"tokens/s off by {statistics.median(speeds):.0%} (median of {len(speeds)})")
    return ", ".join(parts)


def caps_summary(rows: Mapping[str, Row]) -> str:
    """One line."""
    verdicts = [row["verdict"] for row in rows.values() if "verdict" in row]
    good = sum(verdict.endswith("as predicted") for verdict in verdicts)
    return f"{good} of {len(verdicts)} caps as predicted"


def table(rows: Mapping[str, Row]) -> str:
    """Markdown tables of the errors by method, and of every case."""
    results = results_in(rows)
    methods = {result.name: result.name.split()[1] for result in results}
    lines = []
    for method in ("all", *sorted(set(methods.values()))):
        mine = [result for result in results if method in ("all", methods[result.name])]
        for figure in ("steady", "peak", "speed"):
            errors = [abs(error) for error in (getattr(each, f"{figure}_error") for each in mine) if error is not None]
            if errors:
                spread = (statistics.median(errors), float(np.quantile(errors, 0.95)), max(errors))
                lines.append((figure, method, str(len(errors)), *(f"{error:.1%}" for error in spread)))
    spread_table = markdown_table(("figure", "method", "cases", "median error", "95 %", "worst"), lines)
    worst_first = sorted(results, key=lambda result: -abs(result.peak_error or 0.0))
    cases = markdown_table(
        ("configuration", "peak event", "peak predicted", "measured", "difference", "tokens/s predicted", "measured"),
        [_case_cells(result) for result in worst_first],
    )
    return f"{spread_table}\n{cases}"


def _case_cells(result: CaseResult) -> tuple[str, ...]:
    predicted, measured = result.predicted, result.measured
    return (
        result.name,
        result.peak_event or "",
        bytes_cell(predicted.memory.peak_allocated_bytes),
        bytes_cell(measured.memory.peak_allocated_bytes),
        percent(result.peak_difference),
        number(predicted.speed.tokens_per_s_per_gpu if measured.speed.tokens_per_s_per_gpu else None),
        number(measured.speed.tokens_per_s_per_gpu),
    )


def caps_table(rows: Mapping[str, Row]) -> str:
    """A Markdown table of capped runs with their verdicts."""
    lines = [(name, bytes_cell(row.get("cap_bytes")), _verdict(row)) for name, row in rows.items()]
    return markdown_table(("configuration and cap", "cap", "verdict"), lines)


def _verdict(row: Mapping[str, Any]) -> str:
    return str(row.get("verdict") or row.get("error") or row.get("outcome"))
