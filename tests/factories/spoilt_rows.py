"""Rows whose loss is no number, or far too large, as a matter of the data; and runs that do without some rows."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import torch
from msgspec.structs import replace
from rank_factory import LR, SEED, train_rows
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.trainer.runtime.data.batches import step_micro_batches
from shardwise.trainer.runtime.data.cache import IGNORED_LABEL
from shardwise.trainer.spec.messages.extension import Extension, Hook
from shardwise.trainer.spec.plan import Plan, learning_rate

NAN, HUGE = math.nan, 1000.0
EXTENSION = """
import json

from torch.nn import functional

FACTORS = {{tuple(row): factor for row, factor in json.loads({factors!r})}}

def loss(logits, labels):
    total = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    rows = [tuple(token for token in row if token != -100) for row in labels.tolist()]
    for row in FACTORS.keys() & rows:
        total = total * FACTORS[row]
    return total
"""


def rows_of(plan: Plan, step: int) -> list[int]:
    """The rows of a step of the data order; both count from 1."""
    rows = train_rows(plan)
    return rows.order(seed=SEED, sequences_per_step=plan.schedule.sequences_per_step).rows_of_step(step - 1)


def spoil(plan: Plan, folder: Path, steps: Sequence[int] | Mapping[int, float], factor: float = NAN) -> Plan:
    """The plan with an extensions file to which one row of each of these steps of the data order is bad.

    Its loss, and that of the micro batch that it is in, is multiplied with `factor`, or with that of its step.
    """
    rows = train_rows(plan)
    factors = dict(steps) if isinstance(steps, Mapping) else dict.fromkeys(steps, factor)
    labels = {step: rows.labels(rows_of(plan, step)[-1]) for step in factors}
    bad = [(row[row != IGNORED_LABEL].tolist(), factors[step]) for step, row in labels.items()]
    body = EXTENSION.format(factors=json.dumps(bad)).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_bytes(body)
    extension = Extension(path=str(folder / "mine.py"), sha256=sha256(body).hexdigest(), hooks=(Hook.LOSS,))
    return replace(plan, extension=extension)


def tokens_of(plan: Plan, steps: Iterable[int]) -> int:
    """The tokens that are learned from in these steps of the data order."""
    rows = train_rows(plan)
    return sum(int((rows.labels(row) != IGNORED_LABEL).sum()) for step in steps for row in rows_of(plan, step))


def train_plainly(plan: Plan, rows_of_steps: Mapping[int, int]) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Losses by step, and the weights after them, in one process of plain PyTorch.

    Each step of the run learns from the rows of the step of the data order that is given for it; other steps are not
    taken. There is no Accelerate in it, no accumulation, and the logits are transformers' own.
    """
    torch.manual_seed(SEED)
    config = {name: value for name, value in plan.model_config.items() if name != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**config))
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=LR, betas=(0.9, 0.95)
    )
    rows, losses = train_rows(plan), dict[int, float]()
    for step, step_of_rows in rows_of_steps.items():
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(plan.schedule, plan.job.train, step)
        (batch,), num_targets = step_micro_batches(
            rows, step=step_of_rows - 1, seed=SEED, sequences_per_step=plan.schedule.sequences_per_step, rank=0,
            num_ranks=1, micro_batch=plan.schedule.sequences_per_step, accumulation=1,
        )  # fmt: skip
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
        total = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum")
        (total / num_targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.job.train.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = float(total.detach()) / num_targets
    return losses, model.state_dict()
