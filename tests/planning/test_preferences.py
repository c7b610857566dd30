"""Plans for preference pairs: two rows an example, and a reference that costs time and no memory."""

from typing import Any

import pytest
from estimate_factory import LLAMA_8B, configuration, gpu
from msgspec.structs import replace
from planning_factory import data_of, job_of, plan_of

from shardwise.trainer.planning.configuration import PolicyChoices
from shardwise.trainer.planning.explain.plan_page import explain_plan
from shardwise.trainer.planning.memory import estimate_memory
from shardwise.trainer.planning.schedule import estimate_data
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.data.shapes import assumed_shape
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import DataFormat, DataJob, Objective
from shardwise.trainer.spec.messages.extension import Extension, Hook
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import LossHead, Method


def pairs(**facts: Any) -> DataProfile:
    return data_of(format=DataFormat.PREFERENCE, is_packed=False, **facts)


def planned(method: Method, data: DataProfile) -> Plan:
    job = job_of(method=method, pin={"micro_batch": 1, "sharding": "none", "compile": False}, tokens_per_step=32768)
    return plan_of("1b", "1xH100-SXM5-80GB", job=job, data=data)


@pytest.mark.parametrize("method", [Method.FULL, Method.LORA, Method.QLORA])
def test_a_pair_takes_the_memory_of_two_rows_whatever_its_reference(method: Method) -> None:
    device, rows = gpu("1xH100-SXM5-80GB"), configuration(method=method, micro_batch=4)
    paired = replace(rows, micro_batch=2, policy=PolicyChoices(rows_per_example=2))
    assert estimate_memory(LLAMA_8B, paired, device) == estimate_memory(LLAMA_8B, rows, device)


def test_a_plan_of_pairs_says_so_and_keeps_the_global_batch_in_tokens() -> None:
    plan = planned(Method.LORA, pairs())
    assert (plan.schedule.sequences_per_step, plan.chosen.accumulation) == (8, 8)
    assert "micro batch 1 pair of rows of 2048 tokens" in " ".join(explain_plan(plan).split())


def test_adapters_pay_for_the_reference_in_every_step_and_a_full_model_once_before_the_first() -> None:
    lora, full = (planned(method, pairs()) for method in (Method.LORA, Method.FULL))
    lora_rows, full_rows = (planned(method, data_of(is_packed=False)) for method in (Method.LORA, Method.FULL))
    lora_s, full_s, lora_rows_s, full_rows_s = (
        plan.chosen.speed.parts["compute_s"] for plan in (lora, full, lora_rows, full_rows)
    )
    # A step of 8 pairs is a step of 16 rows; adapters add a forward to a forward and a backward.
    assert 1.2 < lora_s / lora_rows_s < 1.6
    assert 0.9 < full_s / full_rows_s <= 1  # weights are read half as often
    row = next(row for row in full.methods if row.method is Method.FULL)
    training_h = full.schedule.num_steps * full.chosen.speed.step_s / 3600
    assert row.hours is not None and row.hours > 1.1 * training_h


def test_pairs_that_are_streamed_are_learned_by_adapters_as_no_row_can_be_asked_before() -> None:
    job = replace(job_of(tokens_per_step=32768), data=DataJob(streaming=True))
    plan = plan_of("1b", "1xH100-SXM5-80GB", job=job, data=pairs(is_stream=True))
    assert plan.chosen.method is Method.LORA
    assert plan_of("1b", "1xH100-SXM5-80GB", job=job, data=data_of(is_stream=True)).chosen.method is Method.FULL
    with pytest.raises(InputError, match=r"dpo and train\.method: galore"):
        planned(Method.GALORE, pairs(is_stream=True))


EXTENSION = Extension(path="/mine.py", sha256="0", hooks=(Hook.LOSS,))


LEARNS = r"train\.objective: {} learns from .*data\.train holds {}"
OF_CHATS = data_of(format=DataFormat.CHAT, is_packed=False)


@pytest.mark.parametrize(
    ("facts", "extension", "data", "message"),
    [
        ({"pin": {"loss": LossHead.FUSED_LINEAR}}, None, pairs(), "fused_linear and train.objective: dpo"),
        ({}, EXTENSION, pairs(), "train.objective: dpo and the loss of extensions"),
        ({"pin": {"loss": LossHead.CHUNKED}}, EXTENSION, data_of(), "pin.loss: chunked and the loss of extensions"),
        ({"objective": Objective.SFT}, None, pairs(), LEARNS.format("sft", "preference")),
        ({"objective": Objective.DPO}, None, OF_CHATS, LEARNS.format("dpo", "chat")),
        ({"objective": Objective.PRETRAIN}, None, OF_CHATS, LEARNS.format("pretrain", "chat")),
    ],
)
def test_what_cannot_go_together_is_said_before_anything_runs(facts, extension, data, message):
    with pytest.raises(InputError, match=message):
        plan_of("1b", "1xH100-SXM5-80GB", job=job_of(**facts), data=data, extension=extension)


def test_a_loss_of_ones_own_is_planned_with_whole_logits_and_noted() -> None:
    plan = plan_of("1b", "1xH100-SXM5-80GB", extension=EXTENSION)
    assert {candidate.loss for candidate in plan.candidates} == {LossHead.EAGER}
    assert any(note.startswith("loss of extensions: counted as a cross entropy") for note in plan.notes)


def test_preferences_that_nobody_has_read_are_planned_as_pairs() -> None:
    shape = assumed_shape(Objective.DPO, DataFormat.AUTO)
    data = estimate_data(num_bytes=10**8, seq_len=2048, vocab_size=128256, eval_share=0.01, shape=shape)
    rows = estimate_data(num_bytes=10**8, seq_len=2048, vocab_size=128256, eval_share=0.01)
    assert (data.format, data.is_packed, data.num_rows) == (DataFormat.PREFERENCE, False, rows.num_rows // 2)
    plan = plan_of("1b", "1xH100-SXM5-80GB", job=job_of(objective=Objective.DPO), data=data)
    assert "pair" in explain_plan(plan)
