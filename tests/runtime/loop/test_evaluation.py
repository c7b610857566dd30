"""The score on the held-out rows against transformers' own logits, for any micro batch and loss head."""

import math
from pathlib import Path

import pytest
import torch
from attempt_runs import reset_accelerate
from engine_plan_factory import TINY_LLAMA
from rank_factory import NUM_EVAL_ROWS, rank_plan, write_packed_rows, write_rows

from shardwise.trainer.runtime.data.batches import eval_micro_batches
from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenRows
from shardwise.trainer.runtime.engines.accelerator import build_accelerator
from shardwise.trainer.runtime.loop.objectives import evaluate
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Evaluation
from shardwise.trainer.spec.strategy import LossHead

LIKELY = {**TINY_LLAMA, "tie_word_embeddings": True, "initializer_range": 0.2}  # a token is likely after itself


@pytest.fixture(scope="module")
def caches(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    return {"rows": write_rows(folder / "rows"), "packed": write_packed_rows(folder / "packed")}


def scored(plan: Plan) -> Evaluation:
    reset_accelerate()
    accelerator = build_accelerator(plan, ds_config=None)
    model = build_model(plan)
    rows = TokenRows.open(Path(plan.data.cache_dir), "eval")
    found = evaluate(accelerator, model, rows, plan, step=3)
    assert model.training, "as it was before"
    return found


def by_hand(plan: Plan) -> tuple[float, int, int]:
    """Loss, right targets and targets of the held-out rows, a document at a time."""
    model = build_model(plan).eval()
    rows = TokenRows.open(Path(plan.data.cache_dir), "eval")
    loss, num_right, num_targets = 0.0, 0, 0
    for batch in eval_micro_batches(rows, rank=0, num_ranks=1, micro_batch=1):
        starts = [0] if batch.position_ids is None else (batch.position_ids[0] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], batch.input_ids.shape[1]], strict=True):
            with torch.no_grad():
                logits = model(input_ids=batch.input_ids[:, start:end]).logits[0, :-1]
            targets = batch.labels[0, start + 1 : end]
            loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            num_right += int((logits.argmax(-1) == targets).sum())
            num_targets += int((targets != IGNORED_LABEL).sum())
    return loss, num_right, num_targets


@pytest.mark.parametrize("head", [LossHead.EAGER, LossHead.CHUNKED, LossHead.FUSED])
@pytest.mark.parametrize(("cache", "micro_batch"), [("rows", 7), ("packed", 5)])
def test_loss_perplexity_and_accuracy_are_exact(caches, cache, micro_batch, head):
    plan = rank_plan(caches[cache], loss=head, micro_batch=micro_batch, model_config=LIKELY)
    loss, num_right, num_targets = by_hand(plan)
    found = scored(plan)
    assert found.num_tokens == num_targets > NUM_EVAL_ROWS
    assert found.loss == pytest.approx(loss / num_targets, abs=1e-6)
    assert found.perplexity == pytest.approx(math.exp(loss / num_targets), rel=1e-6)
    assert found.accuracy == pytest.approx(num_right / num_targets, abs=1e-12)
    assert num_right > 0
