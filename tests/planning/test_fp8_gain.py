"""FP8 is planned by what timing the model's own matrix shapes found, and is not taken where it does not pay."""

from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import context_for, fp8_gain_of, machine, note_of, plan_of

from shardwise.trainer.planning.candidates import candidate_of, configuration_of
from shardwise.trainer.planning.explain.plan_page import explain_plan
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.rules.rule import refuse
from shardwise.trainer.planning.speed.rates import rates_of
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.plan import LEAST_FP8_GAIN, Candidate, Fp8Gain, Plan
from shardwise.trainer.spec.strategy import Fp8Recipe, Precision

HOPPERS = machine("8xH100-SXM5-80GB", libraries=("transformer-engine",))
# 8B on them trains for 5 min 44 s in bf16-mixed, and for less than these 5 min 24 s where FP8 gains 1.3 times.
IN_A_HURRY: dict[str, Any] = {"allow": (Allowance.FP8,), "hours": 0.09, "pin": {"compile": False}}
AT_EASE: dict[str, Any] = {"allow": (Allowance.FP8,)}
PINNED: dict[str, Any] = {"pin": {"precision": Precision.FP8}}
NOT_TIMED = Fp8Gain(recipe=Fp8Recipe.CURRENT, tokens=4096, problem="it took more than 120 s")


def plan(gain: Fp8Gain | None, facts: dict[str, Any]) -> Plan:
    return plan_of("8b", HOPPERS, fp8_gain=gain, **facts)


def in_fp8(candidates: tuple[Candidate, ...]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.strategy.precision is Precision.FP8]


def why_fp8(made: Plan) -> str:
    (reason,) = [reason for reason in made.chosen.reasons if reason.startswith("fp8: ")]
    return reason


def test_where_it_pays_it_is_taken_with_the_figure() -> None:
    made = plan(fp8_gain_of(1.31), IN_A_HURRY)
    assert made.chosen.strategy.precision is Precision.FP8
    assert "measured 1.31x" in why_fp8(made) and "transformer-engine 2.10.0" in why_fp8(made)
    assert why_fp8(made) in " ".join(explain_plan(made).split())


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (fp8_gain_of(0.93), "0.93x"),
        (fp8_gain_of(LEAST_FP8_GAIN - 0.01), "1.04x"),
        (NOT_TIMED, "it took more than 120 s"),
    ],
)
def test_where_it_does_not_pay_no_row_is_in_it(gain: Fp8Gain, words: str) -> None:
    for facts in (AT_EASE, {**IN_A_HURRY, "hours": 0.1}):
        made = plan(gain, facts)
        assert in_fp8((*made.candidates, *made.fallbacks)) == []
        ((reason, remedy),) = {(row.reason, row.remedy) for row in made.rejections if row.rule == "fp8_does_not_pay"}
        assert words in reason and "bf16-mixed" in remedy


def test_a_pin_keeps_it_with_the_figure() -> None:
    made = plan(fp8_gain_of(0.93), PINNED)
    assert made.chosen.strategy.precision is Precision.FP8
    assert "pins it" in why_fp8(made) and "0.93x" in why_fp8(made)
    assert "pins it" in why_fp8(plan(None, PINNED)) and "measured" not in why_fp8(plan(None, PINNED))
    assert made.chosen.speed.step_s > plan(None, PINNED).chosen.speed.step_s


def test_before_it_is_timed_its_speed_is_assumed_and_the_plan_says_so() -> None:
    made = plan(None, IN_A_HURRY)
    assert made.chosen.strategy.precision is Precision.FP8
    assert "assumed" in why_fp8(made) and "`shardwise train`" in why_fp8(made)
    assert plan(None, AT_EASE).chosen.strategy.precision is Precision.FP8


def test_rows_behind_an_exact_one_have_the_figure_too() -> None:
    made = plan(fp8_gain_of(1.2), AT_EASE)
    assert in_fp8(made.candidates) and made.chosen.strategy.precision is Precision.BF16_MIXED
    note = note_of(made, "fp8: ")
    assert "1.20x" in note and "transformer-engine 2.10.0" in note
    plain = plan_of("8b", HOPPERS)
    assert not [words for words in (*plain.notes, *plain.chosen.reasons) if "fp8" in words.lower()]


def test_its_products_run_at_the_measured_multiple_of_bf16s() -> None:
    context = context_for("8b", HOPPERS, fp8_gain=fp8_gain_of(1.25), **AT_EASE)
    (candidate, *_) = in_fp8(plan(None, AT_EASE).candidates)
    configuration = configuration_of(context, candidate)
    rates, strategy = rates_of(configuration, context.device), configuration.strategy
    assert rates.linear == pytest.approx(1.25 * rates.matmul)
    bf16 = replace(configuration, strategy=replace(strategy, precision=Precision.BF16_MIXED), fp8_recipe=None)
    assert rates_of(bf16, context.device).linear == rates.matmul
    # The casts are in what was measured and are not counted again.
    equal = context_for("8b", HOPPERS, fp8_gain=fp8_gain_of(1.0), **AT_EASE)
    times = [candidate_of(equal, each).speed.step_s for each in (configuration, bf16)]
    assert times[0] == pytest.approx(times[1], rel=1e-3)


def test_a_plan_that_was_written_is_judged_by_the_same_figure() -> None:
    made = plan(fp8_gain_of(1.31), IN_A_HURRY)
    read = codec.decode(codec.encode(made), Plan, origin="plan.json")
    assert read.fp8_gain == fp8_gain_of(1.31)
    context = context_of(read)
    again = candidate_of(context, configuration_of(context, read.chosen))
    assert again.speed.step_s == pytest.approx(made.chosen.speed.step_s)
    slow = context_of(replace(read, fp8_gain=fp8_gain_of(0.9)))
    refusal = refuse(slow, read.chosen.strategy)
    assert refusal is not None and refusal.rule == "fp8_does_not_pay"
