"""What a rank says it holds when its memory ran out; saying it never gets in the way of the end."""

import resource

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.trainer.runtime.profile.memory_profile import held_tensors, memory_state, write_memory_state
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.messages.rank_files import (
    Heartbeat,
    MemoryState,
    encode_heartbeat,
    heartbeat_path,
    memory_state_path,
)


def test_the_tensors_that_are_held_are_counted_once_and_by_kind():
    before = held_tensors()
    layer = nn.Linear(1024, 512, bias=False)
    view = layer.weight.detach()[:10]  # of the same storage
    other = torch.ones(1000, 1000)
    layer(torch.ones(2, 1024)).sum().backward()
    after = held_tensors()
    assert after["weights"] - before["weights"] == 1024 * 512 * 4
    assert after["gradients"] - before["gradients"] == 1024 * 512 * 4
    assert after["other tensors"] - before["other tensors"] == 1000 * 1000 * 4
    del view, other


def test_tensors_without_storage_are_left_out():
    before = held_tensors()
    with FakeTensorMode():
        fake = torch.empty(1000, 1000)  # as torch.compile leaves them behind
    without = [fake, torch.empty(1000, 1000, device="meta"), torch.eye(300).to_sparse()]
    assert held_tensors() == before
    assert len(without) == 3


def test_the_state_says_where_the_rank_was_and_which_limit_it_met(tmp_path):
    heartbeat_path(tmp_path, 1).parent.mkdir()
    heartbeat_path(tmp_path, 1).write_bytes(encode_heartbeat(Heartbeat(step=4, count=3, phase="backward")))
    write_memory_state(tmp_path, rank=1, step=4, data_limit=2**33)
    state = codec.read(memory_state_path(tmp_path, 1), MemoryState)
    assert (state.rank, state.phase, state.step, state.data_limit_bytes) == (1, "backward", 5, 2**33)
    assert state.host_bytes and state.data_bytes
    assert memory_state(tmp_path, 1, 4, resource.RLIM_INFINITY).data_limit_bytes is None
    assert memory_state(tmp_path, 0, 4, 0).phase == ""  # it gave no sign


def test_a_state_that_cannot_be_written_is_told_and_raises_nothing(tmp_path, capsys):
    write_memory_state(tmp_path / "gone", rank=0, step=0, data_limit=0)
    assert "what memory held could not be written: FileNotFoundError" in capsys.readouterr().out
