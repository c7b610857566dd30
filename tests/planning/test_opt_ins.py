"""Gains of opting in: those of the plan that each opt-in would lead to."""

import pytest
from planning_factory import machine, plan_of

from shardwise.trainer.planning import reasons
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.reasons import WORTH_A_LINE, WORTH_OPTING_IN, OptIn, opt_ins
from shardwise.trainer.planning.search.choice import seconds_of
from shardwise.trainer.planning.search.configurations import SAME_SPEED
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.units import GIB

CASES = [
    ("1b", "1xRTX-4090", Method.FULL),  # four opt-ins, one of another optimizer than the first of its kind
    ("1b", "1xH100-SXM5-80GB", Method.FULL),
    ("8b", "1xRTX-4090", Method.LORA),
    ("8b", "4xA100-SXM4-80GB", Method.FULL),
    ("8b", "8xH100-SXM5-80GB", Method.FULL),
    ("1b", "2xRTX-3090", Method.FULL),
    ("8b", "8xRTX-4090", Method.LORA),  # paged state, on more shards than the chosen strategy has
]


def found_in(plan: Plan) -> dict[Allowance, OptIn]:
    return {opt_in.allowance: opt_in for opt_in in opt_ins(context_of(plan), plan)}


def plan_with(model: str, spec: str, method: Method, *allow: Allowance) -> Plan:
    hardware = machine(spec, ram_bytes=512 * GIB)
    return plan_of(model, hardware, method=method, allow=allow, seq_len=4096, tokens_per_step=65536)


@pytest.mark.parametrize(("model", "spec", "method"), CASES)
def test_an_opt_in_is_what_a_plan_with_it_would_choose(model: str, spec: str, method: Method) -> None:
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


def test_several_opt_ins_may_be_worth_a_line() -> None:
    found = found_in(plan_with(*CASES[0]))
    assert list(found) == [
        Allowance.OFFLOAD_CPU, Allowance.OPTIMIZER_8BIT, Allowance.OPTIMIZER_APPROX, Allowance.BF16_WEIGHTS
    ]  # fmt: skip


@pytest.mark.parametrize(("model", "spec", "method"), CASES)
def test_strategies_that_shard_more_would_change_nothing(
    model: str, spec: str, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_with(model, spec, method)
    found = found_in(plan)
    monkeypatch.setattr(reasons, "_may_be_faster", lambda *_: True)
    assert found_in(plan) == found


def test_where_state_is_offloaded_more_sharding_can_be_faster() -> None:
    plan = plan_with("8b", "4xV100-32GB", Method.FULL, Allowance.OFFLOAD_CPU)
    assert plan.chosen.strategy.offload is not Offload.NONE
    taken = found_in(plan)[Allowance.OPTIMIZER_8BIT].candidate
    assert taken.strategy.sharding.facts.zero_stage > plan.chosen.strategy.sharding.facts.zero_stage
    assert taken.speed.step_s < plan.chosen.speed.step_s
