"""TF32: offered where it gains, taken where the job allows it, and nowhere else."""

from typing import Any

import pytest
from planning_factory import plan_of

from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.reasons import opt_ins
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Precision

FP32 = {"precision": Precision.FP32, "compile": False}


def plan(spec: str, *allow: Allowance, pin: dict[str, Any] = FP32) -> Plan:
    return plan_of("1b", spec, allow=(Allowance.OFFLOAD_CPU, *allow), pin=pin)


def offered(found: Plan) -> dict[Allowance, float]:
    """Seconds of a step that each entry of `allow` would lead to."""
    return {leave.allowance: leave.candidate.speed.step_s for leave in opt_ins(context_of(found), found)}


def test_a_pinned_fp32_is_told_what_tf32_would_gain():
    exact = plan("1xH100-SXM5-80GB")
    assert not exact.chosen.tf32
    allowed = plan("1xH100-SXM5-80GB", Allowance.TF32)
    assert allowed.chosen.tf32
    assert offered(exact)[Allowance.TF32] == pytest.approx(allowed.chosen.speed.step_s)
    assert allowed.chosen.speed.step_s < exact.chosen.speed.step_s / 2
    assert Allowance.TF32 not in offered(allowed)


@pytest.mark.parametrize(
    ("spec", "pin"),
    [
        ("1xH100-SXM5-80GB", {}),  # bf16-mixed has no fp32 products to round
        ("1xV100-32GB", FP32),  # without such units
        ("1xRTX-3090", FP32),  # whose datasheet has one rate for both
        ("1xCPU", FP32),
    ],
)
def test_it_is_neither_offered_nor_taken_where_it_gains_nothing(spec: str, pin: dict[str, Any]):
    assert Allowance.TF32 not in offered(plan(spec, pin=pin))
    assert not plan(spec, Allowance.TF32, pin=pin).chosen.tf32


def test_its_share_of_the_peak_is_of_tf32s_peak():
    speed = plan("1xH100-SXM5-80GB", Allowance.TF32).chosen.speed
    assert speed.mfu is not None and 0 < speed.mfu < 1
    exact = plan("1xH100-SXM5-80GB").chosen.speed
    assert speed.peak_flops_per_s is not None and exact.peak_flops_per_s is not None
    assert speed.peak_flops_per_s > 5 * exact.peak_flops_per_s
