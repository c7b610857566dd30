"""Published measurements of other trainers: the same formulas with another row of recipe values.

The rows of benchmarks/measured_public.jsonl name their sources. Peak and steady allocated bytes are held to what the
accuracy benchmark prints; which runs ended out of memory is held to the decision what fits.
"""

import json
from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest
from estimate_factory import LLAMA_8B, MISTRAL_7B, configuration, gpu
from msgspec.structs import replace

from shardwise.trainer.planning.cases import read_case
from shardwise.trainer.planning.configuration import SHARDWISE, PolicyChoices
from shardwise.trainer.planning.memory import OVERHEADS, Line, estimate_memory
from shardwise.trainer.planning.memory.precision_policy import dims_of, policy_of
from shardwise.trainer.planning.memory.reference_trainers import REFERENCE_TRAINERS, reference_of
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import MemoryEstimate
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Method, Precision
from shardwise.trainer.spec.units import GIB

MEASURED = Path(__file__).parents[3] / "benchmarks" / "measured_public.jsonl"
FULL = Checkpointing.FULL


def rows() -> list[tuple[dict[str, Any], dict[str, float], MemoryEstimate]]:
    found = []
    for line in MEASURED.read_text().splitlines():
        row = json.loads(line)
        case = read_case(row["case"])
        found.append((row["case"], row["truth"], estimate_memory(case.shape, case.configuration, case.device)))
    return found


ROWS = rows()


def errors(counter: str, predicted: str) -> dict[str, list[float]]:
    """Relative errors of each stack, and of all together."""
    found = defaultdict(list)
    for case, truth, estimate in ROWS:
        if counter in truth:
            error = abs(getattr(estimate, predicted) / GIB / truth[counter] - 1)
            found[case["stack"]].append(error)
            found["all"].append(error)
    return found


def test_peak_allocated_bytes_of_published_runs() -> None:
    found = errors("peak_allocated_gib", "peak_allocated_bytes")
    assert median(found["all"]) <= 0.02
    assert quantiles(found["all"], n=10)[-1] <= 0.08
    assert max(median(each) for each in found.values()) <= 0.08


def test_steady_allocated_bytes_of_published_runs() -> None:
    assert median(errors("steady_allocated_gib", "steady_allocated_bytes")["all"]) <= 0.001


def test_device_bytes_of_published_runs() -> None:
    assert median(errors("device_gib", "device_bytes")["all"]) <= 0.06


def test_no_run_that_ran_out_of_memory_is_called_fitting() -> None:
    ran_out = [estimate for _, truth, estimate in ROWS if truth.get("oom")]
    assert len(ran_out) >= 19
    assert not any(estimate.fits for estimate in ran_out)


def test_runs_that_worked_are_called_fitting() -> None:
    worked = [estimate for _, truth, estimate in ROWS if not truth.get("oom")]
    assert sum(not estimate.fits for estimate in worked) <= 0.05 * len(worked)


def test_every_stack_that_was_measured_has_a_row() -> None:
    assert {case["stack"] for case, _, _ in ROWS} <= set(REFERENCE_TRAINERS)


def test_a_stack_without_a_row_answers_as_ours() -> None:
    chosen = configuration(Sharding.FSDP, num_ranks=8, checkpointing=FULL)
    ours = estimate_memory(LLAMA_8B, chosen, gpu())
    assert estimate_memory(LLAMA_8B, replace(chosen, reference="an unknown trainer"), gpu()) == ours
    assert reference_of("an unknown trainer") is REFERENCE_TRAINERS[SHARDWISE]


@pytest.mark.parametrize("name", [name for name in REFERENCE_TRAINERS if name != SHARDWISE])
def test_a_row_names_its_source_and_changes_something(name: str) -> None:
    ours, reference = REFERENCE_TRAINERS[SHARDWISE], REFERENCE_TRAINERS[name]
    assert len(reference.source) > len("trainer/runtime")
    assert replace(reference, name=ours.name, source=ours.source) != ours


def peak(chosen: Any) -> int:
    return estimate_memory(MISTRAL_7B, chosen, gpu()).peak_allocated_bytes


LORA = configuration(
    method=Method.LORA,
    precision=Precision.BF16,
    checkpointing=FULL,
    seq_len=4096,
    micro_batch=4,
    reference="hf-trainer",
)


