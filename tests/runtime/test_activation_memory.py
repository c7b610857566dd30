"""What is recomputed in the backward pass: less is kept, the gradients are the same."""

from pathlib import Path

import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from rank_factory import rank_plan

from trainer.runtime.activation_memory import apply_checkpointing, count_checkpointed_blocks
from trainer.runtime.model import build_model
from trainer.spec.errors import InputError
from trainer.spec.strategy import Checkpointing, LossHead

NUM_BLOCKS = TINY_LLAMA["num_hidden_layers"]
IDS = torch.arange(96).reshape(2, 48)


def build(checkpointing: Checkpointing, **config: object):
    plan = rank_plan(
        Path("nowhere"), checkpointing=checkpointing, loss=LossHead.EAGER, model_config={**TINY_LLAMA, **config}
    )
    return build_model(plan)


def backward(model) -> tuple[int, list[torch.Tensor]]:
    """Bytes kept for the backward, parameters aside, and the gradients."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=IDS, labels=IDS)
        kept_bytes = sum(kept.values())
    loss.backward()
    return kept_bytes, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(("checkpointing", "blocks"), [(Checkpointing.NONE, 0), (Checkpointing.FULL, NUM_BLOCKS)])
def test_every_block_recomputes_or_none(checkpointing, blocks):
    """Warnings are errors here: the name that transformers deprecates is not used where there is a newer one."""
    assert count_checkpointed_blocks(build(checkpointing)) == blocks


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputing_keeps_less_and_changes_no_gradient(dropout):
    kept_bytes, gradients = backward(build(Checkpointing.NONE, attention_dropout=dropout))
    kept_by_full_bytes, same = backward(build(Checkpointing.FULL, attention_dropout=dropout))
    assert kept_by_full_bytes < kept_bytes / 2
    for ours, theirs in zip(same, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("checkpointing", sorted(set(Checkpointing) - {Checkpointing.NONE, Checkpointing.FULL}))
def test_what_is_to_come_is_named(checkpointing):
    with pytest.raises(InputError, match=rf"pin\.checkpointing: {checkpointing} comes with shardwise 0\.3"):
        apply_checkpointing(build(Checkpointing.NONE), checkpointing)
