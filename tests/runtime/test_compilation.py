"""Blocks are compiled in place and compute what they computed; where they cannot be, that is said before anything runs.

Compiling takes a minute on a busy machine: one combination is in every run of the tests, the others are `long`.
"""

from pathlib import Path

import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from rank_factory import rank_plan

from trainer.runtime.activation_memory import activation_facts
from trainer.runtime.compilation import compile_blocks
from trainer.runtime.model import build_model
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.strategy import Checkpointing, LossHead

IDS = torch.arange(192).reshape(4, 48)
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def no_earlier_graphs():
    torch._dynamo.reset()


def build(checkpointing: Checkpointing = Checkpointing.NONE, *, compiles: bool = True, **engine: object):
    config = {**TINY_LLAMA, **engine.pop("config", {})}
    plan = rank_plan(
        Path("nowhere"),
        checkpointing=checkpointing,
        checkpoint_every_n=2 if checkpointing is Checkpointing.EVERY_N else None,
        compile=compiles,
        loss=LossHead.EAGER,
        model_config=config,
        **engine,
    )
    return build_model(plan)


def backward(model, ids: torch.Tensor = IDS) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
    """Bytes kept for the backward, parameters aside, the loss and the gradients."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(1)
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids)
        kept_bytes = sum(kept.values())
    loss.backward()
    return kept_bytes, loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def check_same(model, expected, ids: torch.Tensor = IDS) -> None:
    _, loss, gradients = backward(model, ids)
    _, expected_loss, expected_gradients = backward(expected, ids)
    torch.testing.assert_close(loss, expected_loss, rtol=TOLERANCE, atol=0)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


# torch's compiler reads names of its own that torch has renamed since.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def test_compiled_and_recomputed_blocks_give_the_gradients_of_eager_ones():
    model, eager = build(Checkpointing.FULL), build(compiles=False)
    check_same(model, eager)
    facts = activation_facts(model)
    assert facts["compile"] == "2 of 2 blocks, as 1 graphs with 0 breaks", "one compilation serves both"
    assert facts["checkpointing"] == "2 of 2 blocks, inside what is compiled"
    assert backward(model)[0] < backward(eager)[0] / 3, "the recomputation was traced"


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", sorted(set(Checkpointing) - {Checkpointing.FULL}))
def test_every_kind_of_recomputation_is_traced_with_its_block(checkpointing):
    model = build(checkpointing)
    check_same(model, build(compiles=False))
    graphs = 2 if checkpointing is Checkpointing.EVERY_N else 1
    assert activation_facts(model)["compile"] == f"2 of 2 blocks, as {graphs} graphs with 0 breaks"
    kept_by_full, kept, kept_by_none = (backward(each)[0] for each in (build(Checkpointing.FULL), model, build()))
    if checkpointing is not Checkpointing.NONE:
        assert kept_by_full < kept < kept_by_none


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
def test_what_compiled_blocks_save_moves_to_host_ram(checkpointing):
    model = build(checkpointing, activation_offload=True)
    check_same(model, build(compiles=False))
    facts = activation_facts(model)
    assert facts["compile"].startswith("2 of 2 blocks")
    assert "of 1 blocks" in facts["activation_offload"]


@pytest.mark.long
def test_widths_that_vary_cost_one_more_compilation():
    model, eager = build(), build(compiles=False)
    for width in (48, 40, 32, 24, 20):
        check_same(model, eager, IDS[:, :width].contiguous())
    assert activation_facts(model)["compile"] == "2 of 2 blocks, as 2 graphs with 0 breaks"


@pytest.mark.long
def test_a_compiled_block_that_recomputes_drops_the_same_elements_again():
    dropout = {"attention_dropout": 0.5}
    kept, again = (backward(build(each, config=dropout)) for each in (Checkpointing.NONE, Checkpointing.FULL))
    torch.testing.assert_close(again[1], kept[1])
    for ours, theirs in zip(again[2], kept[2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def test_without_a_compiler_it_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EnvironmentFaultError, match=r"C\+\+ compiler, and there is no no-such-compiler: install g\+\+"):
        compile_blocks(build(compiles=False))
