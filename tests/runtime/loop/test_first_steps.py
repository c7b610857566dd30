"""A run whose rows, loss or update are not the plan's is named before step 5; a run in order has no line."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from attempt_runs import metrics_of, run_attempt
from engine_plan_factory import TINY_LLAMA
from msgspec.structs import replace
from rank_factory import rank_plan
from silent_faults import FAULTS, dead_expert

from shardwise.trainer.runtime.loop.first_steps import NUM_STEPS
from shardwise.trainer.runtime.run.state import RunState
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.plan import Plan

QUICK = ("learning rate times ten", "labels one too far", "half of the rows twice")  # an update, a loss and rows
LONG = (pytest.mark.long, pytest.mark.products)
OTHERS = [pytest.param(name, marks=LONG) for name in FAULTS if name not in QUICK]
NAMED = ("labels not shifted", "layer frozen", "matrix without gradient", "no update")  # the run goes on


class Outcome(NamedTuple):
    state: RunState
    error: EnvironmentFaultError | None


def outcome_of(run_dir: Path, plan: Plan) -> Outcome:
    state = RunState()
    try:
        run_attempt(run_dir, plan, state=state)
    except EnvironmentFaultError as error:
        return Outcome(state, error)
    return Outcome(state, None)


def plan_of(cache_dir: Path, **changes: Any) -> Plan:
    settings = {"num_steps": NUM_STEPS + 1, "micro_batch": 4, "accumulation": 2}
    return rank_plan(cache_dir, **(settings | changes))


@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_a_silent_fault_is_named_before_step_5(name, tmp_path, cache_dir):
    with FAULTS[name]():
        found = outcome_of(tmp_path / "run", plan_of(cache_dir))
    assert found.state.incidents, "nothing was named"
    lines = metrics_of(tmp_path / "run")
    (named,) = [line for line in lines if "incidents" in line]
    assert named["step"] <= NUM_STEPS and named["incidents"] == found.state.incidents
    assert (found.error is None) is (name in NAMED)
    if found.error is not None:
        assert found.error.exit_code is ExitCode.ENVIRONMENT and found.state.step <= NUM_STEPS
        assert str(found.error).splitlines()[0] == found.state.incidents[0]
        assert "train.check_first_steps=false" in str(found.error)


@pytest.mark.long
@pytest.mark.products
def test_a_checkpoint_that_is_passed_over_is_said_with_the_first_step_of_the_resume(tmp_path, cache_dir):
    plan = plan_of(cache_dir, checkpoint_every_steps=2, num_steps=6)
    run_attempt(tmp_path / "run", plan, wants_stop=lambda state: state.step == 4)
    shard = next((tmp_path / "run" / "checkpoints" / "step-00000004").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    run_attempt(tmp_path / "run", replace(plan, resume=True), number=2)
    first = next(line for line in metrics_of(tmp_path / "run") if line["attempt"] == 2)
    assert first["step"] == 3 and len(first["incidents"]) == 1
    assert first["incidents"][0].startswith("step-00000004 is damaged and was passed over")


EXPERTS = {**TINY_LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
OF_MIXTURE = {"model_config": EXPERTS, "sequences_per_step": 16, "micro_batch": 8}


def mixture_plan(cache_dir: Path, **changes: Any) -> Plan:
    return replace(plan_of(cache_dir, **(OF_MIXTURE | changes)), model_shape=read_model_shape(EXPERTS))


@pytest.mark.long
@pytest.mark.products
def test_an_expert_that_learns_nothing_is_named_and_the_run_goes_on(tmp_path, cache_dir):
    with dead_expert():
        found = outcome_of(tmp_path / "run", mixture_plan(cache_dir))
    (line,) = found.state.incidents
    assert line.startswith("step 4: no gradient since the start for layer 0: experts 1 of 4; layer 1: experts 1 of 4; ")
    assert found.error is None


AFTER_A_RESUME = ("rows of another seed", "moments forgotten")


@pytest.mark.long
@pytest.mark.products
@pytest.mark.parametrize("name", AFTER_A_RESUME)
def test_a_resume_that_goes_on_with_something_else_is_named_at_its_first_step(name, tmp_path, cache_dir):
    plan = plan_of(cache_dir, num_steps=6)
    run_attempt(tmp_path / "run", plan, wants_stop=lambda state: state.step == 1)
    with FAULTS[name](), pytest.raises(EnvironmentFaultError, match="step 2: "):
        run_attempt(tmp_path / "run", replace(plan, resume=True), number=2)


def test_one_setting_switches_the_checks_off(tmp_path, cache_dir):
    plan = plan_of(cache_dir, num_steps=1, train={"check_first_steps": False})
    with FAULTS["learning rate times ten"]():
        found = outcome_of(tmp_path / "run", plan)
    assert found.state.step == 1 and not found.state.incidents and found.error is None
