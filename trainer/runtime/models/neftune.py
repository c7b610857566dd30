"""NEFTune (arXiv:2310.05914): uniform noise on the embeddings of a row while training, none while scoring.

Each element of a row's embeddings gets noise from [-1, 1] times alpha / sqrt(L d), L the tokens of the row and d the
hidden size. Padding gets none, and in a packed row each document has its own L. transformers has a hook of its own
(`integrations.neftune`), which counts padding into L and disturbs it as well.

The noise is drawn from torch's generator, which is seeded anew for each micro batch (`step.seed_dropout`): a step can
be repeated exactly, under any engine. Lengths are read from labels and positions as the model is called, the noise is
added where the embedding answers: both are hooks of the plain modules, which every engine calls through.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

IGNORED = -100  # label of padding


def add_noise(model: PreTrainedModel, alpha: float) -> None:
    """Makes every training forward of the model disturb its embeddings."""
    embedding: Any = model.get_input_embeddings()
    embedding.neftune_alpha = alpha
    embedding.neftune_lengths = None
    embedding.neftune_forwards = 0

    def note_lengths(_model: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels = kwargs.get("labels")
        embedding.neftune_lengths = None
        if embedding.training and labels is not None:
            embedding.neftune_lengths = lengths(labels, kwargs.get("position_ids"))

    model.register_forward_pre_hook(note_lengths, with_kwargs=True)
    embedding.register_forward_hook(_disturb)


def lengths(labels: Tensor, position_ids: Tensor | None) -> Tensor:
    """Tokens of the document that each position belongs to, [B, S]; 0 on padding.

    A row reaches to its last label. `position_ids` start anew with each document of a packed row.
    """
    places = torch.arange(labels.shape[1], device=labels.device)
    row_lengths = torch.where(labels != IGNORED, places + 1, 0).amax(dim=1, keepdim=True)
    is_token = places < row_lengths
    if position_ids is None:
        return row_lengths * is_token
    document = (position_ids == 0).cumsum(dim=1) - 1
    document = document.clamp(min=0)
    counts = torch.zeros_like(labels).scatter_add_(1, document, is_token.to(labels.dtype))
    return counts.gather(1, document) * is_token


def noise_facts(model: PreTrainedModel) -> dict[str, str]:
    """How often noise was added, in words; nothing where none is asked for."""
    embedding: Any = model.get_input_embeddings()
    alpha = getattr(embedding, "neftune_alpha", None)
    if alpha is None:
        return {}
    return {"embedding noise": f"NEFTune, alpha {alpha:g}, added in {embedding.neftune_forwards} forwards"}


def _disturb(module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Hook of the embedding: its answer [B, S, H] with noise, while a training batch is on its way."""
    embedding: Any = module
    tokens: Tensor | None = embedding.neftune_lengths
    embedding.neftune_lengths = None  # once for each call of the model
    if tokens is None:
        return output
    embedding.neftune_forwards += 1
    bound = embedding.neftune_alpha / (tokens.clamp(min=1) * output.shape[-1]).sqrt() * (tokens > 0)
    noise = torch.empty_like(output).uniform_(-1, 1).mul_(bound.unsqueeze(-1))
    return output + noise
