"""Rows out of a stream of ids: what is packed, cut, dropped and repeated, token by token."""

import io
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.runtime.row_writer import RowShape, RowWriter

EOS = 0


def write(units, *, seq_len=4, is_packed=True, eos_id=EOS, prefix=()):
    """(train rows, held-out rows, Rows) of units (ids, opens_document, is_held_out, weight)."""
    train, held_out, rows, _ = write_with_starts(
        units, seq_len=seq_len, is_packed=is_packed, eos_id=eos_id, prefix=prefix
    )
    return train, held_out, rows


def write_with_starts(units, *, seq_len=4, is_packed=True, eos_id=EOS, prefix=()):
    """The same, and the starts of documents in each row of training: the row itself cut at them."""
    stream, starts_stream = io.BytesIO(), io.BytesIO()
    shape = RowShape(seq_len=seq_len, is_packed=is_packed, eos_id=eos_id, document_prefix=prefix)
    writer = RowWriter(stream, np.dtype("<u2"), shape, starts=starts_stream)
    for ids, opens_document, is_held_out, weight in units:
        writer.add(ids, opens_document=opens_document, is_held_out=is_held_out, weight=weight)
    rows = writer.finish()
    tokens = np.frombuffer(stream.getvalue(), "<u2")
    assert len(tokens) == rows.num_tokens
    train, held_out = (
        [tokens[start : start + length].tolist() for start, length in table] for table in (rows.train, rows.held_out)
    )
    starts = np.frombuffer(starts_stream.getvalue(), "<i8")
    assert len(starts) == rows.num_starts
    assert (np.diff(starts) > 0).all()
    cut = [
        [part.tolist() for part in np.split(tokens[start : start + length], inside(starts, start, length))]
        for start, length in rows.train
    ]
    return train, held_out, rows, cut


def inside(starts, start, length):
    return starts[(starts > start) & (starts < start + length)] - start


def documents(*contents, is_held_out=False, weight=1.0):
    return [(content, True, is_held_out, weight) for content in contents]


def test_documents_are_joined_with_an_end_between_them_and_cut_into_full_rows():
    train, held_out, rows = write(documents([1, 2, 3], [4, 5], [6, 7, 8]))
    assert train == [[1, 2, 3, EOS], [4, 5, EOS, 6]]
    assert held_out == []
    assert rows.num_dropped_tokens == 3  # 7, 8 and the end


def test_a_document_that_comes_in_stretches_is_one():
    assert write([([1, 2], True, False, 1.0), ([3], False, False, 1.0)])[0] == [[1, 2, 3, EOS]]


def test_a_document_that_ends_with_the_end_token_gets_no_second_one():
    train, _, rows = write(documents([1, EOS], [2, EOS]))
    assert (train, rows.num_dropped_tokens) == ([[1, EOS, 2, EOS]], 0)


def test_an_empty_document_after_another_still_has_its_end():
    assert write(documents([1, 2], []))[0] == [[1, 2, EOS, EOS]]


def test_a_prefix_opens_every_document():
    train, _, _ = write(documents([1], [2]), seq_len=6, prefix=(9,))
    assert train == [[9, 1, EOS, 9, 2, EOS]]


def test_sides_never_share_a_row():
    train, held_out, _ = write(
        [
            *documents([1, 2]),
            *documents([3, 4], is_held_out=True),
            *documents([5, 6]),
            *documents([7], is_held_out=True),
        ],
        seq_len=3,
    )
    assert train == [[1, 2, EOS], [5, 6, EOS]]
    assert held_out == [[3, 4, EOS]]


def test_without_packing_a_row_is_a_document():
    train, _, rows = write(documents([1], [2, 3], [4, 5, 6, 7, 8]), is_packed=False)
    assert train == [[1, EOS], [2, 3, EOS], [4, 5, 6, 7]]
    assert (rows.num_cut, rows.num_dropped_tokens) == (1, 2)


def test_without_packing_stretches_after_the_cut_are_dropped_too():
    units = [([1, 2, 3], True, False, 1.0), ([4, 5, 6], False, False, 1.0), ([7], False, False, 1.0)]
    train, _, rows = write(units, is_packed=False)
    assert train == [[1, 2, 3, 4]]
    assert (rows.num_cut, rows.num_dropped_tokens) == (1, 4)


def test_a_row_without_a_target_is_dropped():
    train, _, rows = write(documents([1], [2, 3]), is_packed=False, eos_id=None)
    assert train == [[2, 3]]
    assert rows.num_dropped_tokens == 1


