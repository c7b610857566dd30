"""The loss of a few tokens, a second time: from logits of the model's own forward, shifted and masked here.

The forward of training goes through a loss head that computes in slices, shifts and masks on its own, and knows rows
of several documents. The second computation uses none of it: the ids of one document without padding go into the
model without labels, and its logits are read in fp32. Both run without dropout or gradients on the weights of one
moment. Logits of `MAX_TOKENS` tokens at most are alive, while neither gradients nor activations are.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.trainer.runtime.data.batches import MicroBatch
from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenRows
from shardwise.trainer.runtime.loop.first_steps.problem import Problem

MAX_TOKENS = 256
_LOGIT_BYTES = 12  # of one logit, while its loss is computed: in the computing type, in fp32, and its log-softmax
# Shares of the standard error of the mean token loss, and of the loss itself, that two computations may differ by. A
# shift by one token moves the mean by about one standard error.
_TOLERANCE = {torch.float32: (0.02, 1e-4), torch.bfloat16: (0.3, 2e-3), torch.float16: (0.3, 1e-3)}
_CERTAIN = 4  # so many tolerances


class Excerpt(NamedTuple):
    """The beginning of one row: as training would have it, padding included, and as it is stored."""

    micro_batch: MicroBatch  # of one row
    ids: Tensor  # int64 [1, T], of one document, without padding
    is_learned: Tensor  # bool [T]

    @property
    def num_targets(self) -> int:
        """Tokens of the excerpt that are learned."""
        return int(self.is_learned.sum())


def max_tokens(vocab_size: int, *, free_bytes: int) -> int:
    """Tokens of an excerpt whose logits fit in so many bytes; 16 at least."""
    return max(16, min(MAX_TOKENS, free_bytes // (_LOGIT_BYTES * vocab_size)))


def excerpt_of(
    rows: TokenRows, micro_batch: MicroBatch, numbers: list[int | None], *, num_tokens: int
) -> Excerpt | None:
    """The row of a micro batch that has most targets in its first document, of its first tokens; None if none has.

    A shorter row comes with its padding.
    """
    best: Excerpt | None = None
    for place, number in enumerate(numbers):
        if number is None:
            continue
        starts = rows.document_starts(number)
        end = min(num_tokens, int(starts[0]) if len(starts) else rows.length(number))
        stored, labels = rows.row(number)[:end], rows.labels(number)[:end]
        width = end if end < rows.length(number) else min(num_tokens, micro_batch.input_ids.shape[1])
        if len(starts) and end == int(starts[0]):
            width = end
        learned = torch.from_numpy(labels != IGNORED_LABEL)
        line = MicroBatch(
            micro_batch.input_ids[place : place + 1, :width],
            micro_batch.labels[place : place + 1, :width],
            num_targets=int((micro_batch.labels[place, 1:width] != IGNORED_LABEL).sum()),
            num_tokens=end,
            row_lengths=() if end == width else (end,),
        )
        found = Excerpt(line, torch.from_numpy(stored)[None], learned)
        if found.num_targets and (best is None or found.num_targets > best.num_targets):
            best = found
    return best


class SecondLoss(NamedTuple):
    """The losses of the learned tokens of an excerpt."""

    mean: float
    standard_error: float


def second_loss(model: nn.Module, excerpt: Excerpt, device: torch.device) -> SecondLoss:
    """The loss of an excerpt from the model's own logits; through all wrappers, so collective where they are."""
    logits = model(input_ids=excerpt.ids.to(device), use_cache=False).logits[0, :-1].float()
    losses = functional.cross_entropy(logits, excerpt.ids[0, 1:].to(device), reduction="none").cpu().double()
    learned = losses[excerpt.is_learned[1:]]
    spread = float(learned.std()) if len(learned) > 1 else float(learned.abs().sum())
    return SecondLoss(float(learned.mean()), spread / math.sqrt(max(len(learned), 1)))


def loss_problems(
    own: float, second: SecondLoss, compute_type: torch.dtype, *, step: int, num_targets: int
) -> list[Problem]:
    """A problem if two computations of one mean loss differ by more than their rounding."""
    of_error, of_loss = _TOLERANCE[compute_type]
    tolerance = of_error * second.standard_error + of_loss * abs(second.mean)
    difference = abs(own - second.mean)
    if difference <= tolerance or not math.isfinite(second.mean):
        return []
    text = (
        f"step {step}: the loss of {num_targets} tokens is {own:.5f} in training and {second.mean:.5f} from the "
        f"model's own logits, {difference:.5f} apart; rounding explains {tolerance:.5f}"
    )
    return [Problem(text, is_certain=difference > _CERTAIN * tolerance or not math.isfinite(own))]
