"""After an early stop ranks that hold parts of the weights go back to the best ones, each reading its own ranges."""

import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from rank_factory import rank_plan, write_attempt
from safetensors.torch import load_file

from shardwise.trainer.runtime.checkpoint import read_weights
from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.job.sections import CheckpointJob, EvalJob
from shardwise.trainer.spec.strategy import Precision

PATIENCE = 2
CASES = (
    (Sharding.FSDP, Precision.FP32),
    (Sharding.ZERO2, Precision.BF16_MIXED),
    (Sharding.ZERO3, Precision.FP32),
    (Sharding.ZERO3, Precision.BF16_MIXED),
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, cache_dir, run_ranks) -> Path:
    """Runs whose rate is so high that the first steps gain something, and the later ones undo it."""
    folder = tmp_path_factory.mktemp("best")
    plans = []
    for sharding, precision in CASES:
        plan = rank_plan(
            cache_dir, sharding, num_ranks=2, precision=precision, micro_batch=4, accumulation=1, num_steps=40,
            eval_every_steps=1, lr=0.15,
        )  # fmt: skip
        job = replace(plan.job, eval=EvalJob(early_stop=PATIENCE), checkpoint=CheckpointJob(best="eval_loss", keep=1))
        plans.append(write_attempt(folder / f"{sharding}-{precision}", replace(plan, job=job)))
    run_ranks(plans, 2)
    return folder


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_export_is_of_the_best_step(case, stopped):
    run_dir = stopped / "-".join(case)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["eval_loss"] for line in lines]
    best = losses.index(min(losses)) + 1
    assert best == len(losses) - PATIENCE < 40
    checkpoints = {
        step: read_weights(open_checkpoint(run_dir / "checkpoints" / f"step-{step:08d}"))
        for step in (best, len(losses))
    }
    exported = load_file(run_dir / "export" / "model.safetensors")
    assert exported.keys() == checkpoints[best].keys()
    for name, weight in exported.items():
        assert torch.equal(weight, checkpoints[best][name].to(weight.dtype)), name
        assert not torch.equal(weight, checkpoints[len(losses)][name].to(weight.dtype)), name
