"""What is said to be the longest, the largest and the most does fit, and the next step up does not."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import CONFIGS, data_of, job_of, machine, shape_of

from shardwise.trainer.planning.candidates import candidate_of, configuration_of, excess, with_micro_batch
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.explain import limits
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
def test_the_longest_sequence_and_the_largest_batch_fit_and_one_step_more_does_not(model, hardware):
    by_method = contexts(model, hardware)
    steps = limits.longest_sequences(by_method)
    assert {step.method for step in steps} >= {Method.LORA, Method.QLORA}
    for step in steps:
        context, candidate = by_method[step.method], step.candidate
        assert step.size == candidate.seq_len and step.size % limits.SEQ_UNIT == 0
        assert fits(context, candidate)
        longer = step.size + limits.SEQ_UNIT
        accumulation = -(-max(1, context.schedule.tokens_per_step // longer) // context.num_ranks)
        assert not fits(context, candidate, seq_len=longer, accumulation=accumulation)
    for step in limits.largest_batches(by_method):
        context = by_method[step.method]
        more = with_micro_batch(context, configuration_of(context, step.candidate), step.size + 1)
        assert step.size == step.candidate.micro_batch
        assert fits(context, step.candidate)
        assert excess(context, candidate_of(context, more)) is not None


@pytest.mark.parametrize(("model", "hardware"), CASES[::2])
def test_each_step_reaches_farther_for_a_price(model: str, hardware: Hardware) -> None:
    """Within one kind: exact before approximate."""
    groups: dict[tuple[Method, bool], list[limits.LimitStep]] = {}
    for step in limits.longest_sequences(contexts(model, hardware, allow=tuple(Allowance))):
        groups.setdefault((step.method, step.candidate.strategy.is_exact), []).append(step)
    for steps in groups.values():
        assert [step.size for step in steps] == sorted(step.size for step in steps)
        assert [step.price for step in steps] == sorted(step.price for step in steps)


def test_recomputation_and_host_ram_reach_farther_than_neither_and_a_pin_is_the_only_one_asked() -> None:
    on_card = limits.longest_sequences(contexts("1b", ON_CARD, method=Method.LORA, allow=()))
    assert on_card[0].candidate.checkpointing is Checkpointing.NONE
    assert on_card[-1].candidate.checkpointing is Checkpointing.FULL
    assert on_card[-1].size > 1.5 * on_card[0].size
    assert not any(step.candidate.activation_offload for step in on_card)
    first, *_, farthest = limits.longest_sequences(contexts("1b", ON_CARD, method=Method.LORA, hours=1e-6))
    assert (first.candidate.activation_offload, farthest.candidate.activation_offload) == (False, True)
    assert farthest.size > on_card[-1].size
    pinned = contexts("1b", ON_CARD, method=Method.LORA, pin={"checkpointing": Checkpointing.NONE})
    found = {(step.method, step.candidate.checkpointing) for step in limits.longest_sequences(pinned)}
    assert found == {(Method.LORA, Checkpointing.NONE)}


@pytest.mark.parametrize(("spec", "now"), [("1xRTX-4060-8GB", "tiny"), ("1xA100-SXM4-80GB", "1b")])
def test_the_largest_model_fits_and_the_next_does_not(spec: str, now: str) -> None:
    by_method = contexts("tiny", machine(spec, ram_bytes=16 * GIB), seq_len=512, tokens_per_step=8192)
    steps = limits.largest_models(by_method, PRESETS)
    assert [step.name for step in steps if step.method is Method.FULL] == [now]
    assert all(step.size == PRESETS[str(step.name)].num_parameters for step in steps)
    largest = {method: max((r.size for r in steps if r.method is method), default=0) for method in Method}
    assert largest[Method.QLORA] >= largest[Method.LORA] >= largest[Method.FULL]
    # `tiny` has 512 positions.
    longer = contexts("1b", machine("1xRTX-4060-8GB", ram_bytes=2 * GIB), seq_len=1024, tokens_per_step=8192)
    assert "tiny" not in {step.name for step in limits.largest_models(longer, PRESETS)}


@pytest.mark.parametrize("question", limits.Question)
def test_answers_stand_in_text_and_in_json(question: limits.Question) -> None:
    by_method = contexts("8b", machine("2xRTX-3090", ram_bytes=64 * GIB))
    steps = {
        limits.Question.LONGEST_SEQ: limits.longest_sequences, limits.Question.LARGEST_BATCH: limits.largest_batches,
        limits.Question.LARGEST_MODEL: lambda contexts: limits.largest_models(contexts, PRESETS),
    }[question](by_method)  # fmt: skip
    text = text_of(question, steps)
    answers = limits.limits_json(question, steps, machine="2 x RTX-3090")["answers"]
    assert max(map(len, text.splitlines())) <= 100
    assert len(answers) == len(steps) > 0
    for answer, step in zip(answers, steps, strict=True):
        assert answer["strategy"] == step.candidate.strategy.name
        assert answer["strategy"] in text
    assert "nothing fits" in text_of(question, ())


def text_of(question: limits.Question, steps: Sequence[limits.LimitStep]) -> str:
    section = limits.limits_section(question, steps, machine="2 x RTX-3090", seq_len=2048, shape=shape_of("8b"))
    return page_text(Page(title="a job", sections=(section,)), width=100)


def test_lengths_beyond_the_models_positions_say_so() -> None:
    steps = limits.longest_sequences(contexts("8b", machine("8xH100-SXM5-80GB")))
    assert "the model has 131,072 positions" in text_of(limits.Question.LONGEST_SEQ, steps)
