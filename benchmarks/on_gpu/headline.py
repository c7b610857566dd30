"""An 8B model on one card: all parameters at the planner's own choice, state in host RAM, and QLoRA under small caps.

Nothing is saved or exported, so that only the weights need a disk. The first case is the one that matters most: a step
of 262,144 tokens, planned as for a long run, so that compilation may pay.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from on_gpu import small_cards
from on_gpu.bench import Bench
from on_gpu.case import Case, Row, result_of
from on_gpu.predicted import case_of
from on_gpu.programme import Step, case_step
from on_gpu.tables import number
from shardwise.trainer.spec.units import GIB

PART = "8B on one card"
MODEL = "llama-3.1-8b"
NUM_STEPS = 5  # two warm-up steps, one with measured memory, two timed
# Of a card that holds the case: five predicted steps of 22 s on an H200, compilation, weights created and loaded.
FULL_S = 300.0
OFFLOAD_S = 120.0  # to build the CPU's optimizer and for its updates, which FLOPs do not count
FULL = Case(
    name="all parameters, the planner's choice",
    model=MODEL,
    settings={"train.method": "full", "allow": "[bf16_weights]", "train.steps": "1000"},
    seq_len=4096,
    micro_batch=None,
    accumulation=64,
    must_fit=True,
    num_steps=NUM_STEPS,
)
_LINE = f"{MODEL} full bf16 deepspeed_cpu_adam full chunked 2x4096"
OFFLOADED = tuple(
    replace(case_of(_LINE, sharding=sharding, offload=offload), num_steps=NUM_STEPS)
    for sharding, offload in (("zero2", "optimizer"), ("zero3", "optimizer+params"))
)
_ACTIVATIONS = {
    "recomputed": {"pin.checkpointing": "full", "pin.activation_offload": "false"},
    "in host RAM": {"pin.checkpointing": "none", "pin.activation_offload": "true"},
}
QLORA = tuple(
    Case(
        name=f"{cap_gib} GiB: QLoRA, activations {how}",
        model=MODEL,
        settings={"train.method": "qlora", "allow": "[offload_cpu, bf16_weights, optimizer_8bit]", **pins},
        micro_batch=None,
        accumulation=16,
        vram_bytes=cap_gib * GIB,
        must_fit=True,
        num_steps=NUM_STEPS,
    )
    for cap_gib in (8, 16)
    for how, pins in _ACTIVATIONS.items()
)
CASES = (FULL, *OFFLOADED, *QLORA)


def steps(bench: Bench) -> list[Step]:
    """One step per case, run alone: its speed counts."""
    first = case_step(PART, bench, FULL, is_timed=True)
    found = [first._replace(expected_s=min(first.expected_s, FULL_S))]
    for case in OFFLOADED:
        step = case_step(PART, bench, case, is_timed=True)
        found.append(step._replace(expected_s=step.expected_s + OFFLOAD_S))
    return [*found, *(case_step(PART, bench, case, is_timed=True, judge=small_cards.judge) for case in QLORA)]


def summary(rows: Mapping[str, Row]) -> str:
    """One line."""
    result = result_of(rows.get(FULL.name, {}))
    if result is None or result.tokens_per_s is None:
        return f"{len(rows)} of {len(CASES)} cases, without {FULL.name}"
    predicted = result.predicted.speed.tokens_per_s_per_gpu
    return f"all parameters {number(result.tokens_per_s)} tokens/s, predicted {number(predicted)}"


table = small_cards.table
