"""Rows out of a stream of ids: what is packed, cut, dropped and repeated, token by token."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.runtime.row_writer import RowShape, RowWriter

EOS = 0


def write(units, *, seq_len=4, is_packed=True, eos_id=EOS, prefix=()):
    """(train rows, held-out rows, Rows) of units (ids, opens_document, is_held_out, weight)."""
    stream = io.BytesIO()
    shape = RowShape(seq_len=seq_len, is_packed=is_packed, eos_id=eos_id, document_prefix=prefix)
    writer = RowWriter(stream, np.dtype("<u2"), shape)
    for ids, opens_document, is_held_out, weight in units:
        writer.add(ids, opens_document=opens_document, is_held_out=is_held_out, weight=weight)
    rows = writer.finish()
    tokens = np.frombuffer(stream.getvalue(), "<u2")
    assert len(tokens) == rows.num_tokens
    train, held_out = (
        [tokens[start : start + length].tolist() for start, length in table] for table in (rows.train, rows.held_out)
    )
    return train, held_out, rows


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


@given(contents=st.lists(st.lists(st.integers(1, 9), max_size=12), max_size=20), seq_len=st.integers(2, 9))
def test_packing_loses_nothing_but_the_counted_remainder(contents, seq_len):
    train, _, rows = write(documents(*contents), seq_len=seq_len)
    stream = [token for content in contents for token in [*content, EOS]]
    assert all(len(row) == seq_len for row in train)
    assert [token for row in train for token in row] == stream[: len(stream) - rows.num_dropped_tokens]
    assert rows.num_dropped_tokens < seq_len
