"""What is recomputed in the backward pass: less is kept, the gradients are the same."""

import pytest
import torch
from architecture_factory import TINY
from block_models import NUM_BLOCKS, assert_same_gradients, backward, build_installed
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from shardwise.trainer.runtime.memory import recomputation
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.strategy import Checkpointing

RECOMPUTING = sorted(set(Checkpointing) - {Checkpointing.NONE})
DROPOUT = {
    "llama": {"attention_dropout": 0.5},
    "gpt2": {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "gpt_neox": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "falcon": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
}


@pytest.mark.parametrize("checkpointing", RECOMPUTING)
def test_recomputing_keeps_less_changes_no_gradient_and_is_seen(checkpointing):
    plain, (model, installed) = build_installed(), build_installed(checkpointing)
    kept_by_plain, recomputed = backward(plain[0]), backward(model)
    share = 0.95 if checkpointing is Checkpointing.ATTENTION else 0.75
    assert recomputed.retained_bytes < kept_by_plain.retained_bytes * share
    assert_same_gradients(recomputed, kept_by_plain)
    num_blocks = 2 if checkpointing is Checkpointing.EVERY_N else NUM_BLOCKS
    assert len(installed.recomputations) == num_blocks
    assert f"{num_blocks} of {NUM_BLOCKS}" in installed.activation_facts(model)["checkpointing"]
    assert plain[1].activation_facts(plain[0]) == {}


@pytest.mark.parametrize("checkpointing", RECOMPUTING)
@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_drops_the_same_elements_again(name, checkpointing):
    plain, again = (
        backward(build_installed(each, fields=TINY[name], config=DROPOUT[name])[0])
        for each in (Checkpointing.NONE, checkpointing)
    )
    others = backward(build_installed(fields=TINY[name])[0])
    assert any(not torch.equal(*pair) for pair in zip(plain.gradients, others.gradients, strict=True)), "dropout is on"
    assert_same_gradients(again, plain, tolerance=1e-5)


@pytest.mark.parametrize("checkpointing", [Checkpointing.FULL, Checkpointing.ATTENTION, Checkpointing.SELECTIVE])
@pytest.mark.parametrize("name", sorted(set(TINY) - set(DROPOUT)))
def test_every_architecture_recomputes_a_part_and_the_gradients_stay(name, checkpointing):
    quiet = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    plain = backward(build_installed(fields=TINY[name], config=quiet)[0])
    model, installed = build_installed(checkpointing, fields=TINY[name], config=quiet)
    assert_same_gradients(backward(model), plain, tolerance=1e-5)
    assert "3 of 3" in installed.activation_facts(model)["checkpointing"]


def test_the_first_of_each_whole_group_is_recomputed_and_more_blocks_than_there_are_is_refused():
    for num_blocks, every_n, expected in (
        (4, 2, [0, 2]), (5, 2, [0, 2]), (6, 4, [0]), (3, 1, [0, 1, 2]), (3, 3, [0]),
    ):  # fmt: skip
        assert list(recomputation.recomputed_blocks(Checkpointing.EVERY_N, num_blocks, every_n)) == expected
    for every_n in (None, 0, 5):
        with pytest.raises(InputError, match=rf"checkpointing_n is {every_n}\b.* 4 "):
            recomputation.recomputed_blocks(Checkpointing.EVERY_N, 4, every_n)


@pytest.mark.parametrize("checkpointing", RECOMPUTING)
def test_a_model_without_blocks_is_refused(checkpointing):
    with pytest.raises(InputError, match=r"pin\.checkpointing: Linear\b"):
        recomputation.apply_checkpointing(nn.Linear(2, 2), checkpointing, every_n=1)  # type: ignore[arg-type]


def test_a_kernel_that_drops_inside_attention_runs_again():
    """Its random numbers are part of the state that all that follows it draws from."""
    operator, context = torch.ops.aten._scaled_dot_product_flash_attention.default, SelectiveCheckpointContext
    keeps, query = recomputation.SelectivePolicy(), torch.zeros(1)
    policies = [keeps(context(is_recompute=False), operator, query, query, query, p) for p in (0.0, 0.1)]
    assert policies == [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE]


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
        output = checkpoint_wrapper(Drops(), preserve_rng_state=preserve_rng_state)(values)
        output.sum().backward()
        return torch.equal(values.grad > 0, output > 0)

    assert "preserve_rng_state=False" in inspect.getsource(fsdp2_apply_ac)
    assert (is_same_mask(True), is_same_mask(False)) == (True, False)
