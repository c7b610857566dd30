"""A run whose rows, loss or update are not the plan's is named before step 5; a run in order has no line."""

from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from attempt_runs import metrics_of, run_attempt, session_of
from engine_plan_factory import TINY_LLAMA
from msgspec.structs import replace
from outcome_file import FINDING
from rank_factory import SEED, rank_plan, write_packed_rows
from rank_scenarios import predicted_share, share_plan
from silent_faults import FAULTS, OF_EXPERTS

from shardwise.trainer.runtime.data.batches import step_micro_batches
from shardwise.trainer.runtime.data.stream.rows import StepRows
from shardwise.trainer.runtime.loop.first_steps import NUM_STEPS, FirstSteps
from shardwise.trainer.runtime.loop.memory_profile import MemoryProfile
from shardwise.trainer.runtime.loop.step import TokenLoss, run_step
from shardwise.trainer.runtime.run.clock import Clock
from shardwise.trainer.runtime.run.state import RunState
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan, learning_rate
from shardwise.trainer.spec.strategy import LossHead, Method, Precision

# An update, a loss and rows; the others are in the long test.
QUICK = ("learning rate times ten", "labels one too far", "half of the rows twice")
NAMED = ("labels not shifted", "layer frozen", "matrix without gradient", "no update")  # the run goes on


class Outcome(NamedTuple):
    state: RunState
    error: EnvironmentFaultError | None


def outcome_of(run_dir: Path, plan: Plan) -> Outcome:
    state, error = RunState(), None
    try:
        run_attempt(run_dir, plan, state=state)
    except EnvironmentFaultError as raised:
        error = raised
    return Outcome(state, error)


plan_of = partial(rank_plan, num_steps=NUM_STEPS + 1, micro_batch=4, accumulation=2)


@pytest.mark.parametrize("name", QUICK)
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


