"""Checkpoints of runs that train adapters: small, exact on resume, and only for the base they were made on."""

import shutil
from pathlib import Path

import pytest
from attempt_runs import run_attempt
from msgspec.structs import replace
from rank_factory import rank_plan
from safetensors.torch import load_file, save_file

from shardwise.trainer.runtime.checkpoint import base_fingerprint, check_compatible, read_weights
from shardwise.trainer.runtime.loop.session import facts_of
from shardwise.trainer.runtime.run.state import RunState
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import LoraJob, LrSchedule
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Checkpointing, Method, Precision

LORA = LoraJob(rank=4, alpha=8.0, dropout=0.1, dora=True)


def plan_of(
    cache_dir: Path, base: Path | None, num_steps: int, *, method: Method = Method.LORA, lora: LoraJob = LORA,
    neftune_alpha: float | None = 5.0,
) -> Plan:  # fmt: skip
    train_job = {"lora": lora, "schedule": LrSchedule.CONSTANT, "neftune_alpha": neftune_alpha}
    plan = rank_plan(
        cache_dir, method=method, precision=Precision.BF16_MIXED, num_steps=num_steps, train=train_job, micro_batch=8,
        accumulation=1, checkpointing=Checkpointing.FULL,
    )  # fmt: skip
    return replace(plan, model_path=None if base is None else str(base))


def run(run_dir: Path, plan: Plan, number: int = 1) -> RunState:
    return run_attempt(run_dir, plan, number=number)[1]


@pytest.mark.parametrize(("method", "has_base"), [(Method.LORA, True), (Method.QLORA, False)])
def test_a_resumed_run_ends_bitwise_like_one_that_was_not_stopped(method, has_base, base, cache_dir, newest, tmp_path):
    """With dropout, noise and recomputation, in mixed precision: every adapter, moment and count of steps."""
    folder = base if has_base else None
    run(tmp_path / "resumed", plan_of(cache_dir, folder, 3, method=method))
    state = run(tmp_path / "resumed", replace(plan_of(cache_dir, folder, 6, method=method), resume=True), number=2)
    assert (state.resumed_from_step, state.step) == (3, 6)
    run(tmp_path / "straight", plan_of(cache_dir, folder, 6, method=method))
    resumed, straight = (newest(tmp_path / name / "checkpoints") for name in ("resumed", "straight"))
    assert straight.step == 6 and resumed.manifest.files == straight.manifest.files
    assert len(read_weights(straight)) == 3 * 14, "nothing of the base"


@pytest.fixture(scope="module")
def saved(base, cache_dir, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "lora"
    run(run_dir, plan_of(cache_dir, base, 1))
    return run_dir


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"lora": replace(LORA, alpha=16.0)}, "adapters of rank 4, alpha 16, DoRA"),
        ({"lora": replace(LORA, rslora=True)}, "adapters of rank-stabilised rank 4, alpha 8, DoRA"),
        ({"lora": replace(LORA, dora=False)}, "adapters of rank 4, alpha 8"),
        ({"method": Method.QLORA}, "4-bit base, adapters of rank 4, alpha 8, DoRA"),
        ({"method": Method.FULL}, "all weights"),
    ],
)
def test_adapters_of_another_kind_are_refused_with_both(change, kind, saved, base, cache_dir, newest):
    plan = plan_of(cache_dir, base, 3, **change)
    with pytest.raises(InputError, match=f"it has adapters of rank 4, alpha 8, DoRA, this job {kind}\n"):
        check_compatible(newest(saved / "checkpoints"), facts_of(plan, RunState()))


def test_adapters_of_another_base_are_refused_wherever_it_lies(saved, base, cache_dir, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    moved, other = shutil.copytree(base, tmp_path / "moved"), shutil.copytree(base, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"another base model \(fingerprint\): it has [0-9a-f]{12}, this job [0-9a-f]"):
        run(tmp_path / "run", replace(plan_of(cache_dir, other, 3), resume=True), number=2)
    state = run(tmp_path / "run", replace(plan_of(cache_dir, moved, 3), resume=True), number=3)
    assert state.resumed_from_step == 1


def test_the_fingerprint_of_a_base_that_was_drawn_is_of_its_config_and_seed(cache_dir):
    plan = plan_of(cache_dir, None, 1)
    job = replace(plan.job, train=replace(plan.job.train, seed=8))
    others = (replace(plan, job=job), replace(plan, model_config={**plan.model_config, "rms_norm_eps": 1e-5}))
    assert base_fingerprint(plan) == base_fingerprint(plan_of(cache_dir, None, 3))
    assert len({base_fingerprint(each) for each in (plan, *others)}) == 3
