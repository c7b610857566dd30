"""What each rank gets: the same global batch in every arrangement, exactly once, with its targets counted."""

from collections import Counter
from math import log

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prepare_request_factory import rows_of_lengths

from trainer.runtime.data import IGNORED_LABEL, eval_micro_batches, step_micro_batches
from trainer.runtime.token_rows import TokenLayout, TokenRows, unigram_entropy_nats
from trainer.spec.data_order import row_of_sequence
from trainer.spec.errors import EnvironmentFaultError

LENGTHS = (9, 2, 16, 5, 8, 3, 12)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return rows_of_lengths(tmp_path_factory.mktemp("rows"), LENGTHS, seq_len=16)


def row_numbers(micro_batch):
    """The rows in a micro batch, None for dummies; rows_of_lengths starts row i with token i + 1."""
    return [
        None if labels[0] == IGNORED_LABEL else int(ids[0]) - 1
        for ids, labels in zip(micro_batch.input_ids, micro_batch.labels, strict=True)
    ]


def global_batch(rows, *, step, sequences_per_step, num_ranks, micro_batch, accumulation):
    """Row numbers of a step in the order of the sequences, dummies left out, and the targets that each rank names."""
    ranks = [
        step_micro_batches(
            rows,
            step=step,
            seed=11,
            sequences_per_step=sequences_per_step,
            rank=rank,
            num_ranks=num_ranks,
            micro_batch=micro_batch,
            accumulation=accumulation,
        )
        for rank in range(num_ranks)
    ]
    batches = [batches for batches, _ in ranks]
    in_order = [number for rounds in zip(*batches, strict=True) for batch in rounds for number in row_numbers(batch)]
    return [number for number in in_order if number is not None], {targets for _, targets in ranks}, batches


