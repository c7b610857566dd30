"""Tiny Llamas whose blocks recompute, move or compile what they keep, and what a backward pass of them gives."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engine_plan_factory import TINY_LLAMA
from rank_factory import rank_plan
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.trainer.runtime.models.build import Installed, build_trainable
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead

NUM_BLOCKS = 4
BATCH, SEQ_LEN = 4, 48
IDS = torch.arange(BATCH * SEQ_LEN).reshape(BATCH, SEQ_LEN)


class Backward(NamedTuple):
    loss: Tensor
    gradients: list[Tensor]
    retained_bytes: int


def build_installed(
    checkpointing: Checkpointing = Checkpointing.NONE, *, fields: Mapping[str, Any] = TINY_LLAMA,
    config: Mapping[str, Any] = {}, **engine: Any,
) -> tuple[PreTrainedModel, Installed]:  # fmt: skip
    """A model of `NUM_BLOCKS` blocks, or of the `fields` of another model, with `config` over its fields."""
    if fields is TINY_LLAMA:
        fields = {**TINY_LLAMA, "num_hidden_layers": NUM_BLOCKS}
    every_n = 2 if checkpointing is Checkpointing.EVERY_N else None
    attention = Attention.SDPA if Attention.SDPA in read_model_shape(fields).attentions else Attention.EAGER
    plan = rank_plan(
        Path("nowhere"), checkpointing=checkpointing, checkpoint_every_n=every_n, loss=LossHead.EAGER,
        attention=attention, model_config={**fields, **config}, **engine,
    )  # fmt: skip
    return build_trainable(plan)


@contextmanager
def kept_storages(model: PreTrainedModel) -> Iterator[dict[int, int]]:
    """The bytes of each storage that is kept for the backward of what runs inside, parameters aside, by address."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    retained: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            retained[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield retained


def backward(model: PreTrainedModel, ids: Tensor = IDS) -> Backward:
    torch.manual_seed(1)
    model.zero_grad()
    with kept_storages(model) as retained:
        loss = model(input_ids=ids, labels=ids)
        retained_bytes = sum(retained.values())
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return Backward(loss.detach(), gradients, retained_bytes)


def assert_same_gradients(found: Backward, expected: Backward, *, tolerance: float = 0.0) -> None:
    for ours, theirs in zip(found.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
