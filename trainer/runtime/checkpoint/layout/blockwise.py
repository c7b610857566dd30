"""8-bit moments of bitsandbytes: one byte for each element, one fp32 scale for each block of 256 (arXiv:2110.02861).

Blocks are counted from the start of the memory an optimizer was given: of a parameter where it is whole, of a partition
that many share under ZeRO. Where the blocks of the checkpoint are those of this job, codes and scales are taken as they
are, bit for bit. A block of this job that is made of several, or of elements that were saved in fp32 (bitsandbytes
leaves small tensors so), is decoded and coded anew: off by up to half a code's step, as after every update.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from trainer.runtime.checkpoint.files.manifest import ParameterEntry, TensorEntry, TensorType
from trainer.runtime.checkpoint.files.shard_reader import OpenShards
from trainer.runtime.checkpoint.layout.pieces import Coded

BLOCK_ELEMENTS = 256
SCALES = ".absmax"  # after the name of the moment that they are of
_SLICE_ELEMENTS = 1 << 20  # decoded at a time; whole blocks
_NOT_SAVED = -1.0  # in place of a scale: padding, and what was never updated, is zero under any scale
_NOT_CODED = float("inf")  # in place of a scale: saved in fp32


class Stretch(NamedTuple):
    """Elements [start, start + num_elements) of a parameter's moment, at `offset` of the memory they go into."""

    title: str
    entry: ParameterEntry
    state: str
    start: int
    num_elements: int
    offset: int


def fill_coded(moment: Coded, stretches: Sequence[Stretch], shards: OpenShards) -> int:
    """Fills a moment from a checkpoint; how many of its blocks had to be coded anew."""
    table = moment.table.detach().cpu()
    num_coded_anew = 0
    for begin in range(0, moment.codes.numel(), _SLICE_ELEMENTS):
        size = min(_SLICE_ELEMENTS, moment.codes.numel() - begin)
        codes, scales, values = _read(table, stretches, shards, begin=begin, size=size)
        low = torch.where(scales == _NOT_SAVED, _NOT_CODED, scales).amin(dim=1)
        high = scales.amax(dim=1)
        is_anew = (high == _NOT_CODED) | ((low != high) & (high != _NOT_SAVED))
        num_coded_anew += int(is_anew.sum())
        codes[is_anew], high[is_anew] = _coded(values[is_anew], table)
        first = begin // BLOCK_ELEMENTS
        moment.codes[begin : begin + size].copy_(codes.view(-1)[:size])
        moment.scales[first : first + len(high)].copy_(high.clamp_(min=0.0))
    return num_coded_anew


def fill_decoded(values: torch.Tensor, stretch: Stretch, shards: OpenShards) -> None:
    """Fills a flat fp32 tensor with a moment that was saved in 8 bit."""
    for begin in range(0, stretch.num_elements, _SLICE_ELEMENTS):
        size = min(_SLICE_ELEMENTS, stretch.num_elements - begin)
        codes, scales = _read_coded(stretch, shards, start=stretch.start + begin, size=size)
        values[begin : begin + size].copy_(standard_table(stretch.state)[codes.long()] * scales)


def is_coded(entry: ParameterEntry, state: str) -> bool:
    """Whether a moment was saved in 8 bit."""
    return entry.state[state].type is TensorType.U8


def standard_table(state: str) -> torch.Tensor:
    """What the codes of a moment stand for: signed, but for squares."""
    from bitsandbytes.functional import create_dynamic_map  # takes seconds

    table: torch.Tensor = create_dynamic_map(signed=not state.endswith("_sq"))
    return table


def _read(
    table: torch.Tensor, stretches: Sequence[Stretch], shards: OpenShards, *, begin: int, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scale and value of each element of [begin, begin + size), in rows of one block, the last filled up."""
    num_blocks = -(-size // BLOCK_ELEMENTS)
    zero = int((table == 0).nonzero()[0])
    codes = torch.full((num_blocks * BLOCK_ELEMENTS,), zero, dtype=torch.uint8)
    scales = torch.full(codes.shape, _NOT_SAVED)
    values = torch.zeros(codes.shape)
    for each in stretches:
        first, last = max(each.offset, begin), min(each.offset + each.num_elements, begin + size)
        if first >= last:
            continue
        here, start = slice(first - begin, last - begin), each.start + first - each.offset
        if is_coded(each.entry, each.state):
            codes[here], scales[here] = _read_coded(each, shards, start=start, size=last - first)
            values[here] = table[codes[here].long()] * scales[here]
        else:
            shards.fill(values[here], each.entry.state[each.state], start=start, what=each.title)
            scales[here] = _NOT_CODED
    rows = (num_blocks, BLOCK_ELEMENTS)
    return codes.view(rows), scales.view(rows), values.view(rows)


def _read_coded(stretch: Stretch, shards: OpenShards, *, start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = torch.empty(size, dtype=torch.uint8), torch.empty(size)
    shards.fill(codes, stretch.entry.state[stretch.state], start=start, what=stretch.title)
    shards.fill(scales, _scales_of(stretch), start=start, what=f"{stretch.title}, its scales")
    return codes, scales


def _scales_of(stretch: Stretch) -> TensorEntry:
    return stretch.entry.state[stretch.state + SCALES]


def _coded(values: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks in rows as codes of the nearest values, and the scale of each block."""
    scales = values.abs().amax(dim=1)
    relative = values / torch.where(scales == 0, 1.0, scales).unsqueeze(1)
    middles = (table[1:] + table[:-1]) / 2
    return torch.bucketize(relative, middles).to(torch.uint8), scales