EXPERTS = {**TINY_LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
OF_MIXTURE: dict[str, Any] = {"model_config": EXPERTS, "sequences_per_step": 16, "micro_batch": 8}


def mixture_plan(cache_dir: Path, **changes: Any) -> Plan:
    return replace(plan_of(cache_dir, **(OF_MIXTURE | changes)), model_shape=read_model_shape(EXPERTS))


@pytest.mark.long
@pytest.mark.products
@pytest.mark.parametrize("name", OF_EXPERTS)
def test_an_expert_that_learns_nothing_is_named_and_the_run_goes_on(name, tmp_path, cache_dir):
    with OF_EXPERTS[name]():
        found = outcome_of(tmp_path / "run", mixture_plan(cache_dir))
    (line,) = found.state.incidents
    assert line.startswith("step 4: no gradient since the start for layer 0: experts 1 of 4; layer 1: experts 1 of 4; ")
    assert found.error is None


@pytest.mark.long
@pytest.mark.products
def test_mixtures_in_order_and_few_tokens_have_no_line(tmp_path, cache_dir):
    for seed in range(10):
        plan = mixture_plan(cache_dir)
        plan = replace(plan, job=replace(plan.job, train=replace(plan.job.train, seed=seed)))
        assert not outcome_of(tmp_path / str(seed), plan).state.incidents
    with OF_EXPERTS["dead expert"]():  # which few tokens do not show
        few = outcome_of(tmp_path / "few", mixture_plan(cache_dir, sequences_per_step=2, micro_batch=1))
    assert not few.state.incidents


def test_the_predicted_peak_holds_with_the_checks_and_nothing_stays(tmp_path, cache_dir):
    plan = share_plan(cache_dir, Sharding.NONE, num_ranks=1)
    memory = predicted_share(Sharding.NONE, num_ranks=1, ranks_per_node=1)
    plan = replace(
        plan, candidates=(replace(plan.chosen, memory=memory),), schedule=replace(plan.schedule, num_steps=6)
    )
    session = session_of(tmp_path / "run", plan)
    checks, figures = FirstSteps(session, TokenLoss()), []
    for step in range(1, 7):
        rows = StepRows(session.train_rows, step - 1, SEED)
        profile = MemoryProfile(session.model, session.optimizer, session.accelerator.device)
        with profile.step():
            checks.before_step()
            micro_batches, num_terms = step_micro_batches(
                session.train_rows, step=step - 1, seed=SEED, sequences_per_step=1, rank=0, num_ranks=1, micro_batch=1,
                accumulation=1,
            )  # fmt: skip
            result = run_step(
                session.accelerator, session.model, session.optimizer, micro_batches, num_terms=num_terms, step=step,
                seed=SEED, lr=learning_rate(plan.schedule, plan.job.train, step), clip=plan.job.train.clip,
                clock=Clock(session.accelerator.device),
            )  # fmt: skip
            session.state.step = step
            assert checks.after_step(rows, micro_batches, result) == ()
        checks.end_if_certain()
        figures.append(profile.figures())
    highest = max(each.peak_allocated_bytes for each in figures)
    assert highest < 1.02 * memory.peak_allocated_bytes
    assert not any(map(len, (value for value in vars(checks).values() if isinstance(value, list | set | frozenset))))


@pytest.mark.long
@pytest.mark.products
@pytest.mark.parametrize("name", ["rows of another seed", "moments forgotten"])
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


@pytest.mark.long
@pytest.mark.products
def test_a_run_in_order_has_no_line_and_the_bits_of_one_without_the_checks(tmp_path, cache_dir):
    for name, is_on in (("with", True), ("without", False)):
        settings: dict[str, Any] = {"num_steps": 4, "train": {"check_first_steps": is_on}, "optimizer": Optimizer.LION}
        found = outcome_of(tmp_path / name, plan_of(cache_dir, **settings))
        assert not found.state.incidents
    weights = [(tmp_path / name / "export" / "model.safetensors").read_bytes() for name in ("with", "without")]
    assert weights[0] == weights[1]


@pytest.mark.long
@pytest.mark.products
def test_of_forty_silent_faults_36_are_named_before_step_5(tmp_path, cache_dir, record_property):
    missed = []
    for name, fault in FAULTS.items():
        with fault():
            found = outcome_of(tmp_path / name.replace(" ", "-"), plan_of(cache_dir))
        is_named = bool(found.state.incidents)
        record_property(FINDING, ("named before step 5" if is_named else "not named", name))
        if not is_named:
            missed.append(name)
    assert len(FAULTS) >= 40
    assert len(missed) <= 4, missed


SIMPLE = [each for each in Optimizer if each is not Optimizer.DEEPSPEED_CPU_ADAM]
GOOD_JOBS: list[dict[str, Any]] = list(
    chain(
        ({"optimizer": a, "precision": b} for a, b in product(SIMPLE, (Precision.FP32, Precision.BF16))),
        (
            {"method": a, "loss": b, "precision": c}
            for a, b, c in product(
                (Method.FULL, Method.LORA, Method.GALORE),
                (LossHead.EAGER, LossHead.CHUNKED, LossHead.FUSED),
                (Precision.FP32, Precision.BF16_MIXED),
            )
        ),
        ({"clip": clip, "lr": lr} for clip, lr in product((1e-3, 1.0), (1e-6, 1e-2))),
    )
)


@pytest.mark.long
@pytest.mark.products
@pytest.mark.parametrize("rows", ["grouped", "packed"])
def test_a_hundred_good_jobs_have_no_line(rows, tmp_path, cache_dir, record_property):
    cache_dir = cache_dir if rows == "grouped" else write_packed_rows(tmp_path / "rows")
    alarms = {}
    for number, settings in enumerate(GOOD_JOBS):
        in_backward = settings.get("optimizer") in (Optimizer.LOMO, Optimizer.ADALOMO)
        batch: dict[str, Any] = {"micro_batch": 8, "accumulation": 1} if in_backward else {}
        found = outcome_of(tmp_path / str(number), plan_of(cache_dir, **batch, **settings))
        if found.state.incidents or found.error is not None:
            alarms[str(settings)] = (found.state.incidents, found.error)
        title = ", ".join(f"{name} {value}" for name, value in settings.items())
        record_property(FINDING, ("a line" if str(settings) in alarms else "no line", f"{rows}: {title}"))
    assert 2 * len(GOOD_JOBS) >= 100
    assert not alarms