arrangements = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(arrangement=arrangements, sequences_per_step=st.integers(1, 30), step=st.integers(0, 40))
def test_ranks_micro_batch_and_accumulation_never_change_the_global_batch(rows, arrangement, sequences_per_step, step):
    num_ranks, micro_batch, accumulation = arrangement
    accumulation = max(accumulation, -(-sequences_per_step // (num_ranks * micro_batch)))
    numbers, named_targets, batches = global_batch(
        rows,
        step=step,
        sequences_per_step=sequences_per_step,
        num_ranks=num_ranks,
        micro_batch=micro_batch,
        accumulation=accumulation,
    )
    first = step * sequences_per_step
    assert numbers == [
        row_of_sequence(sequence, seed=11, num_rows=len(rows)) for sequence in range(first, first + sequences_per_step)
    ]
    assert named_targets == {sum(LENGTHS[number] - 1 for number in numbers)}
    assert sum(batch.num_targets for rank in batches for batch in rank) == named_targets.pop()
    assert all(len(rank) == accumulation for rank in batches)


def test_every_row_comes_once_an_epoch_over_changing_arrangements(rows):
    """Three epochs of seven rows, three sequences a step, on 1, 4, 2 and 3 ranks in turn."""
    seen = []
    for step in range(7):
        num_ranks = (1, 4, 2, 3)[step % 4]
        numbers, _, _ = global_batch(
            rows, step=step, sequences_per_step=3, num_ranks=num_ranks, micro_batch=1, accumulation=3
        )
        seen += numbers
    assert [sorted(seen[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3


def test_rank_and_round_take_neighbouring_slices(rows):
    """Eight sequences as 2 rounds x 2 ranks x 2 rows: rank 1 has the sequences 2, 3 and 6, 7."""
    batches, _ = step_micro_batches(
        rows, step=0, seed=0, sequences_per_step=8, rank=1, num_ranks=2, micro_batch=2, accumulation=2
    )
    expected = [[row_of_sequence(sequence, seed=0, num_rows=7) for sequence in pair] for pair in ((2, 3), (6, 7))]
    assert [row_numbers(batch) for batch in batches] == expected


def test_labels_are_the_inputs_and_nothing_on_padding(rows):
    [batch], _ = step_micro_batches(
        rows, step=0, seed=0, sequences_per_step=7, rank=0, num_ranks=1, micro_batch=7, accumulation=1
    )
    for place, number in enumerate(row_numbers(batch)):
        length = LENGTHS[number]
        assert batch.input_ids[place, :length].tolist() == rows.row(number).tolist()
        assert batch.labels[place, :length].tolist() == rows.row(number).tolist()
        assert (batch.labels[place, length:] == IGNORED_LABEL).all()
        assert (batch.input_ids[place, length:] == rows.layout.pad_id).all()
    assert batch.num_targets == int((batch.labels[:, 1:] != IGNORED_LABEL).sum()) == sum(LENGTHS) - 7


def test_what_the_last_round_lacks_are_dummies_without_a_target(rows):
    batches, num_targets = step_micro_batches(
        rows, step=0, seed=0, sequences_per_step=3, rank=1, num_ranks=2, micro_batch=2, accumulation=2
    )
    assert [row_numbers(batch)[1:] for batch in batches] == [[None], [None]]
    assert batches[1].num_targets == 0
    assert batches[1].input_ids.shape == (2, 8)
    assert num_targets > sum(batch.num_targets for batch in batches)


@pytest.mark.parametrize(
    "lengths, seq_len, width",
    [((3,), 64, 8), ((8,), 64, 8), ((9, 2), 64, 16), ((64,), 64, 64), ((10,), 10, 10), ((9,), 10, 10), ((2,), 5, 5)],
)
def test_width_is_a_multiple_of_eight_but_not_above_seq_len(tmp_path, lengths, seq_len, width):
    rows = rows_of_lengths(tmp_path, lengths, seq_len=seq_len)
    [batch] = eval_micro_batches(rows, rank=0, num_ranks=1, micro_batch=len(lengths))
    assert batch.input_ids.shape == batch.labels.shape == (len(lengths), width)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64


def test_more_sequences_than_the_ranks_take_are_refused(rows):
    with pytest.raises(ValueError, match="9 sequences a step; 2 ranks x 2 x 2 take 8"):
        step_micro_batches(
            rows, step=0, seed=0, sequences_per_step=9, rank=0, num_ranks=2, micro_batch=2, accumulation=2
        )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 2, 5])
@pytest.mark.parametrize("max_rows", [None, 4, 100])
def test_evaluation_sees_each_row_once_in_as_many_forwards_on_every_rank(rows, num_ranks, micro_batch, max_rows):
    ranks = [
        eval_micro_batches(rows, rank=rank, num_ranks=num_ranks, micro_batch=micro_batch, max_rows=max_rows)
        for rank in range(num_ranks)
    ]
    seen = Counter(number for rank in ranks for batch in rank for number in row_numbers(batch))
    del seen[None]
    assert seen == Counter(range(min(7, max_rows or 7)))
    assert len({len(rank) for rank in ranks}) == 1


def packed_rows(*lengths_of_rows, **settings):
    """Rows of documents of these lengths, the last of a row going on in the next; tokens count from 100."""
    num_tokens = sum(map(sum, lengths_of_rows))
    width = max(map(sum, lengths_of_rows))
    ends = np.cumsum([sum(lengths) for lengths in lengths_of_rows])
    starts = np.concatenate([
        first + np.cumsum([0, *lengths[:-1]])[1:] for first, lengths in zip([0, *ends], lengths_of_rows, strict=False)
    ])  # fmt: skip
    table = np.stack([np.concatenate([[0], ends[:-1]]), [sum(lengths) for lengths in lengths_of_rows]], axis=1)
    layout = TokenLayout(dtype="uint16", num_tokens=num_tokens, seq_len=width, pad_id=0, **settings)
    return TokenRows((100 + np.arange(num_tokens)).astype(np.uint16), table, layout, starts.astype(np.int64))


def only_micro_batch(rows, micro_batch):
    [batch] = eval_micro_batches(rows, rank=0, num_ranks=1, micro_batch=micro_batch)
    return batch


def test_positions_start_anew_in_each_document_and_in_each_row():
    batch = only_micro_batch(packed_rows((3, 1, 4), (8,), (2, 6)), 3)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3], list(range(8)), [0, 1, 0, 1, 2, 3, 4, 5]]
    assert batch.position_ids.dtype == torch.int64


def test_the_first_token_of_a_document_is_nobodys_target():
    rows = packed_rows((3, 1, 4), (8,), (2, 6))
    batch = only_micro_batch(rows, 3)
    is_ignored = (batch.labels == IGNORED_LABEL).tolist()
    assert [[place for place, ignored in enumerate(row) if ignored] for row in is_ignored] == [[3, 4], [], [2]]
    kept = batch.labels != IGNORED_LABEL
    assert torch.equal(batch.labels[kept], batch.input_ids[kept])
    assert [rows.num_targets(number) for number in range(3)] == [5, 7, 6]
    assert batch.num_targets == int((batch.labels[:, 1:] != IGNORED_LABEL).sum()) == 18


def test_rows_of_one_document_each_have_no_positions():
    assert only_micro_batch(packed_rows((8,), (8,)), 2).position_ids is None
    assert only_micro_batch(packed_rows((8,), (7, 1)), 2).position_ids is not None


def test_dummy_rows_and_padding_count_on():
    batch = only_micro_batch(packed_rows((1, 2), (12,)), 3)
    assert batch.position_ids.tolist() == [[0, *range(11)], list(range(12)), list(range(12))]


@pytest.mark.parametrize("arrangement", [(1, 6, 1), (2, 1, 3), (3, 2, 1), (4, 1, 2)])
def test_every_rank_knows_the_targets_of_packed_rows(arrangement):
    num_ranks, micro_batch, accumulation = arrangement
    rows = packed_rows((3, 1, 4), (8,), (2, 6), (1, 1, 1, 5), (7, 1))
    ranks = [
        step_micro_batches(
            rows,
            step=1,
            seed=3,
            sequences_per_step=6,
            rank=rank,
            num_ranks=num_ranks,
            micro_batch=micro_batch,
            accumulation=accumulation,
        )
        for rank in range(num_ranks)
    ]
    (named,) = {targets for _, targets in ranks}
    batches = [batch for rank, _ in ranks for batch in rank]
    assert named == sum(batch.num_targets for batch in batches)
    assert named == sum(int((batch.labels[:, 1:] != IGNORED_LABEL).sum()) for batch in batches)


def test_entropy_leaves_out_the_first_token_of_each_document(tmp_path):
    """(1, a, b | 2, a, c): the targets are a twice, b once, c once."""
    layout = rows_of_lengths(tmp_path, (6,)).layout
    rows = TokenRows(np.array([1, 7, 8, 2, 7, 9], np.uint16), np.array([[0, 6]]), layout, np.array([3]))
    assert unigram_entropy_nats(rows) == pytest.approx(1.5 * log(2))


def test_a_cache_without_starts_is_one_document_a_row(tmp_path):
    """Caches that others wrote, and rows that were never packed."""
    rows = rows_of_lengths(tmp_path, (4, 4))
    assert [rows.document_starts(number).tolist() for number in range(2)] == [[], []]
    assert [rows.num_targets(number) for number in range(2)] == [3, 3]


def test_starts_that_are_cut_short_or_gone_are_an_environment_fault(tmp_path):
    rows = rows_of_lengths(tmp_path, (4, 4))
    (tmp_path / "layout.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(rows.layout, num_starts=2)))
    with pytest.raises(EnvironmentFaultError, match="damaged"):
        TokenRows.open(tmp_path, "train")
    (tmp_path / "starts.bin").write_bytes(np.array([0], "<i8").tobytes())
    with pytest.raises(EnvironmentFaultError, match=r"starts\.bin: has 8 bytes, 16 were written; delete"):
        TokenRows.open(tmp_path, "train")


def test_rows_are_copies_of_what_is_on_disk(rows):
    row = rows.row(0)
    row[:] = 0
    assert rows.row(0).tolist()[0] == 1


def test_a_truncated_cache_is_an_environment_fault_that_names_it(tmp_path):
    rows_of_lengths(tmp_path, (4, 4))
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(EnvironmentFaultError, match=r"tokens\.bin: has 14 bytes, 16 were written; delete"):
        TokenRows.open(tmp_path, "train")


def test_a_missing_row_index_is_an_environment_fault(tmp_path):
    rows_of_lengths(tmp_path, (4, 4))
    with pytest.raises(EnvironmentFaultError, match="damaged"):
        TokenRows.open(tmp_path, "eval")


def test_entropy_is_that_of_the_targets_alone(tmp_path):
    """Two rows (1, a, b) and (2, a, c): the targets are a twice, b once, c once; the first tokens count for nothing."""
    layout = rows_of_lengths(tmp_path, (3, 3)).layout
    rows = TokenRows(np.array([1, 7, 8, 2, 7, 9], np.uint16), np.array([[0, 3], [3, 3]]), layout)
    assert unigram_entropy_nats(rows) == pytest.approx(1.5 * log(2))
