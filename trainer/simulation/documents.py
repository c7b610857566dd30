"""Measures on a miniature of a model what a plan must know about its loss, with real numbers on a CPU.

    order      a token must not see the tokens after it: another last token changes no loss before it
    loss       the model's own loss in training must be the mean cross-entropy of the logits that are trained here
    documents  the documents of a packed row must be learned as if alone, under each attention that runs without flash

A layer with a state (convolution, state space, linear attention) hands it on from one document to the next unless its
kernel accepts the bounds of documents. Such kernels are packages for CUDA; transformers refuses bounds without them.
With one installed the measurement needs a GPU.
"""

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.trainer.runtime.attention.packed import EAGER, SDPA
from shardwise.trainer.runtime.data.documents import (
    FP32_TOLERANCE,
    KERNEL_TOLERANCE,
    measure_dependence,
)
from shardwise.trainer.runtime.loss import LossOutput, install_loss_head, is_cross_entropy
from shardwise.trainer.simulation.miniature import miniature
from shardwise.trainer.spec.strategy import LossHead

_ROW, _NUM_ROWS = 96, 2  # tokens of a row: six windows of a miniature
_NOISE = 0.08  # standard deviation that weights get: heads that are zero in the beginning would show nothing


class RowFindings(NamedTuple):
    """What was found about the loss and the rows of a model."""

    loss_fault: str | None = None  # why its loss is not learned
    packing_obstacle: str | None = None  # why documents are not apart, or not known to be
    is_measured: bool = True  # each is a fact, and not the lack of a measurement


def measure_rows(model: PreTrainedModel) -> RowFindings:
    """Findings about the class and the config of a model; the model itself, which may have no weights, is not run."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [name for name in (SDPA, EAGER) if name == EAGER or type(model)._supports_sdpa]
    with torch.random.fork_rng(devices=[]):
        found = [_measured(model, name, device) for name in names]
    return next((each for each in found if each != RowFindings()), RowFindings())


def _measured(model: PreTrainedModel, attention: str, device: torch.device) -> RowFindings:
    try:
        small = _small_model(model, attention, device)
        loss_fault = _order_fault(small, device)
    except Exception as error:  # noqa: BLE001  # any that a model may raise for sizes that it was not made for
        reason = _first_line(error)
        return RowFindings(
            packing_obstacle=f"whether documents stay apart was not measured ({reason})", is_measured=False
        )
    loss_fault = loss_fault or _loss_fault(small, device)
    if loss_fault is not None:
        return RowFindings(loss_fault=loss_fault)
    try:
        dependence = measure_dependence(
            small, num_rows=_NUM_ROWS, seq_len=_ROW, vocab_size=_vocab_size(small), device=device
        )
    except (TypeError, ValueError, RuntimeError) as error:
        sentence = _first_line(error).partition(". ")[0]
        return RowFindings(packing_obstacle=f"its layers do not take the bounds of documents: {sentence}")
    return RowFindings(packing_obstacle=dependence.fault(FP32_TOLERANCE if device.type == "cpu" else KERNEL_TOLERANCE))


def _small_model(model: PreTrainedModel, attention: str, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        small = type(model)._from_config(miniature(model.config), attn_implementation=attention, dtype=torch.float32)
    assert isinstance(small, PreTrainedModel)
    with torch.no_grad():
        for name, weight in small.named_parameters():
            if weight.ndim > 1 or name.endswith("bias"):
                weight.add_(torch.randn_like(weight), alpha=_NOISE)
    install_loss_head(small, LossHead.EAGER, chunk_tokens=None)
    small.eval()
    return small.requires_grad_(requires_grad=False)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _order_fault(small: PreTrainedModel, device: torch.device) -> str | None:
    ids = torch.randint(_vocab_size(small), (1, _ROW), device=device)
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % _vocab_size(small)
    losses: list[Tensor] = []
    for each in (ids, changed):
        torch.manual_seed(0)  # Reformer draws its hashes
        losses.append(small(input_ids=each, labels=ids, output=LossOutput.TOKENS))
    difference = (losses[0] - losses[1]).abs()[:, :-1].max()
    if difference <= FP32_TOLERANCE * losses[0].std():
        return None
    switches = [f"{name}={json.dumps(value)}" for name, value in _CAUSAL.items() if _lacks(small.config, name, value)]
    return "; ".join(
        ["a token sees those after it", *(f"a decoder has {each} in its config.json" for each in switches)]
    )


# Fields by which a class that is also made as an encoder is a decoder.
_CAUSAL = {"is_decoder": True, "causal": True, "attn_type": "uni", "attention_type": "original_full"}


def _lacks(config: Any, name: str, value: Any) -> bool:  # noqa: ANN401  # of transformers, one class for each model
    return hasattr(config, name) and getattr(config, name) != value


def _loss_fault(small: PreTrainedModel, device: torch.device) -> str | None:
    """Why a model's own loss in training is not the mean cross-entropy of its logits, shifted by one token or not."""
    ids = torch.randint(_vocab_size(small), (_NUM_ROWS, _ROW), device=device)
    small.train()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same dropout in both
            theirs = float(type(small).forward(small, input_ids=ids, labels=ids, use_cache=False).loss)
            torch.manual_seed(0)
            logits: Tensor = small(input_ids=ids, labels=ids, output=LossOutput.LOGITS)
    except Exception as error:  # noqa: BLE001  # any that a forward may raise in training alone
        return f"a row of {_ROW} tokens cannot be trained ({_first_line(error)})"
    finally:
        small.eval()
    return (
        None if is_cross_entropy(theirs, logits, ids) else "its own loss is more than the cross-entropy of its logits"
    )


def _vocab_size(small: PreTrainedModel) -> int:
    return int(small.config.get_text_config(decoder=True).vocab_size)
