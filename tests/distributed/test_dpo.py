"""DPO under every engine: two ranks learn what one does, and the reference is the plain base, gathered or not."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attempt_runs import metrics_of
from msgspec.structs import replace
from pair_factory import pair_plan, plain_logps, write_pairs
from rank_factory import SEED, ranks_of, write_attempt
from safetensors.numpy import load_file

from shardwise.trainer.runtime.data.batches import step_micro_batches
from shardwise.trainer.runtime.data.cache import TokenRows
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.job.sections import LoraJob, LrSchedule
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import LossHead, Method

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks

EXACT = 1e-6
NUM_STEPS, BETA = 4, 0.1
LORA = {"lora": LoraJob(rank=4, alpha=8.0), "schedule": LrSchedule.CONSTANT}
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"method": Method.LORA},
    "full": {"micro_batch": 3},  # so that the last round of the rows leaves dummies among those of a rank
    "fused": {"method": Method.LORA, "loss": LossHead.FUSED},
    "handed": {"num_steps": NUM_STEPS // 2},
    "stalled": {"method": Method.LORA, "lr": 0.0, "eval_every_steps": 1, "early_stop": 2},
}
ALONE = ((Sharding.NONE, "lora"), (Sharding.NONE, "full"))
TORCH = ((Sharding.DDP, "full"), (Sharding.FSDP, "lora"), (Sharding.FSDP, "full"))
STALLED, HANDED = (Sharding.FSDP, "stalled"), (Sharding.DDP, "handed")
ZERO = ((Sharding.ZERO3, "fused"), (Sharding.ZERO3, "full"))


def each(runs: Sequence[tuple[Sharding, str]]):
    return pytest.mark.parametrize(("sharding", "kind"), runs, ids=[f"{sharding}-{kind}" for sharding, kind in runs])


def plan_of(cache_dir: Path, sharding: Sharding, kind: str) -> Plan:
    settings = {"num_steps": NUM_STEPS, "eval_every_steps": 2, "lr": 5e-3, "micro_batch": 2, **KINDS[kind]}
    return pair_plan(cache_dir, sharding, accumulation=4 // ranks_of(sharding), train=LORA, **settings)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "rows")


@pytest.fixture(scope="module")
def runs(run_dirs, pairs) -> Callable[[Sharding, str], Path]:
    run_dir_of = run_dirs(lambda run, _: plan_of(pairs, *run), (*ALONE, *TORCH, STALLED, HANDED, *ZERO))
    return lambda sharding, kind: run_dir_of((sharding, kind))


def column(run_dir: Path, name: str) -> list[float]:
    return [line[name] for line in metrics_of(run_dir) if name in line]


@pytest.fixture(scope="module")
def base_logps(pairs) -> list[float]:
    """Mean log-probability of each step's chosen answers under the plain base, by transformers' own logits."""
    model, rows, found = build_model(plan_of(pairs, Sharding.NONE, "full")).eval(), TokenRows.open(pairs, "train"), []
    for step in range(NUM_STEPS):
        (batch,), num_pairs = step_micro_batches(
            rows, step=step, seed=SEED, sequences_per_step=8, rank=0, num_ranks=1, micro_batch=8, accumulation=1
        )
        found.append(float(plain_logps(model, batch)[:8].sum()) / num_pairs)
    return found


@each([*TORCH, *ZERO])
def test_two_ranks_learn_what_one_does(sharding, kind, runs):
    run_dir, alone = runs(sharding, kind), runs(Sharding.NONE, "lora" if kind in ("lora", "fused") else "full")
    for name in ("loss", "eval_loss", "eval_reward_margin", "reward_accuracy", "tokens"):
        assert column(run_dir, name) == pytest.approx(column(alone, name), abs=EXACT), name
    assert len(column(run_dir, "loss")) == NUM_STEPS
    assert abs(column(run_dir, "loss")[-1] - math.log(2)) > 1e-3, "a difference would show"


@each([*TORCH, *ZERO])
def test_the_reference_is_the_plain_base(sharding, kind, runs, base_logps):
    run_dir = runs(sharding, kind)
    policy, rewards = column(run_dir, "logps_chosen"), column(run_dir, "reward_chosen")
    reference = [logps - reward / BETA for logps, reward in zip(policy, rewards, strict=True)]
    assert reference == pytest.approx(base_logps, rel=1e-6)
    assert abs(policy[-1] - base_logps[-1]) > 0.1, "the model has moved away from it"
    if kind == "full":  # its file belongs to no engine
        found, alone = (load_file(each / "reference.safetensors") for each in (run_dir, runs(Sharding.NONE, kind)))
        assert np.array_equal(found["keys"], alone["keys"])
        np.testing.assert_allclose(found["logps"], alone["logps"], rtol=1e-6)


def test_all_ranks_end_early_together_and_the_best_is_exported(runs):
    """At a rate of 0 the first evaluation is the best: two more, and the run ends at step 3 of 4."""
    run_dir = runs(*STALLED)
    assert len(column(run_dir, "loss")) == 3 < NUM_STEPS
    assert len(set(column(run_dir, "eval_loss"))) == 1
    assert (run_dir / "attempts" / "1" / "engaged-1.json").exists(), "the other rank came to its end as well"
    exported = load_file(run_dir / "export" / "adapter_model.safetensors")
    assert all((value == 0).all() for name, value in exported.items() if "lora_B" in name)
    steps = [path.name for path in sorted((run_dir / "checkpoints").glob("step-*"))]
    assert steps == ["step-00000001", "step-00000003"]


def test_one_process_goes_on_with_the_reference_of_two_ranks(runs, pairs, run_ranks):
    run_dir, alone = runs(*HANDED), runs(Sharding.NONE, "full")
    run_ranks([write_attempt(run_dir, replace(plan_of(pairs, Sharding.NONE, "full"), resume=True), number=2)], 1)
    assert (run_dir / "attempts" / "2" / "engaged-0.json").exists()
    assert column(run_dir, "loss") == pytest.approx(column(alone, "loss"), abs=EXACT)
