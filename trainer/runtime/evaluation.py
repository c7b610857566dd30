"""The score on the held-out rows: mean loss over all their targets, each counted once, whatever the ranks.

The forward is that of training, through whatever wraps the model: the same types, the same FP8 products.
"""

import math

import torch
from accelerate import Accelerator
from torch import nn

from trainer.runtime.data import TokenRows, eval_micro_batches
from trainer.runtime.step import forward, sum_over_ranks
from trainer.spec.plan import Plan
from trainer.spec.report import Evaluation


def evaluate(accelerator: Accelerator, model: nn.Module, rows: TokenRows, plan: Plan, *, step: int) -> Evaluation:
    """Runs every held-out row once, spread over the ranks."""
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # of losses, of targets
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for micro_batch in eval_micro_batches(
            rows,
            rank=accelerator.process_index,
            num_ranks=accelerator.num_processes,
            micro_batch=plan.chosen.micro_batch,
        ):
            sums[0] += forward(model, micro_batch, accelerator.device)
            sums[1] += micro_batch.num_targets
    model.train(was_training)
    total, num_targets = sum_over_ranks(sums).tolist()
    loss = total / num_targets
    return Evaluation(
        step=step,
        loss=loss,
        perplexity=math.exp(min(loss, 700.0)),  # exp(700) is near the largest float
        num_tokens=int(num_targets),
        unigram_entropy_nats=plan.data.eval_unigram_entropy_nats,
    )
