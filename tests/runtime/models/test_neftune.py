"""Noise on embeddings: how much, where, when, and that a step can be repeated."""

from typing import Any

import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from torch import Tensor

from shardwise.trainer.runtime.loop.step import seed_dropout
from shardwise.trainer.runtime.models.build import make_trainable, model_from_config
from shardwise.trainer.runtime.models.methods import add_noise, lengths, noise_facts
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead

HIDDEN, ALPHA = TINY_LLAMA["hidden_size"], 5.0


class Run:
    """A tiny model with noise, and what its embedding answered in the last forward."""

    def __init__(self, alpha: float | None = ALPHA) -> None:
        torch.manual_seed(0)
        self.model: Any = model_from_config(TINY_LLAMA, dtype=torch.float32, attention=Attention.SDPA)
        if alpha is not None:
            add_noise(self.model, alpha)
        make_trainable(self.model, Checkpointing.FULL, LossHead.CHUNKED, loss_chunk_tokens=8)
        self.embedded = torch.empty(0)
        self.model.get_input_embeddings().register_forward_hook(self._note)

    def _note(self, module: object, inputs: object, output: Tensor) -> None:
        self.embedded = output.detach().clone()

    def forward(self, *, step: int = 0, **inputs: Tensor) -> Tensor:
        seed_dropout(0, step, 0)
        return self.model(**inputs)

    def noise(self, input_ids: Tensor, labels: Tensor, **inputs: Any) -> Tensor:
        """What the embeddings were disturbed by, [B, S, H]."""
        self.forward(input_ids=input_ids, labels=labels, **inputs)
        return self.embedded - self.model.get_input_embeddings().weight.detach()[input_ids]


def rows(*row_lengths: int, width: int = 24) -> tuple[Tensor, Tensor]:
    """Ids and labels of rows padded on the right."""
    ids = torch.arange(len(row_lengths) * width).reshape(len(row_lengths), width) % 64
    is_token = torch.arange(width) < torch.tensor(row_lengths).unsqueeze(1)
    return ids * is_token, torch.where(is_token, ids, -100)


def test_the_noise_of_a_row_is_bounded_by_alpha_over_the_root_of_its_tokens_and_width():
    """Uniform up to the bound: its largest value is near it, its mean absolute value near half."""
    ids, labels = rows(20, 5, 0)
    noise = Run().noise(ids, labels)
    assert not noise[1, 5:].any() and not noise[2].any(), "padding and dummy rows are left alone"
    for row, length in enumerate((20, 5)):
        bound = ALPHA / (length * HIDDEN) ** 0.5
        found = noise[row, :length].abs()
        assert 0.95 * bound < float(found.max()) <= bound * 1.0001
        assert float(found.mean()) == pytest.approx(bound / 2, rel=0.1)


def test_a_prompt_that_is_not_learned_counts_and_is_disturbed():
    ids, labels = rows(20)
    labels[0, :12] = -100
    assert torch.equal(lengths(labels, None), lengths(rows(20)[1], None))
    assert Run().noise(ids, labels)[0, :12].any()


def test_each_document_of_a_packed_row_has_its_own_length():
    _, labels = rows(10, width=12)
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1]])
    assert lengths(labels, position_ids).tolist() == [[6] * 6 + [4] * 4 + [0] * 2]


def test_a_scored_or_generated_row_has_no_noise():
    ids, labels = rows(20)
    run = Run()
    run.model.eval()
    assert not run.noise(ids, labels).any()
    run.model.train()
    run.model(input_ids=ids)  # as generation calls it
    assert torch.equal(run.embedded, run.model.get_input_embeddings().weight.detach()[ids])
    assert noise_facts(run.model) == {"embedding noise": "NEFTune, alpha 5, added in 0 forwards"}


def test_a_step_is_repeated_exactly_and_another_is_not():
    ids, labels = rows(20, 5)
    run = Run()
    losses = [run.forward(step=step, input_ids=ids, labels=labels) for step in (3, 3, 4)]
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])
    assert not torch.equal(losses[0], Run(alpha=None).forward(input_ids=ids, labels=labels))