@pytest.mark.parametrize(
    "weight, copies",
    [
        (1.0, [1] * 8),
        (3.0, [3] * 8),
        (0.5, [0, 1] * 4),
        (0.25, [0, 0, 0, 1] * 2),
        (2.5, [2, 3] * 4),
    ],
)
def test_a_weight_repeats_rows_and_takes_an_even_share_of_them(weight, copies):
    train, _, _ = write(documents(*([number] * 3 for number in range(1, 9)), weight=weight))
    assert [train.count([number] * 3 + [EOS]) for number in range(1, 9)] == copies


def test_weights_do_not_touch_held_out_rows():
    _, held_out, _ = write(documents([1, 2, 3], weight=0.001, is_held_out=True))
    assert held_out == [[1, 2, 3, EOS]]


def test_held_out_rows_are_packed_over_sources_of_any_weight():
    _, held_out, _ = write(
        [*documents([1, 1], weight=1.0, is_held_out=True), *documents([2], weight=2.0, is_held_out=True)], seq_len=5
    )
    assert held_out == [[1, 1, EOS, 2, EOS]]


def test_sources_of_different_weight_never_share_a_row():
    train, _, _ = write(
        [*documents([1, 1], weight=1.0), *documents([2, 2], weight=2.0), *documents([1, 1], weight=1.0)], seq_len=3
    )
    assert train == [[1, 1, EOS], [1, 1, EOS], [2, 2, EOS], [2, 2, EOS]]


def test_the_starts_of_documents_are_kept_over_rows_and_stretches():
    units = [([1, 2], True, False, 1.0), ([3, 4, 5], False, False, 1.0), *documents([6], [7, 8, 9, 1], [2])]
    _, _, rows, cut = write_with_starts(units)
    assert cut == [[[1, 2, 3, 4]], [[5, EOS], [6, EOS]], [[7, 8, 9, 1]]]
    assert rows.num_dropped_tokens == 3  # the end of the last but one, and the last with its own
    assert rows.num_starts == 3


def test_a_prefix_belongs_to_the_document_that_it_opens():
    assert write_with_starts(documents([1], [2]), seq_len=6, prefix=(9,))[3] == [[[9, 1, EOS], [9, 2, EOS]]]


def test_documents_of_two_weights_keep_their_own_starts():
    units = [*documents([1]), *documents([2], weight=2.0), *documents([3]), *documents([4], weight=2.0)]
    assert write_with_starts(units)[3] == [[[1, EOS], [3, EOS]], *[[[2, EOS], [4, EOS]]] * 2]


def test_tokens_without_an_end_are_documents_all_the_same_and_empty_ones_are_none():
    assert write_with_starts(documents([1, 2], [], [3], [4]), eos_id=None)[3] == [[[1, 2], [3], [4]]]


def test_without_packing_no_start_is_written():
    assert write_with_starts(documents([1], [2, 3]), is_packed=False)[2].num_starts == 0


def test_a_packed_row_in_which_every_document_is_one_token_is_dropped():
    _, _, rows, cut = write_with_starts(
        documents([1, 2, 3], [4], [5], [6], [7], [8], [9, 1, 2], [3]), seq_len=4, eos_id=None
    )
    assert cut == [[[1, 2, 3], [4]], [[9, 1, 2], [3]]]
    assert rows.num_dropped_tokens == 4


@given(contents=st.lists(st.lists(st.integers(1, 9), max_size=12), max_size=20), seq_len=st.integers(2, 9))
def test_documents_cut_at_rows_are_the_documents(contents, seq_len):
    """What the starts and the rows cut apart is every document with its end, but for what is dropped."""
    _, _, rows, cut = write_with_starts(documents(*contents), seq_len=seq_len)
    stream = [(number, token) for number, content in enumerate(contents) for token in [*content, EOS]]
    expected = []
    for first in range(0, len(stream) - len(stream) % seq_len, seq_len):
        row = stream[first : first + seq_len]
        parts = [[token for _, token in part] for _, part in groupby(row, key=lambda item: item[0])]
        if len(parts) < seq_len:
            expected.append(parts)
    assert cut == expected
    assert rows.num_dropped_tokens == len(stream) - seq_len * len(expected)


@given(contents=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), max_size=20), seq_len=st.integers(3, 9))
def test_packing_loses_nothing_but_the_counted_remainder(contents, seq_len):
    train, _, rows = write(documents(*contents), seq_len=seq_len)
    stream = [token for content in contents for token in [*content, EOS]]
    assert all(len(row) == seq_len for row in train)
    assert [token for row in train for token in row] == stream[: len(stream) - rows.num_dropped_tokens]
    assert rows.num_dropped_tokens < seq_len
