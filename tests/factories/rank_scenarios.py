"""Scenarios for every sharding engine: an early stop, a return to a checkpoint, the memory of one small model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attempt_runs import losses_of, metrics_of
from estimate_factory import config, configuration, cpu, shape_of
from msgspec.structs import replace
from plain_training import PlainCourse
from rank_factory import SEQ_LEN, rank_plan
from safetensors.torch import load_file

from shardwise.trainer.planning.memory import estimate_memory
from shardwise.trainer.planning.search.configurations import smallest_buckets
from shardwise.trainer.runtime.checkpoint import read_weights
from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint
from shardwise.trainer.runtime.run.state import STEPS_UNTIL_ROLL_BACK, PassedOver
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.job.sections import CheckpointJob, EvalJob
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import MemoryEstimate, Plan
from shardwise.trainer.spec.strategy import LossHead, Precision

PATIENCE, MOST_STEPS = 2, 40

# A run that goes back once: five steps in a row have a bad row.
NUM_STEPS_BACK, SAVED_STEP = 10, 3
BAD_STEPS = range(5, 5 + STEPS_UNTIL_ROLL_BACK)
PASSED_OVER = PassedOver(after_step=SAVED_STEP, num_steps=BAD_STEPS[-1] - SAVED_STEP)
TAKEN = {step: step if step <= SAVED_STEP else step + PASSED_OVER.num_steps for step in range(1, NUM_STEPS_BACK + 1)}

FIELDS = config(4096, 192, 512, 4, 6, 2, is_tied=True, head_dim=32)
SHAPE = shape_of(FIELDS)
CHUNK_TOKENS = 40


def early_stop_plan(cache_dir: Path, sharding: Sharding, **settings: Any) -> Plan:
    """A learning rate so high that the first steps gain something, and the later ones undo it."""
    plan = rank_plan(cache_dir, sharding, accumulation=1, num_steps=MOST_STEPS, eval_every_steps=1, lr=0.15, **settings)
    job = replace(plan.job, eval=EvalJob(early_stop=PATIENCE), checkpoint=CheckpointJob(best="eval_loss", keep=1))
    return replace(plan, job=job)


def check_best_export(run_dir: Path) -> None:
    losses = [line["eval_loss"] for line in metrics_of(run_dir)]
    best = losses.index(min(losses)) + 1
    assert best == len(losses) - PATIENCE < MOST_STEPS
    retained, last = (
        read_weights(open_checkpoint(run_dir / "checkpoints" / f"step-{step:08d}")) for step in (best, len(losses))
    )
    exported = load_file(run_dir / "export" / "model.safetensors")
    assert exported.keys() == retained.keys()
    for name, weight in exported.items():
        assert torch.equal(weight, retained[name].to(weight.dtype)), name
        assert not torch.equal(weight, last[name].to(weight.dtype)), name


def check_going_back(run_dir: Path, plain: PlainCourse) -> None:
    """Steps are those of `plain`, which passed over the same rows, and the checkpoint records it."""
    losses, last_bad = losses_of(run_dir), BAD_STEPS[-1]
    assert losses[BAD_STEPS[0] - 1 : last_bad] == [None] * STEPS_UNTIL_ROLL_BACK
    assert losses[:SAVED_STEP] + losses[last_bad:] == pytest.approx(list(plain.losses.values()), abs=1e-5)
    weights = load_file(run_dir / "export" / "model.safetensors")
    for name, weight in plain.weights.items():
        difference = (weights[name] - weight).abs()
        assert difference.mean() < 1e-6 and difference.max() < 1e-3, name
    manifest = open_checkpoint(run_dir / "checkpoints" / f"step-{NUM_STEPS_BACK:08d}").manifest
    assert all(len(entry.state) == 2 for entry in manifest.parameters.values()), "also right after an evaluation"
    spikes = manifest.facts.spikes
    assert (spikes.passed_over, spikes.skipped_steps, spikes.in_a_row) == ((PASSED_OVER,), (), 0)
    assert list(spikes.losses) == pytest.approx(list(plain.losses.values()), abs=1e-5)


def share_plan(cache_dir: Path, sharding: Sharding, *, num_ranks: int) -> Plan:
    """Four steps, of which the third is measured, after an evaluation, whose forward gathers for no backward."""
    plan = rank_plan(
        cache_dir, sharding, num_ranks=num_ranks, num_steps=4, sequences_per_step=num_ranks, micro_batch=1,
        accumulation=1, eval_every_steps=2, model_config=FIELDS, loss=LossHead.CHUNKED, loss_chunk_tokens=CHUNK_TOKENS,
        optimizer=Optimizer.ADAMW_FUSED,
    )  # fmt: skip
    chosen = replace(plan.chosen, buckets=smallest_buckets(SHAPE, plan.chosen.strategy))
    return replace(plan, model_shape=SHAPE, candidates=(chosen,))


def predicted_share(sharding: Sharding, *, num_ranks: int, ranks_per_node: int) -> MemoryEstimate:
    chosen = configuration(
        sharding, precision=Precision.FP32, optimizer=Optimizer.ADAMW_FUSED, num_ranks=num_ranks,
        ranks_per_node=ranks_per_node, seq_len=SEQ_LEN, loss=LossHead.CHUNKED, loss_chunk_tokens=CHUNK_TOKENS,
    )  # fmt: skip
    return estimate_memory(SHAPE, replace(chosen, buckets=smallest_buckets(SHAPE, chosen.strategy)), cpu(num_ranks))
