"""Part 1: every engine and method runs on this card, is verified as planned, and lowers the loss; its peak is measured.

The ranks themselves stop a run whose engine, precision, optimizer, loss head or attention differs from the plan. Facts
of the report that exist only after a step are matched with patterns here. A case whose library is missing, or whose
card is too old, is refused with the reason.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from on_gpu.bench import Bench
from on_gpu.case import Case, Outcome, Row, RowKind, result_of
from on_gpu.models import SMALL
from on_gpu.programme import Step, case_step
from on_gpu.tables import bytes_cell, markdown_table, percent

PART = "engines"
_ALLOW = "[offload_cpu, bf16_weights, optimizer_8bit, optimizer_approx, fp8, compile]"
_BASE = {
    "allow": _ALLOW,
    "train.method": "full",
    "train.warmup": "1 steps",
    "train.lr": "0.001",
    "data.packing": "false",
    "pin.sharding": "none",
    "pin.offload": "none",
    "pin.precision": "bf16-mixed",
    "pin.optimizer": "adamw_fused",
    "pin.loss": "chunked",
    "pin.checkpointing": "none",
    "pin.attention": "sdpa",
    "pin.compile": "false",
}
_EIGHT_BIT, _PAGED, _IN_BACKWARD = (
    ("optimizer_state", "uint8"), ("optimizer_state", "paged"), ("updates", "inside the backward pass")
)  # fmt: skip
_BLOCKS = r"\b[1-9]\d* of [1-9]\d* blocks"
_GALORE = {
    "train.method": "galore",
    "pin.optimizer": "adamw",
    "train.galore.rank": "32",
    "train.galore.update_gap": "4",
    "pin.checkpointing": "full",
}
_LORA = {"train.method": "lora", "pin.checkpointing": "full"}
_QLORA = _LORA | {"train.method": "qlora", "pin.optimizer": "paged_adamw"}


class EngineCase(NamedTuple):
    """A configuration, and the facts that its report must have."""

    case: Case
    seen: tuple[tuple[str, str], ...] = ()  # (fact of the report, pattern)
    learns: bool = True  # a few steps decrease the loss


def _case(
    name: str,
    settings: Mapping[str, str] | None = None,
    *seen: tuple[str, str],
    learns: bool = True,
    rows: RowKind = RowKind.FULL,
    engine: str | None = None,
) -> EngineCase:
    job_settings = _BASE | dict(settings or {})
    case = Case(name=name, model=SMALL, settings=job_settings, seq_len=512, micro_batch=4, rows=rows, engine=engine)
    return EngineCase(case, seen, learns)


def _optimizer(name: str, *seen: tuple[str, str], lr: str = "0.001", learns: bool = True) -> EngineCase:
    return _case(f"optimizer {name}", {"pin.optimizer": name, "train.lr": lr}, *seen, learns=learns)


def _fp8(recipe: str, library: str, engine: str | None = None) -> EngineCase:
    settings = {"pin.precision": "fp8", "pin.fp8_recipe": recipe}
    seen = (("fp8 products", r"^[1-9]"), ("fp8 recipe", recipe), ("fp8 library", library))
    return _case(f"fp8 {recipe}" + (f" {engine}" if engine else ""), settings, *seen, engine=engine)


def _offload(sharding: str, offload: str, method: Mapping[str, str] | None = None) -> EngineCase:
    optimizer = "adamw_fused" if sharding == "fsdp" else "deepspeed_cpu_adam"
    job_settings = dict(method or {}) | {"pin.sharding": sharding, "pin.offload": offload, "pin.optimizer": optimizer}
    name = " ".join([sharding, f"offload {offload}", *([job_settings["train.method"]] if method else [])])
    return _case(name, job_settings)


ENGINES_OF_ONE = ("zero1", "zero2", "zero3", "fsdp", "fsdp_grad_op")  # DDP does not wrap the model on one rank
CASES: tuple[EngineCase, ...] = (
    _case("bf16-mixed"),
    _case("packed rows", {"data.packing": "true"}, rows=RowKind.SHORT),
    _case("rows of different lengths", rows=RowKind.SHORT),
    *(_case(engine, engine=engine) for engine in ENGINES_OF_ONE),
    _case("lora", _LORA, ("adapters", "float32")),
    _case("qlora", _QLORA, ("4-bit layers", "nf4"), ("checkpointing", _BLOCKS)),
    *(_case(f"{name} fused_adapters", method | {"pin.fused_adapters": "true"}, ("fused adapters", r"^[1-9]"))
      for name, method in (("lora", _LORA), ("qlora", _QLORA))),
    _case("dpo", _LORA | {"train.objective": "dpo", "train.lr": "0.0001"}, learns=False, rows=RowKind.PAIRS),
    _case("galore", _GALORE, ("projectors", "32")),
    _case("galore layerwise", _GALORE | {"train.galore.layerwise": "true"}, ("projectors", "32"), _IN_BACKWARD),
    _offload("zero2", "optimizer"),
    _offload("zero3", "optimizer"),
    _offload("zero3", "optimizer+params"),
    _offload("fsdp", "optimizer+params"),
    _offload("fsdp", "optimizer+params", _LORA),
    _offload("fsdp", "optimizer+params", _QLORA),
    _case("bf16", {"pin.precision": "bf16"}),
    _case("fp32", {"pin.precision": "fp32"}),
    _case("fp16-mixed", {"pin.precision": "fp16-mixed"}, ("loss scale", r"^[0-9]")),
    _case("compile", {"pin.compile": "true"}, ("compile", _BLOCKS)),
    _case("attention flash", {"pin.attention": "flash"}),
    _case("attention eager", {"pin.attention": "eager"}),
    *(_case(f"checkpointing {each}", {"pin.checkpointing": each}, ("checkpointing", _BLOCKS))
      for each in ("full", "selective", "attention", "every_n")),
    _case("activation_offload", {"pin.activation_offload": "true"}, ("activation_offload", "tensors of [1-9]")),
    *(_case(f"loss {each}", {"pin.loss": each}) for each in ("eager", "fused", "fused_linear")),
    *(_case(f"loss fused_linear {each}", {"pin.loss": "fused_linear"}, engine=each) for each in ("zero3", "fsdp")),
    _case("loss chunked compiled_head", {"pin.compiled_head": "true"}, ("compiled head", "^2 graphs without a break")),
    _optimizer("adamw_8bit", _EIGHT_BIT),
    _optimizer("paged_adamw", _PAGED),
    _optimizer("paged_adamw_8bit", _EIGHT_BIT, _PAGED),
    _optimizer("lion_8bit", _EIGHT_BIT, lr="0.0001"),
    _optimizer("lamb_8bit", _EIGHT_BIT, lr="0.01"),
    _optimizer("adafactor", lr="0.01"),
    _optimizer("lion", lr="0.0001"),
    _optimizer("muon"),
    _optimizer("lomo", _IN_BACKWARD, lr="0.01", learns=False),
    _optimizer("adalomo", _IN_BACKWARD, lr="0.01"),
    _case("optimizer_in_backward", {"pin.optimizer_in_backward": "true", "pin.checkpointing": "full"}, _IN_BACKWARD),
    _case("galore adamw_8bit", _GALORE | {"pin.optimizer": "adamw_8bit"}, ("projectors", "32"), _EIGHT_BIT),
    _case("galore adafactor", _GALORE | {"pin.optimizer": "adafactor"}, ("projectors", "32")),
    *(_fp8(recipe, "torchao") for recipe in ("torchao_tensorwise", "torchao_rowwise")),
    *(_fp8(recipe, "transformer-engine") for recipe in ("current", "delayed", "block", "mxfp8", "nvfp4")),
    *(_fp8("current", "transformer-engine", engine) for engine in ("zero2", "zero3", "fsdp")),
)  # fmt: skip


def steps(bench: Bench) -> list[Step]:
    """One step per case, run concurrently: only memory, facts and losses count."""
    cases = CASES
    if bench.is_tiny:  # tensors below 100,000 elements are not paged
        cases = tuple(each._replace(seen=tuple(fact for fact in each.seen if fact != _PAGED)) for each in CASES)
    return [case_step(PART, bench, each.case, judge=partial(judge, each)) for each in cases]


def judge(engine_case: EngineCase, row: Row) -> Row:
    """The verdict: `as planned`, or the differences."""
    result = result_of(row)
    if result is None or result.outcome is not Outcome.RAN:
        return {}
    wrong = [
        f"{fact}: {result.facts.get(fact, 'not reported')}"
        for fact, pattern in engine_case.seen
        if not re.search(pattern, result.facts.get(fact, ""))
    ]
    if engine_case.learns and not result.losses[-1] < result.losses[0]:
        wrong.append(f"loss {result.losses[0]:.2f} -> {result.losses[-1]:.2f}")
    return {"verdict": "; ".join(wrong) or "as planned"}


def summary(rows: Mapping[str, Row]) -> str:
    """One line."""
    good = sum(row.get("verdict") == "as planned" for row in rows.values())
    refused = sum(row.get("outcome") == Outcome.REFUSED for row in rows.values())
    return f"{good} of {len(rows)} run as planned, {refused} refused here"


def table(rows: Mapping[str, Row]) -> str:
    """A Markdown table of cases with verdict, peak and error of the prediction."""
    lines = []
    for name, row in rows.items():
        result = result_of(row)
        peak = None if result is None else result.measured.memory.peak_allocated_bytes
        difference = None if result is None else result.peak_difference
        reason = row.get("error") or (None if result is None else result.reason)
        verdict = row.get("verdict") or f"{row.get('outcome')}: {reason}"
        lines.append((name, verdict, bytes_cell(peak), percent(difference)))
    return markdown_table(("configuration", "verdict", "peak allocated", "difference from the prediction"), lines)
