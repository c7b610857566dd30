"""What blocks save is copied to host RAM, once each, and the gradients are the same; on a CPU the copies are real."""

import weakref
from typing import Any

import block_models as blocks
import pytest
import torch
from engine_plan_factory import TINY_LLAMA

from shardwise.trainer.runtime.memory import activation_offload
from shardwise.trainer.runtime.memory.activation_offload import PinnedBuffers, offload_activations
from shardwise.trainer.runtime.models.build import Installed
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.strategy import Checkpointing

INPUT_BYTES = 4 * blocks.BATCH * blocks.SEQ_LEN * TINY_LLAMA["hidden_size"]  # of a block, in fp32


def build(
    checkpointing: Checkpointing = Checkpointing.NONE, *, moves: bool = True, **config: Any
) -> tuple[Any, Installed]:
    return blocks.build_installed(checkpointing, activation_offload=moves, config=config)


@pytest.mark.parametrize("checkpointing", sorted(set(Checkpointing) - {Checkpointing.SELECTIVE}))
def test_moving_activations_changes_no_gradient(checkpointing):
    model, installed = build(checkpointing, attention_dropout=0.3)
    plain, _ = build(moves=False, attention_dropout=0.3)
    blocks.assert_same_gradients(blocks.backward(model), blocks.backward(plain))
    offload = installed.offload
    assert offload.num_moved_blocks == blocks.NUM_BLOCKS - 1, "the last keeps its own"
    if checkpointing is Checkpointing.FULL:
        moved = (offload.num_copies, offload.moved_bytes)
        assert moved == (blocks.NUM_BLOCKS - 1, (blocks.NUM_BLOCKS - 1) * INPUT_BYTES), "of each block its input"
        facts = installed.activation_facts(model)["activation_offload"]
        assert all(fact in facts for fact in ("3 tensors", "3 blocks", "144 KiB"))


def test_after_the_backward_nothing_is_left_on_the_shelves():
    model, installed = build()
    loss = model(input_ids=blocks.IDS, labels=blocks.IDS)
    shelves = installed.offload._shelves.values()
    retained = [weakref.ref(moved) for shelf in shelves for moved in shelf._moved.values()]
    assert len(retained) > 30 and all(reference() is not None for reference in retained)
    loss.backward()
    del loss
    assert all(reference() is None for reference in retained)


def test_parameters_do_not_move():
    """They are handed out as they are when the backward asks: an engine may have put them elsewhere by then."""
    model, _ = build()
    loss = model(input_ids=blocks.IDS, labels=blocks.IDS)
    weight = model.model.layers[0].self_attn.q_proj.weight
    before = weight.data
    weight.data = torch.zeros_like(before)
    loss.backward()
    expected, _ = build(moves=False)
    blocks.backward(expected)
    name = "model.layers.0.input_layernorm.weight"
    ours, theirs = (dict(one.named_parameters())[name].grad for one in (model, expected))
    assert not torch.allclose(ours, theirs), "the gradient of what lies before was made with the new weight"


def test_what_cannot_be_moved_is_refused():
    with pytest.raises(InputError, match=r"activation_offload .*pin\.checkpointing: selective"):
        build(Checkpointing.SELECTIVE)
    with pytest.raises(InputError, match=r"pin\.activation_offload: Llama"):
        offload_activations(build(moves=False, num_hidden_layers=1)[0])


@pytest.fixture
def buffers(monkeypatch) -> PinnedBuffers:
    """Buffers that are not page-locked, which takes a GPU's driver."""
    monkeypatch.setattr(activation_offload, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    return PinnedBuffers(finish_copies=lambda: None)


def test_buffers_are_whole_pages_and_are_taken_again(buffers):
    first = buffers.take(5000)
    assert (first.numel(), buffers.pinned_bytes) == (5000, 8192)
    second = buffers.take(8192)
    pointer = first.data_ptr()
    buffers.give_back(first)
    again = buffers.take(6000)
    assert again.data_ptr() == pointer != second.data_ptr()
    assert (again.numel(), buffers.pinned_bytes) == (6000, 16384)


def test_a_buffer_that_is_too_small_is_freed_once_the_copies_that_may_read_it_are_done(buffers):
    pinned_bytes: list[int] = []
    buffers._finish_copies = lambda: pinned_bytes.append(buffers.pinned_bytes)
    for _ in range(2):
        buffers.give_back(buffers.take(4096))
    assert pinned_bytes == []
    buffers.take(8192)
    assert pinned_bytes == [4096]


def test_pages_are_unlocked_as_they_go_and_only_once():
    """CUDA refuses to lock an address that it holds for locked already, as memory that is mapped again may have."""
    unlocked = []
    pages = activation_offload._PinnedPages(-1, 8192)
    pages.unlock = lambda: unlocked.append("unlocked")
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    part = whole[:5000].view(torch.int16)
    del pages, whole
    assert unlocked == []
    del part
    assert unlocked == ["unlocked"]
