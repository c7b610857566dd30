"""Packages that a plan lacks have the gain of the plan that has them, and are named where that is some per cent."""

from typing import Any

import pytest
from architecture_factory import TINY
from planning_factory import CONFIGS, machine, plan_of
from report_factory import make_report

from shardwise.launch.doctor.checks import missing_for
from shardwise.trainer.planning.explain.recommend import Observed, recommendations
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.search.packages import missing_packages
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import predicted_figures
from shardwise.trainer.spec.strategy import Method

# Scores are capped before the softmax: without flash-attn its attention runs eagerly.
CAPPED = {**TINY["gemma2"], **CONFIGS["8b"], "model_type": "gemma2"}
LIGER = ("liger-kernel",)


def plan_with(*libraries: str, model: Any = "8b", **facts: Any) -> Plan:
    return plan_of(model, machine("1xA100-SXM4-80GB", libraries=libraries), method=Method.LORA, seq_len=4096, **facts)


def test_a_missing_kernel_is_named_with_the_gain_of_the_plan_that_has_it() -> None:
    without, there = (plan_with(*libraries, model=CAPPED) for libraries in (LIGER, (*LIGER, "flash-attn")))
    assert there.chosen.strategy == without.chosen.strategy
    (found,) = missing_packages(context_of(without), without.chosen)
    assert found.gain == pytest.approx(without.chosen.speed.step_s / there.chosen.speed.step_s) and found.gain > 1.2
    assert (
        "flash-attn" in found.sentence
        and "model.flash_kernel" in found.sentence
        and f"{found.gain:.2f}x" in found.sentence
        and found.fix.startswith("python -m pip")
        and "[flash]" in found.fix
    )
    assert any(found.sentence in text for text in without.warnings)
    (of_doctor,) = missing_for(without)
    assert (of_doctor.sentence, of_doctor.fix) == (found.sentence, found.fix)
    predicted = predicted_figures(without.chosen)
    report = make_report(plan=without.chosen, predicted=predicted, measured=predicted)
    assert found.gain in [each.gain for each in recommendations(without, report, Observed())]
    assert not missing_packages(context_of(there), there.chosen)
    assert not any("is not installed" in text for text in there.warnings)


def test_a_missing_fused_head_and_fused_blocks_are_named_where_nothing_is_compiled() -> None:
    without, there = (plan_with(*libraries, pin={"compile": False}) for libraries in ((), LIGER))
    (found,) = missing_packages(context_of(without), without.chosen)
    assert "liger-kernel" in found.sentence and "[liger]" in found.fix
    assert found.gain == pytest.approx(without.chosen.speed.step_s / there.chosen.speed.step_s)


def test_a_package_that_gains_too_little_is_not_named() -> None:
    compiled = plan_with()
    assert compiled.chosen.compile and not missing_packages(context_of(compiled), compiled.chosen)
    on_cpu = plan_of("tiny", "1xCPU")
    assert not missing_packages(context_of(on_cpu), on_cpu.chosen)
