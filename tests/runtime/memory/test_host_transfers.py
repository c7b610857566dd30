"""Host buffers are whole pages, taken again rather than pinned anew."""

import pytest
import torch

from trainer.runtime.memory import host_transfers
from trainer.runtime.memory.host_transfers import PinnedBuffers


@pytest.fixture
def buffers(monkeypatch) -> PinnedBuffers:
    """Buffers that are not page-locked, which takes a GPU's driver."""
    monkeypatch.setattr(host_transfers, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
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


def test_rows_of_every_length_pin_no_more_than_the_longest(buffers):
    for width in (3, 1, 4, 2, 5, 1, 5):
        held = [buffers.take(width * 4096 * size) for size in (1, 2, 3)]
        for buffer in held:
            buffers.give_back(buffer)
    assert buffers.pinned_bytes <= 3 * 5 * 4096 * 3
    longest = buffers.pinned_bytes
    buffers.take(5 * 4096 * 3)
    assert buffers.pinned_bytes == longest


def test_pages_are_unlocked_as_they_go_and_only_once():
    """CUDA refuses to lock an address that it holds for locked already, as memory that is mapped again may have."""
    unlocked = []
    pages = host_transfers._PinnedPages(-1, 8192)
    pages.unlock = lambda: unlocked.append("unlocked")
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    part = whole[:5000].view(torch.int16)
    del pages, whole
    assert unlocked == []
    del part
    assert unlocked == ["unlocked"]
