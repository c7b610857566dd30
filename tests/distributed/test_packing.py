"""Packed rows under the engines: every loss is that of the documents, each learned in a forward of its own."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from attempt_runs import engaged_of, losses_of
from plain_training import plain_model, train_plainly
from rank_factory import SEED, rank_plan, write_packed_rows
from torch import nn
from torch.nn import functional

from shardwise.trainer.runtime.data.cache import TokenRows
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead

NUM_STEPS, TOLERANCE = 3, 1e-5
TORCH_CASES = (
    (Sharding.DDP, Checkpointing.FULL, LossHead.CHUNKED, Attention.EAGER),
    (Sharding.FSDP, Checkpointing.NONE, LossHead.FUSED, Attention.SDPA),
)
DEEPSPEED_CASES = (
    (Sharding.ZERO2, Checkpointing.NONE, LossHead.CHUNKED, Attention.SDPA),
    (Sharding.ZERO3, Checkpointing.FULL, LossHead.FUSED, Attention.SDPA),
)


@pytest.fixture(scope="module")
def packed_cache(tmp_path_factory) -> Path:
    """Rows packed from documents of 1 to 60 bytes of text, some of them longer than a row."""
    return write_packed_rows(tmp_path_factory.mktemp("packed") / "rows")


def plan_of(case, cache_dir: Path) -> Plan:
    sharding, checkpointing, loss, attention = case
    return rank_plan(
        cache_dir, sharding, num_steps=NUM_STEPS, accumulation=2, micro_batch=2,
        checkpointing=checkpointing, loss=loss, attention=attention,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(run_dirs, packed_cache) -> Callable[[object], Path]:
    return run_dirs(lambda case, _: plan_of(case, packed_cache), TORCH_CASES + DEEPSPEED_CASES)


@pytest.fixture(scope="module")
def reference(packed_cache: Path) -> list[float]:
    rows = TokenRows.open(packed_cache, "train")

    def mean_loss(model: nn.Module, step: int) -> torch.Tensor:
        documents = [np.split(rows.row(number), rows.document_starts(number)) for number in _numbers(rows, step)]
        return _mean_loss(model, [torch.from_numpy(document) for of_row in documents for document in of_row])

    return list(train_plainly(plan_of(TORCH_CASES[0], packed_cache), mean_loss=mean_loss).losses.values())


def _numbers(rows: TokenRows, step: int) -> list[int]:
    return rows.order(seed=SEED, sequences_per_step=8).rows_of_step(step)


def _mean_loss(model: nn.Module, documents: Sequence[torch.Tensor]) -> torch.Tensor:
    """Over the targets of documents that are each a batch of one."""
    learned = [document for document in documents if len(document) > 1]
    total = torch.zeros(())
    for document in learned:
        logits = model(input_ids=document[None], use_cache=False).logits[0]
        total = total + functional.cross_entropy(logits[:-1], document[1:], reduction="sum")
    return total / sum(len(document) - 1 for document in learned)


@pytest.mark.parametrize("cases", [TORCH_CASES, DEEPSPEED_CASES], ids=["torch", "deepspeed"])
def test_packed_rows_are_learned_as_their_documents_one_by_one(cases, runs, packed_cache, reference):
    for case in cases:
        assert losses_of(runs(case)) == pytest.approx(reference, abs=TOLERANCE), case
        verified = engaged_of(runs(case))
        assert (verified.loss, verified.attention) == case[2:]
    assert reference[-1] < reference[0]
    model, rows = plain_model(plan_of(cases[0], packed_cache)), TokenRows.open(packed_cache, "train")
    with torch.no_grad():
        whole = _mean_loss(model, [torch.from_numpy(rows.row(number)) for number in _numbers(rows, 0)])
    assert abs(float(whole) - reference[0]) > 50 * TOLERANCE, "documents that ran into each other would show"