def test_an_fp32_residual_stream_keeps_twice_the_boundaries() -> None:
    """A k-bit preparation that casts norms to fp32 does that: 2 h L more a token were measured, to the byte."""
    wide = replace(LORA, policy=PolicyChoices(residual_bytes=4))
    before, after = (estimate_memory(MISTRAL_7B, each, gpu()).events["forward_end"] for each in (LORA, wide))
    tokens = 4 * 4096
    rotary = 2 * 2 * 4096 * 128  # its cosines and sines
    assert after - before == 2 * 4096 * 32 * tokens + rotary


def test_the_longest_row_sets_the_peak_where_rows_are_padded_to_it() -> None:
    padded = replace(LORA, seq_len=512, policy=PolicyChoices(longest_seq=4096))
    assert peak(padded) == peak(LORA)


def test_adapters_in_16_bit_halve_their_state() -> None:
    dims = dims_of(MISTRAL_7B)
    narrow = replace(LORA, policy=PolicyChoices(adapter_bytes=2))
    assert policy_of(LORA, gpu(), dims).trained_bytes == 4
    steady = [estimate_memory(MISTRAL_7B, each, gpu()).steady_allocated_bytes for each in (LORA, narrow)]
    adapters = 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert steady[0] - steady[1] == (12 - 6) * adapters


def test_reducing_every_micro_batch_leaves_no_whole_gradients() -> None:
    chosen = configuration(Sharding.FSDP, num_ranks=8, checkpointing=FULL, accumulation=4)
    reduced = replace(chosen, policy=PolicyChoices(reduces_every_micro_batch=True))
    whole, sharded = (estimate_memory(LLAMA_8B, each, gpu()).events["forward_end"] for each in (chosen, reduced))
    assert whole - sharded == 4 * LLAMA_8B.num_parameters - 4 * LLAMA_8B.num_parameters // 8


def test_fsdp1_keeps_sharded_gradients_between_steps() -> None:
    fields: dict[str, Any] = {"num_ranks": 4, "checkpointing": FULL, "optimizer": Optimizer.ADAMW}
    ours, theirs = (
        configuration(Sharding.FSDP, reference=reference, **fields) for reference in (SHARDWISE, "hf-trainer")
    )
    steady = [estimate_memory(MISTRAL_7B, each, gpu()).steady_allocated_bytes for each in (ours, theirs)]
    assert steady[1] - steady[0] == MISTRAL_7B.num_parameters * 4 // 4


def test_frozen_blocks_under_fsdp1_are_retained_until_the_backward_ends() -> None:
    """2 h L of inputs and 2 h (L - 2) of their gradients, where one boundary would do."""
    chosen = replace(LORA, strategy=replace(LORA.strategy, sharding=Sharding.FSDP), num_ranks=4, ranks_per_node=4)
    found = estimate_memory(MISTRAL_7B, chosen, gpu())
    boundary = 2 * 4096 * 4 * 4096
    assert found.peak_event == "block_backward_bottom"
    assert (found.parts["activations"], found.parts["retained_gradients"]) == (32 * boundary, 30 * boundary)


def test_an_overhead_can_be_replaced() -> None:
    chosen = configuration(Sharding.FSDP, num_ranks=8, checkpointing=FULL)
    measured = replace(
        OVERHEADS, communicator_bytes=Line(low=GIB, likely=2 * GIB, high=3 * GIB, source="measured here")
    )
    before, after = (estimate_memory(LLAMA_8B, chosen, gpu(), table).device_bytes for table in (OVERHEADS, measured))
    assert after - before == 2 * GIB - OVERHEADS.communicator_bytes.likely


@pytest.mark.parametrize("name", ["trl", "axolotl", "llama-factory"])
def test_a_subclass_of_transformers_trainer_holds_what_the_trainer_holds(name: str) -> None:
    ours, trainer, subclass = (
        estimate_memory(LLAMA_8B, configuration(loss=LossHead.EAGER, reference=reference), gpu()).peak_allocated_bytes
        for reference in (SHARDWISE, "hf-trainer", name)
    )
    assert subclass == trainer != ours


def test_adamw_of_deepspeed_itself_takes_no_square_roots_of_all_moments_at_once() -> None:
    of_trainer, of_deepspeed = (
        estimate_memory(
            LLAMA_8B,
            configuration(
                Sharding.ZERO2, optimizer=Optimizer.ADAMW, num_ranks=8, checkpointing=FULL, reference=reference
            ),
            gpu(),
        ).events["optimizer_step"]
        for reference in ("hf-trainer", "deepspeed")
    )
    assert of_trainer - of_deepspeed == pytest.approx(4 * LLAMA_8B.num_parameters / 8, rel=0.01)
