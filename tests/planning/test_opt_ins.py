"""Gains of opting in: those of the plan that each opt-in would lead to; TF32 where it gains and nowhere else."""

from typing import Any

import pytest
from planning_factory import machine, plan_of

from shardwise.trainer.planning.explain import alternatives
from shardwise.trainer.planning.explain.alternatives import WORTH_OPTING_IN, Alternative, opt_ins
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.reasons import WORTH_A_LINE
from shardwise.trainer.planning.search.choice import seconds_of
from shardwise.trainer.planning.search.configurations import SAME_SPEED
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method, Precision
from shardwise.trainer.spec.units import GIB

CASES = [
    ("1b", "1xRTX-4090", Method.FULL),  # three opt-ins, one of another optimizer than the first of its kind
    ("1b", "1xH100-SXM5-80GB", Method.FULL),
    ("8b", "1xRTX-4090", Method.LORA),
    ("8b", "4xA100-SXM4-80GB", Method.FULL),
    ("8b", "8xH100-SXM5-80GB", Method.FULL),
    ("1b", "2xRTX-3090", Method.FULL),
    ("8b", "8xRTX-4090", Method.LORA),  # paged state, on more shards than the chosen strategy has
]


def found_in(plan: Plan) -> dict[Allowance | None, Alternative]:
    return {opt_in.allowance: opt_in for opt_in in opt_ins(context_of(plan), plan)}


def plan_with(model: str, spec: str, method: Method, *allow: Allowance) -> Plan:
    hardware = machine(spec, ram_bytes=512 * GIB)
    return plan_of(model, hardware, method=method, allow=allow, seq_len=4096, tokens_per_step=65536)


@pytest.mark.parametrize(("model", "spec", "method"), CASES)
def test_an_opt_in_is_what_a_plan_with_it_would_choose(model, spec, method, monkeypatch):
    """Strategies that shard more, which are passed over, would change nothing."""
    plan = plan_with(model, spec, method)
    chosen, context, found = plan.chosen, context_of(plan), found_in(plan)
    for allowance in set(Allowance) - set(plan.job.allow):
        allowed = plan_with(model, spec, method, allowance).chosen
        is_faster = WORTH_A_LINE * allowed.speed.step_s < chosen.speed.step_s
        is_smaller = WORTH_OPTING_IN * allowed.memory.need_bytes < chosen.memory.need_bytes
        assert (allowance in found) is (is_faster or is_smaller), allowance
        if allowance in found:
            seconds, best = (seconds_of(context, each) for each in (found[allowance].candidate, allowed))
            assert best == pytest.approx(seconds, rel=SAME_SPEED)
    monkeypatch.setattr(alternatives, "_may_be_faster", lambda *_: True)
    assert found_in(plan) == found


def test_several_opt_ins_may_be_worth_a_line() -> None:
    worth = (Allowance.OPTIMIZER_8BIT, Allowance.OPTIMIZER_APPROX, Allowance.BF16_WEIGHTS)
    assert tuple(found_in(plan_with(*CASES[0]))) == worth


def test_where_state_is_offloaded_more_sharding_can_be_faster() -> None:
    plan = plan_with("8b", "4xV100-32GB", Method.FULL, Allowance.OFFLOAD_CPU)
    assert plan.chosen.strategy.offload is not Offload.NONE
    taken = found_in(plan)[Allowance.OPTIMIZER_8BIT].candidate
    assert taken.strategy.sharding.facts.zero_stage > plan.chosen.strategy.sharding.facts.zero_stage
    assert taken.speed.step_s < plan.chosen.speed.step_s


FP32 = {"precision": Precision.FP32, "compile": False}


def plan_in(spec: str, *allow: Allowance, pin: dict[str, Any] = FP32) -> Plan:
    return plan_of("1b", spec, allow=(Allowance.OFFLOAD_CPU, *allow), pin=pin)


def test_a_pinned_fp32_is_told_what_tf32_would_gain():
    exact, allowed = plan_in("1xH100-SXM5-80GB"), plan_in("1xH100-SXM5-80GB", Allowance.TF32)
    assert (exact.chosen.tf32, allowed.chosen.tf32) == (False, True)
    assert found_in(exact)[Allowance.TF32].candidate.speed.step_s == pytest.approx(allowed.chosen.speed.step_s)
    assert allowed.chosen.speed.step_s < exact.chosen.speed.step_s / 2
    assert Allowance.TF32 not in found_in(allowed)
    peaks = [found.chosen.speed.peak_flops_per_s or 0 for found in (allowed, exact)]
    assert peaks[0] > 5 * peaks[1] > 0, "its share is of its own peak"


def test_sums_over_ranks_in_bf16_halve_what_crosses_a_slow_network_and_keep_those_of_micro_batches():
    spec, pin = "2x8xH100-SXM5-80GB,network=200Gb", {"sharding": Sharding.FSDP}
    exact, allowed = (plan_in(spec, *allow, pin=pin) for allow in ((), (Allowance.BF16_REDUCTION,)))
    assert (exact.chosen.bf16_reduction, allowed.chosen.bf16_reduction) == (False, True)
    offered = found_in(exact)[Allowance.BF16_REDUCTION]
    assert offered.effect == "rounds sums over ranks"
    assert offered.candidate.speed.step_s == pytest.approx(allowed.chosen.speed.step_s)
    assert allowed.chosen.speed.step_s < exact.chosen.speed.step_s
    for refused in (Sharding.DDP, Sharding.ZERO3):
        assert not plan_in(spec, Allowance.BF16_REDUCTION, pin={"sharding": refused}).chosen.bf16_reduction
    accumulating = plan_in(spec, Allowance.BF16_REDUCTION, pin=pin | {"micro_batch": 1}).chosen
    assert accumulating.accumulation > 1 and accumulating.reduce_every_micro_batch and accumulating.bf16_reduction


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
    assert Allowance.TF32 not in found_in(plan_in(spec, pin=pin))
    assert not plan_in(spec, Allowance.TF32, pin=pin).chosen.tf32
