"""A run that is resumed where job or machine have changed goes on under what its checkpoint fits, or says why not."""

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from planning_factory import data_of, job_of, plan_of

from shardwise.launch.run.start import describe_changes, plan_to_resume, refuse_other_run, with_earlier_length
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.fields import job_tree
from shardwise.trainer.spec.job.kinds import Warmup
from shardwise.trainer.spec.job.sections import LrSchedule
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan


@pytest.fixture
def earlier() -> Plan:
    return plan_of("tiny", "2xCPU")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Holds a checkpoint of AdamW's fp32 state, of all weights."""
    folder = tmp_path / "checkpoints" / "step-00000030"
    folder.mkdir(parents=True)
    facts = {"step": 30, "optimizer": "adamw", "precision": "fp32"}
    (folder / "MANIFEST.json").write_bytes(msgspec.json.encode({"facts": facts}))
    return tmp_path


def on_less(plan: Plan, *, others: bool = True) -> Plan:
    """The plan for a machine with fewer cores, on which 8-bit state came out first."""
    host = replace(plan.hardware.host, num_cores=1)
    first = replace(plan.chosen, strategy=replace(plan.chosen.strategy, name="8-bit", optimizer=Optimizer.ADAMW_8BIT))
    candidates = (first, *(plan.candidates if others else ()))
    return replace(plan, hardware=replace(plan.hardware, host=host), candidates=candidates)


def resume(plan: Plan, earlier: Plan, run_dir: Path, *, may_choose: bool = True) -> tuple[Plan, str]:
    stream = io.StringIO()
    taken = plan_to_resume(plan, earlier, run_dir, Console(stream), may_choose=may_choose)
    return taken, stream.getvalue()


def test_without_a_change_the_earlier_plan_goes_on_and_reads_data_and_model_where_they_are_now(earlier, run_dir):
    """The cache was moved, or removed and filled again, or the run is on another machine."""
    assert resume(earlier, earlier, run_dir) == (earlier, "")
    data = replace(earlier.data, cache_dir="/elsewhere/data")
    plan = replace(earlier, data=data, model_path="/elsewhere/model", tokenizer_path="/elsewhere/tokenizer")
    assert resume(plan, earlier, run_dir)[0] == plan
    plan = replace(earlier, hardware=on_less(earlier).hardware)  # its checkpoint fits the plan of another machine
    taken, told = resume(plan, earlier, run_dir)
    assert taken is plan and "cores" in told


def test_what_cannot_go_on_gives_way_to_the_best_that_can(earlier, run_dir):
    taken, told = resume(on_less(earlier), earlier, run_dir)
    assert taken.chosen.strategy == earlier.chosen.strategy
    assert taken.chosen.strategy.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FUSED)
    assert all(fact in told for fact in ("8-bit", "adamw", "candidate 2"))
    assert taken.fallbacks and all(each.strategy.sharding in Sharding for each in taken.fallbacks)


@pytest.mark.parametrize(
    ("others", "may_choose", "facts"),
    [(True, False, r"8-bit.*checkpoint of adamw"), (False, True, r"checkpoint of adamw.* 1 candidates")],
)
def test_what_was_taken_by_hand_or_is_without_another_is_refused(earlier, run_dir, others, may_choose, facts):
    with pytest.raises(InputError, match=facts):
        resume(on_less(earlier, others=others), earlier, run_dir, may_choose=may_choose)


def test_what_the_job_leaves_open_stays_as_the_run_began() -> None:
    """Three ranks would take another batch by default, and another length would be a change of the job."""
    job, data = job_of(seq_len=512), data_of(num_rows=400)
    earlier, here = (plan_of("tiny", spec, job=job, data=data) for spec in ("2xCPU", "3xCPU"))
    assert earlier.schedule.tokens_per_step != here.schedule.tokens_per_step
    again = plan_of("tiny", "3xCPU", job=with_earlier_length(here.job, earlier), data=data)
    for name in ("tokens_per_step", "num_steps"):
        assert getattr(again.schedule, name) == getattr(earlier.schedule, name)
    assert describe_changes(again, earlier) == ["number of CPU devices was 2, is 3"]
    assert with_earlier_length(job_of(epochs=2.0), earlier).train.epochs == 2


# A setting that is taken from the next step on; its value at first and on the resume.
TAKEN: dict[str, tuple[Any, Any]] = {
    "lr": (1e-3, 2e-3),
    "schedule": (LrSchedule.COSINE, LrSchedule.LINEAR),
    "warmup": (Warmup(steps=3), Warmup(steps=5)),
    "clip": (1.0, 0.5),
    "weight_decay": (0.1, 0.2),
    "steps": (40, 50),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_setting_that_may_change_is_taken_and_reported_with_both_values(name: str, run_dir: Path) -> None:
    earlier, plan = (plan_of("tiny", "2xCPU", **{"steps": 40, name: value}) for value in TAKEN[name])
    refuse_other_run(run_dir, plan, earlier)
    taken, reported = resume(plan, earlier, run_dir)
    assert taken is plan
    before, now = (job_tree(each.job)["train"][name] for each in (earlier, plan))
    assert f"train.{name} was {before}, is {now}" in reported


@pytest.mark.parametrize(("name", "values"), [("seed", (0, 7)), ("tokens_per_step", (8192, 16384))])
def test_another_seed_or_batch_is_refused_with_both_values(name: str, values: tuple[int, int], run_dir: Path) -> None:
    given: dict[str, Any] = {"seq_len": 512, "tokens_per_step": 8192}
    earlier, plan = (plan_of("tiny", "2xCPU", **given | {name: each}) for each in values)
    with pytest.raises(InputError, match=rf"train\.{name}: {values[0]}, this job has {values[1]}; undo the change"):
        refuse_other_run(run_dir, plan, earlier)


def test_fewer_steps_than_are_done_are_refused_and_as_many_end_the_run(run_dir: Path) -> None:
    earlier, enough, too_few = (plan_of("tiny", "2xCPU", steps=steps) for steps in (40, 30, 29))
    assert resume(enough, earlier, run_dir)[0] is enough
    with pytest.raises(InputError, match=r"saved at step 30, this job has 29 steps: use train\.steps=30"):
        resume(too_few, earlier, run_dir)
