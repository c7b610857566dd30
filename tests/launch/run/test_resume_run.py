"""A run that is resumed where job or machine have changed goes on under what its checkpoint fits, or says why not."""

import io
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from planning_factory import data_of, job_of, plan_of

from shardwise.launch.run.start import describe_changes, plan_to_resume, with_earlier_length
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan

CPUS = ("2xCPU", "3xCPU")


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


def test_without_a_change_the_earlier_plan_goes_on(earlier, run_dir):
    assert resume(earlier, earlier, run_dir) == (earlier, "")


def test_another_machine_takes_the_new_plan_where_the_checkpoint_fits_it(earlier, run_dir):
    plan = replace(earlier, hardware=on_less(earlier).hardware)
    taken, told = resume(plan, earlier, run_dir)
    assert taken is plan and "cores" in told


def test_what_cannot_go_on_gives_way_to_the_best_that_can(earlier, run_dir):
    taken, told = resume(on_less(earlier), earlier, run_dir)
    assert taken.chosen.strategy == earlier.chosen.strategy
    assert taken.chosen.strategy.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FUSED)
    assert all(fact in told for fact in ("8-bit", "adamw", "candidate 2"))
    assert taken.fallbacks and all(each.strategy.sharding in Sharding for each in taken.fallbacks)


def test_what_was_taken_by_hand_is_refused_and_not_changed(earlier, run_dir):
    with pytest.raises(InputError, match=r"8-bit.*checkpoint of adamw"):
        resume(on_less(earlier), earlier, run_dir, may_choose=False)


def test_where_nothing_can_go_on_the_run_does_not_start(earlier, run_dir):
    with pytest.raises(InputError, match=r"checkpoint of adamw.* 1 candidates"):
        resume(on_less(earlier, others=False), earlier, run_dir)


def test_an_unchanged_plan_reads_data_and_model_where_they_are_now(earlier: Plan, run_dir: Path):
    """The cache was moved, or removed and filled again, or the run is on another machine."""
    data = replace(earlier.data, cache_dir="/elsewhere/data")
    plan = replace(earlier, data=data, model_path="/elsewhere/model", tokenizer_path="/elsewhere/tokenizer")
    taken, _ = resume(plan, earlier, run_dir)
    assert taken == plan


def test_what_the_job_leaves_open_stays_as_the_run_began() -> None:
    """Three ranks would take another batch by default, and another length would be a change of the job."""
    earlier, here = (plan_of("tiny", spec, job=job_of(seq_len=512), data=data_of(num_rows=400)) for spec in CPUS)
    assert earlier.schedule.tokens_per_step != here.schedule.tokens_per_step
    job = with_earlier_length(here.job, earlier)
    again = plan_of("tiny", CPUS[1], job=job, data=data_of(num_rows=400))
    assert (again.schedule.tokens_per_step, again.schedule.num_steps) == (
        earlier.schedule.tokens_per_step,
        earlier.schedule.num_steps,
    )
    assert describe_changes(again, earlier) == ["number of CPU devices was 2, is 3"]
    assert with_earlier_length(job_of(epochs=2.0), earlier).train.epochs == 2
