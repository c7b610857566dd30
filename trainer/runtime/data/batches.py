"""The rows of each rank's forwards: a function of the step, so that the position in the data needs no state.

The rows of a step, its global batch, and their order are those of trainer.spec.data.order: the longest first. They are
dealt out in rounds, one per accumulation: in each round, rank r gets the r-th slice of `micro_batch` rows. So rows of
like length meet in a micro batch, and the ranks have about the same work in each round. Ranks, micro batch and
accumulation only distribute the work: the global batch is the same set of rows in every arrangement, as the last round
is filled with dummy rows that have no target. The loss of a step is divided by the terms of its whole global batch
(targets, or preference pairs), which every rank computes without communication.

Each document of a packed row is learned as if it stood alone: positions count from 0, and its first token is no target.
Attention finds the boundaries from the positions (attention/packed.py). Packed rows are padded to `seq_len`, so that
every forward has one width; others to the longest of their micro batch.

That this holds for a model is measured before its first step (documents.py).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenRows, padded_width


class MicroBatch(NamedTuple):
    """One forward of one rank: B = micro_batch rows, padded on the right to the width S of the longest.

    Of preference pairs, B = 2 x micro_batch: the chosen responses of all pairs, then the rejected ones, in the same
    order. Dummies come last.
    """

    input_ids: Tensor  # int64 [B, S]
    labels: Tensor  # int64 [B, S], not shifted; IGNORED_LABEL where not learned, on padding and dummy rows
    num_targets: int  # labels that count; none is in the first column
    position_ids: Tensor | None = None  # int64 [B, S], from 0 in each document; None where a row is one document
    num_pairs: int = 0  # that are no dummies; 0 where rows are no pairs
    num_tokens: int = 0  # positions that are neither padding nor of a dummy
    document_bounds: tuple[int, ...] = ()  # of packed rows laid end to end: where documents start, and the end
    row_lengths: tuple[int, ...] = ()  # tokens of each row without padding; none where no row has padding

    @property
    def num_terms(self) -> int:
        """How many terms this micro batch adds to the mean that the loss of a step is."""
        return self.num_pairs or self.num_targets


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
    """This rank's micro batches of a step, and the terms of the whole global batch; both without communication.

    Sequences are examples: where these are pairs, a micro batch holds `micro_batch` pairs.
    """
    capacity = num_ranks * micro_batch * accumulation
    if sequences_per_step > capacity:
        raise ValueError(
            f"{sequences_per_step} sequences a step; {num_ranks} ranks x {micro_batch} x {accumulation} take {capacity}"
        )
    examples = rows.order(seed=seed, sequences_per_step=sequences_per_step).rows_of_step(step)
    num_terms = sum(rows.num_terms(example) for example in examples)
    padded = [*examples, *[None] * (capacity - sequences_per_step)]
    slices = _slices(padded, rank=rank, num_ranks=num_ranks, micro_batch=micro_batch)
    return [_micro_batch(rows, part) for part in slices], num_terms


def eval_micro_batches(
    rows: TokenRows, *, rank: int, num_ranks: int, micro_batch: int, max_rows: int | None = None
) -> Iterator[MicroBatch]:
    """This rank's share of the first `max_rows` examples, the longest first; as many micro batches on every rank."""
    longest_first = np.argsort(-rows.example_lengths[:max_rows], kind="stable").tolist()
    rounds = -(-len(longest_first) // (num_ranks * micro_batch))
    examples = [*longest_first, *[None] * (rounds * num_ranks * micro_batch - len(longest_first))]
    for part in _slices(examples, rank=rank, num_ranks=num_ranks, micro_batch=micro_batch):
        yield _micro_batch(rows, part)


def _slices(
    numbers: Sequence[int | None], *, rank: int, num_ranks: int, micro_batch: int
) -> list[Sequence[int | None]]:
    """The rank's slice of every round."""
    per_round = num_ranks * micro_batch
    starts = range(rank * micro_batch, len(numbers), per_round)
    return [numbers[start : start + micro_batch] for start in starts]


def _micro_batch(rows: TokenRows, examples: Sequence[int | None]) -> MicroBatch:
    """The examples side by side, their first rows before their second ones; None is a dummy."""
    layout = rows.layout
    numbers = [
        None if example is None else rows.rows_of(example)[place]
        for place in range(layout.rows_per_example)
        for example in examples
    ]
    lengths = [rows.length(number) for number in numbers if number is not None]
    width = layout.seq_len if layout.is_packed else padded_width(lengths, seq_len=layout.seq_len)
    input_ids = torch.full((len(numbers), width), layout.pad_id, dtype=torch.int64)
    labels = torch.full((len(numbers), width), IGNORED_LABEL, dtype=torch.int64)
    position_ids = torch.arange(width).repeat(len(numbers), 1)
    row_lengths = [0 if number is None else rows.length(number) for number in numbers]
    bounds = [place * width for place in range(len(numbers) + 1)]
    has_boundaries = False
    for place, number in enumerate(numbers):
        if number is None:
            continue
        length = rows.length(number)
        input_ids[place, :length] = torch.from_numpy(rows.row(number))
        labels[place, :length] = torch.from_numpy(rows.labels(number))
        for start in rows.document_starts(number).tolist():
            position_ids[place, start:] = torch.arange(width - start)
            bounds.append(place * width + start)
            has_boundaries = True
    num_pairs = sum(example is not None for example in examples) if layout.rows_per_example == 2 else 0
    num_targets = int((labels != IGNORED_LABEL).sum())
    micro_batch = MicroBatch(
        input_ids,
        labels,
        num_targets,
        num_pairs=num_pairs,
        num_tokens=sum(lengths),
        row_lengths=() if min(row_lengths) == width else tuple(row_lengths),
    )
    if not has_boundaries:
        return micro_batch
    return micro_batch._replace(position_ids=position_ids, document_bounds=tuple(sorted(bounds)))


def padding_share(micro_batches: Sequence[MicroBatch]) -> float:
    """Of all positions that a rank puts through the model in a step."""
    positions = sum(batch.input_ids.numel() for batch in micro_batches)
    return 1 - sum(batch.num_tokens for batch in micro_batches) / positions
