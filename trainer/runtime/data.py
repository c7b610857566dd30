"""Which rows each rank puts through which forward: a function of the step, so that position needs no state.

A run is one sequence of rows, epoch after epoch, in the order of trainer.spec.data_order. Step s is sequences
[s * sequences_per_step, (s + 1) * sequences_per_step). They are dealt out in rounds, one per accumulation: in each
round, rank r takes the r-th slice of `micro_batch` sequences. Ranks, micro batch and accumulation only decide who
computes what: the global batch is the same set of rows in every arrangement, and exactly so, as what a last round
lacks is filled with dummy rows that have no target.

The loss of a step is divided by the targets of its whole global batch. Every rank knows that number without asking
the others, from the lengths of the rows and the starts of documents in them.

A row of several documents is learned as if each stood alone: positions count from 0 in each, and the first token of a
document is nobody's target. That no token sees another document is up to attention, which takes the positions for the
boundaries (packed_attention.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.runtime.token_rows import TokenRows, padded_width
from trainer.spec.data_order import row_of_sequence

__all__ = ["IGNORED_LABEL", "MicroBatch", "TokenRows", "eval_micro_batches", "step_micro_batches"]

IGNORED_LABEL = -100


class MicroBatch(NamedTuple):
    """One forward of one rank: B = micro_batch rows, padded on the right to the width S of the longest."""

    input_ids: Tensor  # int64 [B, S]
    labels: Tensor  # int64 [B, S], not shifted; IGNORED_LABEL on padding and dummy rows
    num_targets: int  # labels[:, 1:] that count
    position_ids: Tensor | None = None  # int64 [B, S], from 0 in each document; None where a row is one document


def step_micro_batches(
    rows: TokenRows,
    *,
    step: int,
    seed: int,
    sequences_per_step: int,
    rank: int,
    num_ranks: int,
    micro_batch: int,
    accumulation: int,
) -> tuple[list[MicroBatch], int]:
    """This rank's micro batches of a step, and the targets of the whole global batch; both without communication."""
    capacity = num_ranks * micro_batch * accumulation
    if sequences_per_step > capacity:
        raise ValueError(
            f"{sequences_per_step} sequences a step; {num_ranks} ranks x {micro_batch} x {accumulation} take {capacity}"
        )
    first = step * sequences_per_step
    numbers: list[int | None] = [
        row_of_sequence(sequence, seed=seed, num_rows=len(rows))
        for sequence in range(first, first + sequences_per_step)
    ]
    num_targets = sum(rows.num_targets(number) for number in numbers if number is not None)
    numbers += [None] * (capacity - sequences_per_step)
    slices = _slices(numbers, rank=rank, num_ranks=num_ranks, micro_batch=micro_batch)
    return [_micro_batch(rows, part) for part in slices], num_targets


def eval_micro_batches(
    rows: TokenRows, *, rank: int, num_ranks: int, micro_batch: int, max_rows: int | None = None
) -> list[MicroBatch]:
    """This rank's share of the first `max_rows` rows in their order; as many micro batches on every rank."""
    num_rows = len(rows) if max_rows is None else min(max_rows, len(rows))
    rounds = -(-num_rows // (num_ranks * micro_batch))
    numbers = [*range(num_rows), *[None] * (rounds * num_ranks * micro_batch - num_rows)]
    return [
        _micro_batch(rows, part) for part in _slices(numbers, rank=rank, num_ranks=num_ranks, micro_batch=micro_batch)
    ]


def _slices(
    numbers: Sequence[int | None], *, rank: int, num_ranks: int, micro_batch: int
) -> list[Sequence[int | None]]:
    """The rank's slice of every round."""
    per_round = num_ranks * micro_batch
    starts = range(rank * micro_batch, len(numbers), per_round)
    return [numbers[start : start + micro_batch] for start in starts]


def _micro_batch(rows: TokenRows, numbers: Sequence[int | None]) -> MicroBatch:
    """The rows `numbers` side by side; None is a dummy row."""
    lengths = [rows.length(number) for number in numbers if number is not None]
    width = padded_width(lengths, seq_len=rows.layout.seq_len)
    input_ids = torch.full((len(numbers), width), rows.layout.pad_id, dtype=torch.int64)
    labels = torch.full((len(numbers), width), IGNORED_LABEL, dtype=torch.int64)
    position_ids = torch.arange(width).repeat(len(numbers), 1)
    has_boundaries = False
    num_targets = 0
    for place, number in enumerate(numbers):
        if number is None:
            continue
        ids = torch.from_numpy(rows.row(number))
        input_ids[place, : len(ids)] = ids
        labels[place, : len(ids)] = ids
        num_targets += len(ids) - 1
        for start in rows.document_starts(number).tolist():
            labels[place, start] = IGNORED_LABEL
            position_ids[place, start:] = torch.arange(width - start)
            has_boundaries = True
            num_targets -= 1
    return MicroBatch(input_ids, labels, num_targets, position_ids if has_boundaries else None)
