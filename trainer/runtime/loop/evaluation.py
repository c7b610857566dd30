"""Evaluation on the held-out rows, and a sample: a continuation of a held-out prompt.

Scores are means over all held-out rows, each counted once, for any number of ranks. The forward is that of training,
through all wrappers of the model: the same types, the same FP8 products. Tokens are scored by `TokenScore`, pairs by
the objective that they are trained with (`dpo`).

The text is sampled with a fixed seed, so that the same weights give the same text. Greedy decoding would repeat one
token early in training. Engines that shard weights generate no sample: they would gather all weights for each token.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shardwise.trainer.runtime.data.batches import MicroBatch, eval_micro_batches
from shardwise.trainer.runtime.data.token_rows import TokenRows
from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.loop.step import Means, Objective, Sums, Terms, forward
from shardwise.trainer.runtime.loss.head import LossOutput
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Evaluation


class TokenScore(NamedTuple):
    """The loss of each target, and whether it is the most likely token."""

    figures: tuple[str, ...] = ("accuracy",)

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Terms:
        loss, num_correct = forward(model, micro_batch, device, output=LossOutput.SCORE)
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
    running_engine(model).release_gathered(model)
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


PROMPT_TOKENS = 32
NEW_TOKENS = 48
SEED, TEMPERATURE, TOP_K = 0, 0.8, 40


def can_sample(sharding: Sharding) -> bool:
    """True where each rank holds whole weights in a plain model."""
    return sharding.is_replicated


def prompt_of(rows: TokenRows) -> list[int]:
    """The first tokens of the first held-out row."""
    return [int(token) for token in rows.row(0)[:PROMPT_TOKENS]]


def continue_prompt(model: nn.Module, prompt: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text that the model puts after the prompt."""
    assert isinstance(model, PreTrainedModel)
    ids = torch.tensor([prompt], device=next(model.parameters()).device)
    was_training = model.training
    model.eval()
    try:
        output = _generate(model, ids, tokenizer)
    except (TypeError, ValueError, AttributeError, LookupError, NotImplementedError) as error:
        if not model.is_custom_code():
            raise
        return f"none: the model's own code raised {type(error).__name__}: {error}"  # no run ends for want of a sample
    finally:
        model.train(was_training)
    return str(tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True))


def _generate(model: PreTrainedModel, ids: Tensor, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    with torch.no_grad(), torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []):
        torch.manual_seed(SEED)
        output = model.generate(  # type: ignore[operator]  # transformers' mixin, untyped
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    assert isinstance(output, Tensor)
    return output
