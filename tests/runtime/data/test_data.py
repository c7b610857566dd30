"""What each rank gets: the same global batch in every arrangement, exactly once, with targets and lengths counted."""

import math
from collections import Counter
from itertools import chain

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prepare_request_factory import rows_of_lengths

from shardwise.trainer.runtime.data.batches import eval_micro_batches, step_micro_batches
from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenLayout, TokenRows, batch_widths, length_histogram
from shardwise.trainer.runtime.data.row_writer import RowShape, RowWriter
from shardwise.trainer.runtime.data.sources import TokenIds
from shardwise.trainer.spec.errors import EnvironmentFaultError

LENGTHS = (9, 2, 16, 5, 8, 3, 12)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return rows_of_lengths(tmp_path_factory.mktemp("rows"), LENGTHS, seq_len=16)


def row_numbers(micro_batch):
    """The rows in a micro batch, None for dummies; rows_of_lengths starts row i with token i + 1."""
    return [
        None if (labels == IGNORED_LABEL).all() else int(ids[0]) - 1
        for ids, labels in zip(micro_batch.input_ids, micro_batch.labels, strict=True)
    ]


def dealt(rows, micro_batch, accumulation=1, num_ranks=1, *, sequences, step=0, seed=11, rank=0):
    return step_micro_batches(
        rows, step=step, seed=seed, sequences_per_step=sequences, rank=rank, num_ranks=num_ranks,
        micro_batch=micro_batch, accumulation=accumulation,
    )  # fmt: skip


arrangements = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(arrangement=arrangements, sequences=st.integers(1, 30), step=st.integers(0, 40))
def test_ranks_micro_batch_and_accumulation_never_change_the_global_batch(rows, arrangement, sequences, step):
    num_ranks, micro_batch, at_least = arrangement
    deal = micro_batch, max(at_least, -(-sequences // (num_ranks * micro_batch))), num_ranks
    ranks, named_targets = zip(
        *(dealt(rows, *deal, sequences=sequences, step=step, rank=rank) for rank in range(num_ranks)), strict=True
    )
    in_order = [number for rounds in zip(*ranks, strict=True) for batch in rounds for number in row_numbers(batch)]
    numbers = [number for number in in_order if number is not None]  # dummies left out
    assert numbers == rows.order(seed=11, sequences_per_step=sequences).rows_of_step(step)
    assert set(named_targets) == {sum(LENGTHS[number] - 1 for number in numbers)}
    assert sum(batch.num_targets for rank in ranks for batch in rank) == named_targets[0]
    assert all(len(rank) == deal[1] for rank in ranks)
    with pytest.raises(ValueError, match=rf"\b{math.prod(deal)}$"):
        dealt(rows, *deal, sequences=math.prod(deal) + 1)


def test_labels_are_the_inputs_and_nothing_on_padding(rows):
    [batch], _ = dealt(rows, 7, sequences=7)
    for place, number in enumerate(row_numbers(batch)):
        length = LENGTHS[number]
        assert batch.input_ids[place, :length].tolist() == rows.row(number).tolist()
        assert batch.labels[place, 1:length].tolist() == rows.row(number)[1:].tolist()
        assert batch.labels[place, 0] == IGNORED_LABEL
        assert (batch.labels[place, length:] == IGNORED_LABEL).all()
        assert (batch.input_ids[place, length:] == rows.layout.pad_id).all()
    assert batch.num_targets == int((batch.labels[:, 1:] != IGNORED_LABEL).sum()) == sum(LENGTHS) - 7
    row = rows.row(0)
    row[:] = 0
    assert rows.row(0).tolist()[0] == 1, "rows are copies of what is on disk"


@pytest.mark.parametrize(("num_ranks", "micro_batch"), [(1, 5), (2, 2), (3, 1), (4, 5)])
@pytest.mark.parametrize("max_rows", [None, 4, 100])
def test_evaluation_sees_each_row_once_in_as_many_forwards_on_every_rank(rows, num_ranks, micro_batch, max_rows):
    ranks = [
        [*eval_micro_batches(rows, rank=rank, num_ranks=num_ranks, micro_batch=micro_batch, max_rows=max_rows)]
        for rank in range(num_ranks)
    ]
    seen = Counter(number for rank in ranks for batch in rank for number in row_numbers(batch))
    del seen[None]
    assert seen == Counter(range(min(7, max_rows or 7)))
    assert len({len(rank) for rank in ranks}) == 1


def packed_rows(*lengths_of_rows):
    lengths = np.array([sum(each) for each in lengths_of_rows])
    ends, starts = np.cumsum(lengths), np.cumsum([0, *chain(*lengths_of_rows)])[:-1]
    layout = TokenLayout(
        dtype="uint16", num_tokens=int(ends[-1]), seq_len=int(lengths.max()), pad_id=0, is_packed=True,
        num_starts=len(starts),
    )  # fmt: skip
    tokens = np.arange(100, 100 + layout.num_tokens, dtype=np.uint16)
    return TokenRows(tokens, np.stack([ends - lengths, lengths], axis=1), layout, starts)


def only_micro_batch(rows, micro_batch):
    [batch] = eval_micro_batches(rows, rank=0, num_ranks=1, micro_batch=micro_batch)
    return batch


def test_positions_start_anew_in_each_document_whose_first_token_is_not_a_target():
    rows = packed_rows((3, 1, 4), (8,), (2, 6))
    batch = only_micro_batch(rows, 3)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3], list(range(8)), [0, 1, 0, 1, 2, 3, 4, 5]]
    assert batch.position_ids.dtype == torch.int64
    is_ignored = (batch.labels == IGNORED_LABEL).tolist()
    assert [[place for place, ignored in enumerate(row) if ignored] for row in is_ignored] == [[0, 3, 4], [0], [0, 2]]
    retained = batch.labels != IGNORED_LABEL
    assert torch.equal(batch.labels[retained], batch.input_ids[retained])
    assert [rows.num_targets(number) for number in range(3)] == [5, 7, 6]
    assert batch.num_targets == 18


