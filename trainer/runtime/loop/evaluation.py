"""The score on the held-out rows: means over all of them, each counted once, whatever the ranks.

The forward is that of training, through whatever wraps the model: the same types, the same FP8 products. Tokens are
scored by `TokenScore`, pairs by the objective that they are trained with (`dpo`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import nn

from trainer.runtime.data.batches import MicroBatch, eval_micro_batches
from trainer.runtime.data.token_rows import TokenRows
from trainer.runtime.engines.engine_state import release_gathered
from trainer.runtime.loop.step import Means, Objective, Sums, Terms, forward
from trainer.runtime.loss.head import Answer
from trainer.spec.plan import Plan
from trainer.spec.report import Evaluation


class TokenScore(NamedTuple):
    """The loss of each target, and whether it is the most likely token."""

    figures: tuple[str, ...] = ("accuracy",)

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Terms:
        loss, num_correct = forward(model, micro_batch, device, answer=Answer.SCORE)
        return Terms(loss, micro_batch.num_targets, micro_batch.num_targets, (num_correct,))


def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    rows: TokenRows,
    plan: Plan,
    *,
    step: int,
    objective: Objective = TokenScore(),  # noqa: B008  # it never changes
) -> Evaluation:
    """Runs every held-out row once, spread over the ranks."""
    sums = Sums(objective, accelerator.device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for micro_batch in eval_micro_batches(
            rows,
            rank=accelerator.process_index,
            num_ranks=accelerator.num_processes,
            micro_batch=plan.chosen.micro_batch,
        ):
            sums.add(objective(model, micro_batch, accelerator.device))
    model.train(was_training)
    release_gathered(model)
    means = sums.means()
    return _of_pairs(means, step) if "reward_margin" in means.figures else _of_tokens(means, step, plan)


def evaluations_without_gain(evaluations: Sequence[Evaluation]) -> int:
    """How many of the last evaluations have no lower loss than the best before them; one without a number has none."""
    best, count = math.inf, 0
    for evaluation in evaluations:
        count = 0 if evaluation.loss < best else count + 1
        best = min(best, evaluation.loss) if not math.isnan(evaluation.loss) else best
    return count


def _of_tokens(means: Means, step: int, plan: Plan) -> Evaluation:
    return Evaluation(
        step=step,
        loss=means.loss,
        perplexity=_perplexity(means.loss),
        num_tokens=means.num_targets,
        unigram_entropy_nats=plan.data.eval_unigram_entropy_nats,
        accuracy=means.figures["accuracy"],
    )


def _of_pairs(means: Means, step: int) -> Evaluation:
    """The perplexity is that of the chosen answers: the loss of a pair has none."""
    figures = means.figures
    return Evaluation(
        step=step,
        loss=means.loss,
        perplexity=_perplexity(-figures["logps_chosen"] / figures["tokens_chosen"]),
        num_tokens=means.num_targets,
        reward_accuracy=figures["reward_accuracy"],
        reward_margin=figures["reward_margin"],
    )


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # exp(700) is near the largest float
