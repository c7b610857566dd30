"""Training in one process of plain PyTorch: no Accelerate, no accumulation, and transformers' own logits."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from rank_factory import LR, SEED, train_rows
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.trainer.runtime.data.batches import step_micro_batches
from shardwise.trainer.spec.plan import Plan, learning_rate


class PlainCourse(NamedTuple):
    """Losses by step, gradient norms in order, and the weights after the last step."""

    losses: dict[int, float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]


def plain_model(plan: Plan) -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(**{**plan.model_config, "model_type": "llama"}))


def train_plainly(
    plan: Plan, rows_of_steps: Mapping[int, int] | None = None, *, model: nn.Module | None = None,
    mean_loss: Callable[[nn.Module, int], torch.Tensor] | None = None, later: tuple[int, Plan] | None = None,
) -> PlainCourse:  # fmt: skip
    """Trains `model`, by default the plan's; after the step that `later` names, as its plan states.

    Each step of the run learns from the rows of the step of the data order that is given for it; other steps are not
    taken. `mean_loss` computes the loss of a step, which counts from 0; by default that of all its rows in one forward.
    """
    model = model or plain_model(plan)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in trained if (each.ndim >= 2) is decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    losses, norms = dict[int, float](), []
    for step, step_of_rows in (rows_of_steps or {each: each for each in range(1, plan.schedule.num_steps + 1)}).items():
        now = later[1] if later is not None and step > later[0] else plan
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(now.schedule, now.job.train, step)
            group["weight_decay"] = now.job.train.weight_decay if group["weight_decay"] else 0.0
        loss = mean_loss(model, step_of_rows - 1) if mean_loss else _batch_loss(plan, model, step_of_rows - 1)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), now.job.train.clip or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = float(loss.detach())
    return PlainCourse(losses, norms, model.state_dict())


def _batch_loss(plan: Plan, model: nn.Module, step: int) -> torch.Tensor:
    num_rows = plan.schedule.sequences_per_step
    (batch,), num_targets = step_micro_batches(
        train_rows(plan), step=step, seed=SEED, sequences_per_step=num_rows, rank=0, num_ranks=1, micro_batch=num_rows,
        accumulation=1,
    )  # fmt: skip
    logits = model(input_ids=batch.input_ids, use_cache=False).logits
    total = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum")
    return total / num_targets