def test_packed_rows_are_as_wide_as_a_row_can_be_and_have_positions_where_documents_meet():
    """One width in every forward: a compiled model is compiled once."""
    rows = packed_rows((1, 2), (12,))
    first, second = [*eval_micro_batches(rows, rank=0, num_ranks=1, micro_batch=1)]
    assert first.input_ids.shape == second.input_ids.shape == (1, 12)
    assert first.position_ids is None, "the longest, of one document"
    assert (second.labels[second.input_ids == rows.layout.pad_id] == IGNORED_LABEL).all()
    with_dummy = only_micro_batch(rows, 3).position_ids
    assert with_dummy.tolist() == [list(range(12)), [0, *range(11)], list(range(12))]


def test_a_micro_batch_of_pairs_holds_the_chosen_answers_and_then_the_rejected_ones(tmp_path):
    """The longest answer of either kind decides the width and the order: pairs 2, 1, 6 have 16, 14 and 12 tokens.

    The answers of pair n start with n + 1 and go on with 101 and more, or with 201.
    """
    with RowWriter(tmp_path, np.dtype("<u2"), RowShape(16, False, eos_id=None, rows_per_example=2)) as writer:
        for number, (chosen, rejected) in enumerate(zip(LENGTHS, (3, 14, 2, 5, 6, 7, 4), strict=True)):
            answers = ([number + 1, *range(101, 100 + chosen)], [number + 1, *range(201, 200 + rejected)])
            writer.add_pair(*map(TokenIds, answers), is_held_out=False, weight=1.0)
        writer.finish()
    pairs = TokenRows.open(tmp_path, "train")
    batches, num_terms = dealt(pairs, 3, 3, sequences=7, seed=0)
    first = batches[0]
    assert first.input_ids[:, 0].tolist() == [3, 2, 7, 3, 2, 7]
    assert first.input_ids[:, 1].tolist() == [101, 101, 101, 201, 201, 201]
    assert [int((labels != IGNORED_LABEL).sum()) + 1 for labels in first.labels] == [16, 2, 12, 2, 14, 4]
    assert first.input_ids.shape == (6, 16)
    assert (first.num_pairs, first.num_terms, first.num_targets) == (3, 3, 50 - 6)
    last = batches[2]
    assert last.input_ids.shape == (6, 8)
    assert (last.num_pairs, num_terms) == (1, 7)
    assert [bool((labels != IGNORED_LABEL).any()) for labels in last.labels] == [True, False, False] * 2
    scored = [*eval_micro_batches(pairs, rank=0, num_ranks=1, micro_batch=2, max_rows=5)]
    assert [batch.num_terms for batch in scored] == [2, 2, 1]


def test_a_damaged_cache_is_an_environment_fault_that_names_it(tmp_path):
    layout = rows_of_lengths(tmp_path, (4, 4)).layout

    def assert_damaged(fact, split="train"):
        with pytest.raises(EnvironmentFaultError, match=rf"{tmp_path}\b.*{fact}.*delete"):
            TokenRows.open(tmp_path, split)

    assert_damaged(r"eval_rows\.npy", split="eval")
    (tmp_path / "layout.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(layout, num_starts=2)))
    assert_damaged(r"starts\.bin")
    (tmp_path / "starts.bin").write_bytes(np.array([0], "<i8").tobytes())
    assert_damaged("8 bytes, 16")
    (tmp_path / "tokens.bin").write_bytes((tmp_path / "tokens.bin").read_bytes()[:-2])
    assert_damaged("14 bytes, 16")


GEOMETRIC = np.minimum(np.random.default_rng(7).geometric(1 / 120, 4096) + 1, 512)


@pytest.mark.parametrize(
    ("lengths", "edges", "counts"),
    [
        ([100] * 3, (100,), (3,)),
        ([1, 3, 4, 5, 12], (1, 2, 3, 4, 6, 8, 12), (1, 0, 1, 1, 1, 0, 1)),
        ([12, 12, 7], (8, 12), (1, 2)),
    ],
)
def test_lengths_are_counted_up_to_and_with_the_edge(lengths, edges, counts):
    histogram = length_histogram(np.array(lengths))
    assert (histogram.edges, histogram.counts) == (edges, counts)


@pytest.mark.parametrize(("micro_batch", "sequences_per_step"), [(1, 32), (4, 16), (16, 128)])
def test_the_mean_width_is_that_of_the_batches_training_makes(tmp_path, micro_batch, sequences_per_step):
    (counted,) = [width for width in batch_widths(GEOMETRIC, seq_len=512) if width.micro_batch == micro_batch]
    rows = rows_of_lengths(tmp_path, GEOMETRIC.tolist(), seq_len=512)
    widths = []
    for step in range(len(GEOMETRIC) // sequences_per_step):
        accumulation = sequences_per_step // micro_batch
        batches, _ = dealt(rows, micro_batch, accumulation, sequences=sequences_per_step, step=step, seed=0)
        widths += [batch.input_ids.shape[1] for batch in batches]
    assert counted.mean_width_sorted == pytest.approx(np.mean(widths), rel=0.02)
