"""Bytes alive at the end of a forward are attributed to the module that allocated them."""

import time

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from shardwise.trainer.runtime.loop.profile_step import (
    Allocation,
    ModuleMarks,
    allocations_of,
    block_names,
    over_blocks,
    places_of,
    retained_by_module,
    within_block,
)

BLOCKS = ("model.layers.0", "model.layers.1", "model.layers.10")


@pytest.mark.parametrize(
    ("module", "place"),
    [
        ("model.layers.1.mlp.down_proj", (1, "mlp.down_proj")),
        ("model.layers.10.mlp", (2, "mlp")),  # not of block 1, whose name it begins with
        ("model.layers.0", (0, "the block itself")),
        ("model.norm", (None, "model.norm")),
    ],
)
def test_a_module_is_named_by_its_place(module, place):
    assert within_block(module, BLOCKS) == place


def test_bytes_that_are_freed_or_of_another_time_are_not_retained():
    allocations = [
        Allocation(5, 1, 1000),  # before the forward
        Allocation(10, 2, 64),
        Allocation(11, 3, 32),
        Allocation(12, 2, -64),
        Allocation(13, 2, 128),  # in the same place
        Allocation(14, 1, -1000),
        Allocation(25, 4, 16),  # after it
    ]
    assert retained_by_module(allocations, ModuleMarks(), begin_ns=10, end_ns=20) == {"": 160}


def test_places_and_sums_over_blocks():
    sizes = {"model.layers.0.mlp": 8, "": 6, "model.layers.1.mlp": 8, "model.norm": 1, "model.layers.1.attn": 3}
    places = [(retained.place, retained.num_bytes) for retained in places_of(sizes, BLOCKS)]
    assert places == [
        ("transformer block 0, mlp", 8),
        ("outside of the model's modules (the loss)", 6),
        ("transformer block 1, mlp", 8),
        ("model.norm", 1),
        ("transformer block 1, attn", 3),
    ]
    assert [(each.place, each.num_bytes) for each in over_blocks(sizes, BLOCKS)] == [
        ("mlp", 16),
        ("attn", 3),
    ]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))] * 1)
        self.head = nn.Linear(64, 256)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return self.head(rows).sum()


def test_a_real_forward_retains_the_outputs_of_its_modules():
    """The last sum needs no output of the head: it is freed, and the others are saved for the backward."""
    model, marks = Small(), ModuleMarks()
    rows = torch.ones(32, 64)
    model(rows).backward()
    with marks.noted(model), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        begin_ns = time.time_ns()
        loss = model(rows)
        end_ns = time.time_ns()
        loss.backward()
    retained = retained_by_module(allocations_of(profiler, "cpu"), marks, begin_ns=begin_ns, end_ns=end_ns)
    expected = {"layers.0.0": 32 * 128 * 4, "layers.0.1": 32 * 128 * 4, "layers.0.2": 32 * 64 * 4, "": 4}
    assert retained == expected
    assert block_names(model) == ["layers.0"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
