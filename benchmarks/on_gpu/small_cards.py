"""Part 5: small cards on a large one. Jobs under `--vram`, with everything else chosen by the planner, run as planned.

The cap less the CUDA context limits torch's allocator, but not the managed memory of a paged optimizer; `device` shows
whether a run stayed within the cap with it.
"""

from collections.abc import Mapping

from on_gpu.bench import Bench
from on_gpu.case import Case, Outcome, Row, result_of
from on_gpu.programme import Step, case_step
from on_gpu.tables import bytes_cell, markdown_table, number, percent
from shardwise.trainer.spec.units import GIB

PART = "small cards"
_INEXACT = "[offload_cpu, bf16_weights, optimizer_8bit]"
_FULL, _LORA, _QLORA = ({"train.method": method, "allow": _INEXACT} for method in ("full", "lora", "qlora"))


def _case(cap_gib: int, title: str, model: str, settings: Mapping[str, str], *, seq_len: int = 2048) -> Case:
    return Case(
        name=f"{cap_gib} GiB: {title}",
        model=model,
        settings=dict(settings),
        seq_len=seq_len,
        micro_batch=None,
        accumulation=16,  # all rows of a step; the planner splits them into micro batches
        vram_bytes=cap_gib * GIB,
        must_fit=True,
        num_steps=5,
    )


CASES = (
    _case(8, "7B, QLoRA", "llama-2-7b", _QLORA),
    _case(24, "8B, QLoRA", "llama-3.1-8b", _QLORA),
    _case(24, "7B, LoRA", "llama-2-7b", _LORA),
    _case(12, "1B, all parameters", "llama-3.2-1b", _FULL),
    _case(8, "1B, LoRA", "llama-3.2-1b", _LORA),
    _case(16, "3B, LoRA", "llama-3.2-3b", _LORA),
    _case(48, "3B, all parameters", "llama-3.2-3b", _FULL),
)


def steps(bench: Bench) -> list[Step]:
    """One step per job, run alone: its speed counts."""
    return [case_step(PART, bench, case, is_timed=True, judge=judge) for case in CASES]


def judge(row: Row) -> Row:
    """The verdict: `ran within the cap`, or the problem."""
    result = result_of(row)
    if result is None or result.outcome is not Outcome.RAN or result.usable_bytes is None:
        return {}
    device_bytes = result.measured.memory.device_bytes
    is_within = device_bytes is None or device_bytes <= result.usable_bytes
    return {"verdict": "ran within the cap" if is_within else "ran, and used more of the card than the cap"}


def summary(rows: Mapping[str, Row]) -> str:
    """One line."""
    good = sum(row.get("verdict") == "ran within the cap" for row in rows.values())
    return f"{good} of {len(rows)} jobs ran within their cap"


def table(rows: Mapping[str, Row]) -> str:
    """A Markdown table of jobs with the planner's strategies."""
    lines = []
    for name, row in rows.items():
        result = result_of(row)
        if result is None:
            lines.append((name, str(row.get("error")), *[""] * 6))
            continue
        lines.append((
            name, str(row.get("verdict") or f"{result.outcome}: {result.reason}"), result.strategy or "",
            f"{result.micro_batch} x {result.accumulation}", bytes_cell(result.need_bytes),
            bytes_cell(result.measured.memory.device_bytes), number(result.tokens_per_s),
            percent(result.speed_difference),
        ))  # fmt: skip
    header = (
        "job",
        "verdict",
        "chosen",
        "micro batches",
        "needs",
        "device",
        "tokens/s",
        "difference from the prediction",
    )
    return markdown_table(header, lines)
