"""What is recomputed in the backward pass: less is kept, the gradients are the same."""

from pathlib import Path

import pytest
import torch
from architecture_factory import TINY, VARIANTS
from engine_plan_factory import TINY_LLAMA
from rank_factory import rank_plan
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from trainer.runtime.activation_memory import (
    _KeepsSome,
    activation_facts,
    apply_checkpointing,
    count_checkpointed_blocks,
    recomputed_blocks,
)
from trainer.runtime.blocks import attention_module, blocks_of
from trainer.runtime.model import build_model
from trainer.spec.errors import InputError
from trainer.spec.model_shape import read_model_shape
from trainer.spec.strategy import Attention, Checkpointing, LossHead

NUM_BLOCKS = 4
IDS = torch.arange(192).reshape(4, 48)
RECOMPUTING = sorted(set(Checkpointing) - {Checkpointing.NONE})
BLOCKS = dict.fromkeys(RECOMPUTING, NUM_BLOCKS) | {
    Checkpointing.NONE: 0,
    Checkpointing.EVERY_N: 2,
}
DROPOUT = {
    "llama": {"attention_dropout": 0.5},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "gpt_neox": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "falcon": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
}


def build(checkpointing: Checkpointing, fields: dict[str, object] | None = None, **config: object):
    fields = fields or {**TINY_LLAMA, "num_hidden_layers": NUM_BLOCKS}
    plan = rank_plan(
        Path("nowhere"),
        checkpointing=checkpointing,
        checkpoint_every_n=2 if checkpointing is Checkpointing.EVERY_N else None,
        loss=LossHead.EAGER,
        attention=Attention.SDPA if Attention.SDPA in read_model_shape(fields).attentions else Attention.EAGER,
        model_config={**fields, **config},
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


@pytest.mark.parametrize("checkpointing", Checkpointing)
def test_so_many_blocks_recompute_something_and_are_seen_to(checkpointing):
    model = build(checkpointing)
    assert count_checkpointed_blocks(model) == BLOCKS[checkpointing]
    backward(model)
    seen = activation_facts(model)
    assert (f"{BLOCKS[checkpointing]} of {NUM_BLOCKS} blocks" in seen.get("checkpointing", "")) is bool(seen)
    assert bool(seen) is (checkpointing is not Checkpointing.NONE)


def test_a_recomputation_that_did_not_happen_is_not_reported():
    model = build(Checkpointing.FULL)
    model(input_ids=IDS, labels=IDS)  # no backward
    assert activation_facts(model) == {"checkpointing": f"recomputed: 0 of {NUM_BLOCKS} blocks"}


@pytest.mark.parametrize("checkpointing", RECOMPUTING)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recomputing_keeps_less_and_changes_no_gradient(checkpointing, dropout):
    kept_bytes, gradients = backward(build(Checkpointing.NONE, attention_dropout=dropout))
    kept_by_it_bytes, same = backward(build(checkpointing, attention_dropout=dropout))
    assert kept_by_it_bytes < kept_bytes * (0.95 if checkpointing is Checkpointing.ATTENTION else 0.75)
    for ours, theirs in zip(same, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("checkpointing", RECOMPUTING)
@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_drops_the_same_elements_again(name, checkpointing):
    _, gradients = backward(build(Checkpointing.NONE, TINY[name], **DROPOUT[name]))
    _, same = backward(build(checkpointing, TINY[name], **DROPOUT[name]))
    _, others = backward(build(Checkpointing.NONE, TINY[name]))
    assert any(not torch.equal(one, other) for one, other in zip(gradients, others, strict=True)), "dropout is on"
    for ours, theirs in zip(same, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [Checkpointing.ATTENTION, Checkpointing.SELECTIVE])
@pytest.mark.parametrize("name", sorted(set(TINY) - set(DROPOUT)))
def test_every_architecture_recomputes_a_part_and_the_gradients_stay(name, checkpointing):
    quiet = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    _, gradients = backward(build(Checkpointing.NONE, TINY[name], **quiet))
    model = build(checkpointing, TINY[name], **quiet)
    _, same = backward(model)
    assert activation_facts(model)["checkpointing"].count("of 3 blocks") == 1
    for ours, theirs in zip(same, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [*TINY.values(), *VARIANTS.values()], ids=[*TINY, *VARIANTS])
def test_the_attention_module_of_a_block_is_the_one_with_its_projections(config):
    block = blocks_of(build(Checkpointing.NONE, config))[0]
    found = attention_module(block)
    assert found is not None and "Attention" in type(found).__name__
    linears = [module for module in found.modules() if type(module).__name__ in ("Linear", "Conv1D", "FalconLinear")]
    assert len(linears) in (2, 4), "the projections, and nothing of the feed-forward half"


@pytest.mark.parametrize(
    ("num_blocks", "every_n", "expected"), [(4, 2, [0, 2]), (5, 2, [0, 2]), (6, 4, [0]), (3, 1, [0, 1, 2]), (3, 3, [0])]
)
def test_the_first_of_each_whole_group_is_recomputed(num_blocks, every_n, expected):
    assert list(recomputed_blocks(Checkpointing.EVERY_N, num_blocks, every_n)) == expected


@pytest.mark.parametrize("every_n", [None, 0, 5])
def test_more_blocks_than_there_are_is_refused_with_both_numbers(every_n):
    with pytest.raises(InputError, match=rf"checkpointing_n is {every_n}, and the model has 4 blocks"):
        recomputed_blocks(Checkpointing.EVERY_N, 4, every_n)


@pytest.mark.parametrize("checkpointing", RECOMPUTING)
def test_a_model_without_blocks_is_refused(checkpointing):
    with pytest.raises(InputError, match="has no blocks that can be recomputed"):
        apply_checkpointing(nn.Linear(2, 2), checkpointing, every_n=1)  # type: ignore[arg-type]


def test_selective_keeps_the_first_third_and_fifth_product_and_the_attention_between():
    model = build(Checkpointing.SELECTIVE)
    backward(model)
    words = "but for 4 of 7 matrix products and 1 attention output in each"
    assert words in activation_facts(model)["checkpointing"]


def test_a_kernel_that_drops_inside_attention_runs_again():
    """Its random numbers are part of the state that all that follows it draws from."""
    operator, context = torch.ops.aten._scaled_dot_product_flash_attention.default, SelectiveCheckpointContext
    keeps, query = _KeepsSome(), torch.zeros(1)
    answers = [keeps(context(is_recompute=False), operator, query, query, query, p) for p in (0.0, 0.1)]
    assert answers == [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE]


def test_every_kernel_of_pytorch_counts_as_attention():
    keeps = _KeepsSome()
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"):
        operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
        keeps(SelectiveCheckpointContext(is_recompute=False), operator)
    assert keeps.num_kept_attentions == 4
    keeps(SelectiveCheckpointContext(is_recompute=False), torch.ops.aten.add.Tensor)
    assert keeps.num_kept_attentions == 4


def test_what_is_scored_is_not_recomputed():
    model = build(Checkpointing.ATTENTION).eval()
    with torch.no_grad():
        loss = model(input_ids=IDS, labels=IDS)
    assert loss.requires_grad is False
    assert activation_facts(model)["checkpointing"] == "attention recomputed in 0 of 4 blocks"


def test_w26_accelerates_own_checkpointing_draws_other_masks_when_it_recomputes():
    """`fsdp2_apply_ac` leaves the state of the random numbers as it is: dropout drops other elements."""
    import inspect

    from accelerate.utils.fsdp_utils import fsdp2_apply_ac
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Drops(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return functional.dropout(values, 0.5).square()

    def is_same_mask(preserve_rng_state: bool) -> bool:
        torch.manual_seed(0)
        values = torch.ones(64, requires_grad=True)
        answer = checkpoint_wrapper(Drops(), preserve_rng_state=preserve_rng_state)(values)
        answer.sum().backward()
        return torch.equal(values.grad > 0, answer > 0)

    assert "preserve_rng_state=False" in inspect.getsource(fsdp2_apply_ac)
    assert (is_same_mask(True), is_same_mask(False)) == (True, False)
