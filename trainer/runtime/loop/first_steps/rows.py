"""Whether a rank learns the rows that follow from the seed, each token and each label as it is stored.

The numbers of the rows are computed anew from the job's seed and the step, not taken from what the loop was given. What
a micro batch holds is compared token by token, so rows that two ranks share, that are missing or in another order, and
labels of a prompt, of padding or of the wrong place are all found by one comparison.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from shardwise.trainer.runtime.data.batches import MicroBatch
from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenRows
from shardwise.trainer.runtime.loop.first_steps.problem import Problem
from shardwise.trainer.spec.data.order import DataOrder


def order_of(rows: TokenRows, *, seed: int, sequences_per_step: int) -> DataOrder:
    """The order that follows from the seed; it computes a window of steps once."""
    return DataOrder(
        rows.example_length,
        num_rows=len(rows),
        longest=int(np.argmax(rows.example_lengths)),
        seed=seed,
        sequences_per_step=sequences_per_step,
        is_grouped=not rows.layout.is_packed,
    )


def examples_of_rank(
    examples: Sequence[int], *, rank: int, num_ranks: int, micro_batch: int, accumulation: int
) -> list[list[int | None]]:
    """The examples of each micro batch of a rank; None is a dummy."""
    filled: list[int | None] = [*examples, *[None] * (num_ranks * micro_batch * accumulation - len(examples))]
    starts = [(turn * num_ranks + rank) * micro_batch for turn in range(accumulation)]
    return [filled[start : start + micro_batch] for start in starts]


def contents(rows: TokenRows, examples: Sequence[int]) -> frozenset[bytes]:
    """What the rows of a step hold, whatever their numbers."""
    return frozenset(rows.row(number).tobytes() for example in examples for number in rows.rows_of(example))


def repeated_rows(examples: Sequence[int], seen: set[int], *, step: int) -> list[Problem]:
    """A problem if an example comes twice within one pass over the data; adds the examples to `seen`."""
    num_repeated = len(examples) - len(set(examples) - seen)
    seen.update(examples)
    if not num_repeated:
        return []
    return [Problem(f"step {step}: {num_repeated} rows come twice within one pass over the data", is_certain=True)]


def row_problems(
    rows: TokenRows, micro_batches: Sequence[MicroBatch], expected: Sequence[Sequence[int | None]], *, step: int
) -> list[Problem]:
    """How the micro batches of a rank differ from the stored rows; at most one problem of each kind."""
    if len(micro_batches) != len(expected):
        text = f"step {step}: a rank has {len(micro_batches)} micro batches; {len(expected)} follow from the plan"
        return [Problem(text, is_certain=True)]
    num_rows = num_tokens = num_labels = 0
    for micro_batch, examples in zip(micro_batches, expected, strict=True):
        per_example = rows.layout.rows_per_example
        numbers = [
            None if each is None else rows.rows_of(each)[part] for part in range(per_example) for each in examples
        ]
        num_rows += abs(len(micro_batch.input_ids) - len(numbers))
        for ids, labels, number in zip(micro_batch.input_ids, micro_batch.labels, numbers, strict=False):
            num_tokens += not _holds(rows, number, ids)
            num_labels += not _learns(rows, number, ids, labels)
    found = []
    if num_rows or num_tokens:
        found.append(f"{max(num_rows, num_tokens)} rows of a rank are not those that follow from the seed")
    if num_labels and not num_tokens:
        found.append(f"the labels of {num_labels} rows are not those of the prepared data")
    return [Problem(f"step {step}: {each}", is_certain=True) for each in found]


def count_problems(
    rows: TokenRows, examples: Sequence[int], *, num_tokens: int, num_targets: int, step: int
) -> list[Problem]:
    """A problem if all ranks together learned another number of tokens than the rows of the step have."""
    numbers = [number for example in examples for number in rows.rows_of(example)]
    stored = sum(map(rows.length, numbers)), sum(map(rows.num_targets, numbers))
    if stored == (num_tokens, num_targets):
        return []
    return [
        Problem(
            f"step {step}: {num_tokens:,} tokens went through the model and {num_targets:,} were learned; its rows "
            f"have {stored[0]:,} and {stored[1]:,}",
            is_certain=True,
        )
    ]


def _holds(rows: TokenRows, number: int | None, ids: Tensor) -> bool:
    """True if a line of a micro batch is this row and padding."""
    stored = np.zeros(0, np.int64) if number is None else rows.row(number)
    found = ids.numpy()
    return (
        len(found) >= len(stored)
        and np.array_equal(found[: len(stored)], stored)
        and bool((found[len(stored) :] == rows.layout.pad_id).all())
    )


def _learns(rows: TokenRows, number: int | None, ids: Tensor, labels: Tensor) -> bool:
    """True if every label is the token of its place, as many as the row has targets, and none is on padding."""
    found, is_learned = labels.numpy(), labels.numpy() != IGNORED_LABEL
    length, num_targets = (0, 0) if number is None else (rows.length(number), rows.num_targets(number))
    is_at_place = bool((found[is_learned] == ids.numpy()[is_learned]).all())
    return is_at_place and not is_learned[length:].any() and int(is_learned.sum()) == num_targets
