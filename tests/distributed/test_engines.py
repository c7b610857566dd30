"""Every engine trains alike, and each is the one that was asked for."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from attempt_runs import engaged_of, metrics_of
from engine_plan_factory import TINY_LLAMA
from msgspec.structs import replace
from plain_training import plain_model
from rank_factory import NUM_EVAL_ROWS, NUM_STEPS, rank_plan, ranks_of
from torch.nn import functional

from shardwise.trainer.runtime.data.batches import eval_micro_batches
from shardwise.trainer.runtime.data.cache import TokenRows
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Method

NUM_ELEMENTS = 106_816  # parameters of the tiny Llama
NUM_PARAMETERS = 21
EAGER = (Sharding.FSDP, Sharding.ZERO2)
# The others have three rows a micro batch, which leaves dummy rows in the last one, and recompute.
TORCH = (Sharding.DDP, Sharding.FSDP, Sharding.FSDP_GRAD_OP)
DEEPSPEED = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
CASES = (*TORCH, *DEEPSPEED, Sharding.HSDP)
# FSDP2 that sums gradients over the ranks with every micro batch, and adapters in both forms.
EVERY, EVERY_OP, LORA, LORA_EVERY = "fsdp every", "fsdp_grad_op every", "fsdp lora", "fsdp lora every"
HSDP_EVERY = "hsdp every"  # four ranks of one machine, where `hsdp` has two machines of two
SUMS = {EVERY: Sharding.FSDP, EVERY_OP: Sharding.FSDP_GRAD_OP, LORA_EVERY: LORA}
# Four blocks, of which two are gathered ahead.
DEEP = {f"{each} two deep": f"{each} deep" for each in ("fsdp", "fsdp_grad_op")}
FUSED = {f"{sharding} lora fused": f"{sharding} lora" for sharding in (Sharding.DDP, Sharding.FSDP)}
UNCHECKED = {f"{sharding} unchecked": sharding for sharding in (Sharding.DDP, Sharding.FSDP, Sharding.ZERO3)}
each = pytest.mark.parametrize("sharding", CASES)


def plan_of(case: str, cache_dir: Path) -> Plan:
    name, *form = case.split()
    sharding = Sharding(name)
    settings: dict[str, Any] = (
        {"micro_batch": 2, "loss": LossHead.EAGER}
        if sharding in EAGER
        else {"micro_batch": 3, "loss": LossHead.CHUNKED, "checkpointing": Checkpointing.FULL}
    )
    settings["method"] = Method.LORA if "lora" in form else Method.FULL
    settings["reduce_every_micro_batch"] = "every" in form
    settings["prefetch_two_blocks"] = "two" in form
    settings["fused_adapters"] = "fused" in form
    if "deep" in form:
        settings["model_config"] = {**TINY_LLAMA, "num_hidden_layers": 4}
    settings["train"] = {"check_first_steps": "unchecked" not in form}
    if sharding is Sharding.HSDP:
        settings |= {"micro_batch": 1, **({"shard_group": 2} if form else {})}
    plan = rank_plan(cache_dir, sharding, num_steps=NUM_STEPS, accumulation=2, eval_every_steps=NUM_STEPS, **settings)
    # Hybrid sharding with a checkpoint after the first step that every rank, of either copy, holds against its memory.
    return replace(plan, schedule=replace(plan.schedule, rehearses_save=case == Sharding.HSDP))


@pytest.fixture(scope="module")
def runs(run_dirs, cache_dir) -> Callable[[str], Path]:
    return run_dirs(
        lambda case, _: plan_of(case, cache_dir),
        (*CASES, *SUMS, HSDP_EVERY, *DEEP, *DEEP.values(), *FUSED, *FUSED.values(), *UNCHECKED),
        kind=":note",
    )


@pytest.mark.parametrize("sharding", (*CASES, HSDP_EVERY))
def test_every_step_equals_that_of_a_single_process_of_plain_pytorch(sharding, runs, reference, read_course):
    course = read_course(runs(sharding))
    assert len(course.losses) == NUM_STEPS
    assert reference.losses[-1] < reference.losses[0] - 0.5, "the reference learns, so that a difference would show"
    course.check(reference)
    if sharding in (Sharding.DDP, Sharding.FSDP, Sharding.ZERO3):
        config = msgspec.json.decode((runs(sharding) / "export" / "config.json").read_bytes())
        assert config["architectures"] == ["LlamaForCausalLM"], "the plain model, not what an engine made of it"


@pytest.fixture(scope="module")
def held_out_loss(cache_dir, reference) -> float:
    model, rows = plain_model(plan_of(Sharding.DDP, cache_dir)), TokenRows.open(cache_dir, "eval")
    model.load_state_dict(reference.weights)
    (batch,) = eval_micro_batches(rows, rank=0, num_ranks=1, micro_batch=NUM_EVAL_ROWS)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch.input_ids).logits[:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits, batch.labels[:, 1:].flatten()).item()


@each
def test_a_score_is_over_the_held_out_rows_of_all_ranks(sharding, runs, held_out_loss):
    assert metrics_of(runs(sharding))[-1]["eval_loss"] == pytest.approx(held_out_loss, abs=1e-4)


@each
def test_the_engine_of_the_plan_is_the_one_that_ran(sharding, runs):
    ranks = [engaged_of(runs(sharding), rank) for rank in (0, 1)]
    for verified in ranks:
        assert (verified.world_size, verified.backend, verified.precision) == (ranks_of(sharding), "gloo", "fp32")
        assert verified.facts.get("copies of the weights") == ("2" if sharding is Sharding.HSDP else None)
        assert verified.optimizer_class == "AdamW"
        kind = "FSDPLlamaForCausalLM" if sharding.uses_fsdp else "DistributedDataParallel"
        assert verified.engine_class == ("DeepSpeedEngine" if sharding.uses_deepspeed else kind)
        assert verified.accumulation == 2
        assert verified.loss == (LossHead.EAGER if sharding in EAGER else LossHead.CHUNKED)
        assert verified.checkpointed_blocks == (0 if sharding in EAGER else 2)
        assert verified.sharded_parameters == (NUM_PARAMETERS if sharding.shards_weights else 0)
    owned = [verified.partition_elements for verified in ranks]
    if sharding.shards_optimizer:
        assert all(elements is not None and elements < 0.51 * NUM_ELEMENTS for elements in owned)
        assert NUM_ELEMENTS <= sum(owned) < 1.01 * NUM_ELEMENTS, "together the model once, but for padding"
    else:
        assert owned == [None, None]


@pytest.mark.parametrize("sharding", TORCH)
def test_gradients_are_summed_with_the_last_micro_batch_only(sharding, runs, notes_of):
    """In each micro batch FSDP2 gathers weights; in the second it sums the gradients of two blocks and of the rest."""
    first, second, update, *_ = notes_of(runs(sharding))["collectives"]
    in_first, in_last = second - first, update - second
    assert in_last >= in_first + (2 if sharding.uses_fsdp else 1)
    assert in_first == 0 or sharding.uses_fsdp


def check_same_steps(run_dir: Path, expected_dir: Path) -> None:
    found, expected = metrics_of(run_dir), metrics_of(expected_dir)
    assert len(found) == NUM_STEPS
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=1e-6)


@pytest.mark.parametrize("case", SUMS)
def test_gradients_that_are_summed_with_every_micro_batch_make_the_same_steps(case, runs, notes_of):
    """In the first micro batch too gradients are summed: of the embedding, two blocks, and the head with its norm."""
    check_same_steps(runs(case), runs(SUMS[case]))
    if case == LORA_EVERY:  # whose embeddings have no gradient, by which the counts are taken
        return
    first, second, update, *_ = notes_of(runs(case))["collectives"]
    other_first, other_second, other_update, *_ = notes_of(runs(SUMS[case]))["collectives"]
    assert second - first == other_second - other_first + 4
    assert update - second == other_update - other_second


@pytest.mark.parametrize("case", DEEP)
def test_two_blocks_gathered_ahead_change_no_step_and_gather_no_more(case, runs, notes_of):
    """A rank whose blocks gather another number ahead than the plan has does not train."""
    check_same_steps(runs(case), runs(DEEP[case]))
    counts, others = (notes_of(runs(each))["collectives"] for each in (case, DEEP[case]))
    # They are counted from the start of a process, which has several runs.
    assert [after - before for before, after in pairwise(counts)] == [b - a for a, b in pairwise(others)]


@pytest.mark.parametrize("case", FUSED)
def test_adapters_fused_with_their_layers_make_the_same_steps_on_two_ranks(case, runs):
    """Verified by the rank itself, before the first step and after it; FSDP2 recomputes the blocks here."""
    assert engaged_of(runs(case), 0).facts["fused adapters"] == "14 of 14 layers"
    assert "fused adapters" not in engaged_of(runs(FUSED[case]), 0).facts
    found, expected = (metrics_of(runs(each)) for each in (case, FUSED[case]))
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=1e-6)


@pytest.mark.parametrize("case", UNCHECKED)
def test_the_checks_of_the_first_steps_change_no_bit_of_what_ranks_learn(case, runs):
    found, expected = (
        [(line["loss"], line["grad_norm"]) for line in metrics_of(runs(each))] for each in (case, UNCHECKED[case])
    )
    assert found == expected and len(found) == NUM_STEPS
