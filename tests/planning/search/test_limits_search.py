"""What is said to be the longest, the largest and the most does fit, and the next step up does not."""

from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import CONFIGS, data_of, job_of, machine, shape_of

from shardwise.trainer.planning.candidates import candidate_of, configuration_of, excess, with_micro_batch
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.limits import (
    SEQ_UNIT,
    LimitStep,
    Question,
    largest_batches,
    largest_models,
    limits_json,
    limits_section,
    longest_sequences,
)
from shardwise.trainer.planning.page.content import Page, page_text
from shardwise.trainer.planning.planner import open_contexts
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.plan import Calibration, Candidate
from shardwise.trainer.spec.strategy import Checkpointing, Method
from shardwise.trainer.spec.units import GIB

PRESETS = {name: read_model_shape(config) for name, config in CONFIGS.items()}
CASES = [
    ("1b", machine("1xRTX-4060-8GB", ram_bytes=32 * GIB)), ("1b", machine("1xRTX-4090")),
    ("8b", machine("2xRTX-3090", ram_bytes=64 * GIB)), ("8b", machine("8xH100-SXM5-80GB")),
]  # fmt: skip


ON_CARD = machine("1xRTX-4090")


def contexts(model: str, hardware: Hardware, **facts: Any) -> dict[Method, PlanningContext]:
    job = job_of(**facts)
    return open_contexts(
        job, hardware=hardware, shape=shape_of(model), data=data_of(seq_len=job.train.seq_len),
        calibration=Calibration(), versions={"shardwise": "0"},
    )  # fmt: skip


def fits(context: PlanningContext, candidate: Candidate, **changes: Any) -> bool:
    configuration = replace(configuration_of(context, candidate), **changes)
    return excess(context, candidate_of(context, configuration)) is None


@pytest.mark.parametrize(("model", "hardware"), CASES)
def test_the_longest_sequence_and_the_largest_batch_fit_and_one_step_more_does_not(
    model: str, hardware: Hardware
) -> None:
    by_method = contexts(model, hardware)
    steps = longest_sequences(by_method)
    assert {step.method for step in steps} >= {Method.LORA, Method.QLORA}
    for step in steps:
        context, candidate = by_method[step.method], step.candidate
        assert step.size == candidate.seq_len
        assert step.size % SEQ_UNIT == 0
        assert fits(context, candidate)
        longer = step.size + SEQ_UNIT
        sequences = max(1, context.schedule.tokens_per_step // longer)
        accumulation = -(-sequences // context.num_ranks)
        assert not fits(context, candidate, seq_len=longer, accumulation=accumulation)
    for step in largest_batches(by_method):
        context = by_method[step.method]
        more = with_micro_batch(context, configuration_of(context, step.candidate), step.size + 1)
        assert step.size == step.candidate.micro_batch
        assert fits(context, step.candidate)
        assert excess(context, candidate_of(context, more)) is not None


@pytest.mark.parametrize(("model", "hardware"), CASES[::2])
def test_each_step_reaches_farther_for_a_price(model: str, hardware: Hardware) -> None:
    """Within one kind: exact before approximate."""
    groups: dict[tuple[Method, bool], list[LimitStep]] = {}
    for step in longest_sequences(contexts(model, hardware, allow=tuple(Allowance))):
        groups.setdefault((step.method, step.candidate.strategy.is_exact), []).append(step)
    for steps in groups.values():
        assert [step.size for step in steps] == sorted(step.size for step in steps)
        assert [step.price for step in steps] == sorted(step.price for step in steps)


def test_recomputation_and_host_ram_reach_farther_than_neither() -> None:
    on_card = longest_sequences(contexts("1b", ON_CARD, method=Method.LORA, allow=()))
    assert on_card[0].candidate.checkpointing is Checkpointing.NONE
    assert on_card[-1].candidate.checkpointing is Checkpointing.FULL
    assert on_card[-1].size > 1.5 * on_card[0].size
    assert not any(step.candidate.activation_offload for step in on_card)
    first, *_, farthest = longest_sequences(contexts("1b", ON_CARD, method=Method.LORA, hours=1e-6))
    assert (first.candidate.activation_offload, farthest.candidate.activation_offload) == (False, True)
    assert farthest.size > on_card[-1].size


def test_a_pinned_method_or_mechanism_is_the_only_one_asked() -> None:
    asked = contexts("1b", ON_CARD, method=Method.LORA, pin={"checkpointing": Checkpointing.NONE})
    found = {(step.method, step.candidate.checkpointing) for step in longest_sequences(asked)}
    assert found == {(Method.LORA, Checkpointing.NONE)}


@pytest.mark.parametrize(("spec", "now"), [("1xRTX-4060-8GB", "tiny"), ("1xA100-SXM4-80GB", "1b")])
def test_the_largest_model_fits_and_the_next_does_not(spec: str, now: str) -> None:
    by_method = contexts("tiny", machine(spec, ram_bytes=16 * GIB), seq_len=512, tokens_per_step=8192)
    steps = largest_models(by_method, PRESETS)
    full = [step for step in steps if step.method is Method.FULL]
    assert [step.name for step in full] == [now]
    for step in steps:
        assert step.size == PRESETS[str(step.name)].num_parameters
    largest = {method: max((r.size for r in steps if r.method is method), default=0) for method in Method}
    assert largest[Method.QLORA] >= largest[Method.LORA] >= largest[Method.FULL]


def test_models_with_too_few_positions_are_no_answer() -> None:
    """`tiny` has 512 positions."""
    by_method = contexts("1b", machine("1xRTX-4060-8GB", ram_bytes=2 * GIB), seq_len=1024, tokens_per_step=8192)
    assert "tiny" not in {step.name for step in largest_models(by_method, PRESETS)}


@pytest.mark.parametrize("question", Question)
def test_answers_stand_in_text_and_in_json(question: Question) -> None:
    hardware = machine("2xRTX-3090", ram_bytes=64 * GIB)
    by_method = contexts("8b", hardware)
    asked = {
        Question.LONGEST_SEQ: longest_sequences,
        Question.LARGEST_BATCH: largest_batches,
        Question.LARGEST_MODEL: lambda s: largest_models(s, PRESETS),
    }
    steps = asked[question](by_method)
    section = limits_section(question, steps, machine="2 x RTX-3090", seq_len=2048, shape=shape_of("8b"))
    text = page_text(Page(title="a job", sections=(section,)), width=100)
    answers = limits_json(question, steps, machine="2 x RTX-3090")["answers"]
    assert max(map(len, text.splitlines())) <= 100
    assert len(answers) == len(steps) > 0
    for answer, step in zip(answers, steps, strict=True):
        assert answer["strategy"] == step.candidate.strategy.name
        assert answer["strategy"] in text
    empty = limits_section(question, (), machine="m", seq_len=2048, shape=shape_of("8b"))
    assert "nothing fits" in page_text(Page(title="a job", sections=(empty,)), width=100)


def test_lengths_beyond_the_models_positions_say_so() -> None:
    shape = shape_of("8b")
    steps = longest_sequences(contexts("8b", machine("8xH100-SXM5-80GB")))
    section = limits_section(Question.LONGEST_SEQ, steps, machine="m", seq_len=2048, shape=shape)
    assert "the model has 131,072 positions" in page_text(Page(title="a", sections=(section,)), width=100)
