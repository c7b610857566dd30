"""Documents in rows: none too full, as few as best-fit decreasing makes, and numbered as the documents come."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.trainer.runtime.data.row_writer import best_fit_rows


def rows_of(lengths, capacity):
    return best_fit_rows(np.array(lengths, np.int64), capacity).tolist()


def fills(lengths, capacity):
    rows = rows_of(lengths, capacity)
    return [sum(length for length, row in zip(lengths, rows, strict=True) if row == n) for n in range(max(rows) + 1)]


def best_fit_decreasing_one_by_one(lengths, capacity):
    """The fills of the rows as the algorithm is told: each document into the fullest row that has room."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [n for n, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(capacity)
            fitting = [len(rooms) - 1]
        rooms[min(fitting, key=lambda n: rooms[n])] -= length
    return sorted(capacity - room for room in rooms)


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([3, 3, 3], [0, 0, 1]),
        ([1, 8, 5, 3, 7], [0, 1, 2, 2, 0]),  # 7 + 1, 8, 5 + 3
        ([2, 2, 6, 4, 2], [0, 1, 0, 1, 1]),  # the 6 gets the first 2 and is full; 4 + 2 + 2
        ([4, 5, 3, 2], [0, 1, 1, 0]),  # 5 + 3, 4 + 2
        ([8, 8], [0, 1]),
        ([], []),
    ],
)
def test_the_longest_goes_into_the_fullest_row_that_has_room(lengths, rows):
    """Rows of 8, numbered in the order of their first documents."""
    assert rows_of(lengths, 8) == rows


@given(data=st.data(), capacity=st.integers(1, 40))
def test_rows_are_those_of_best_fit_decreasing(data, capacity):
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=120))
    assert sorted(fills(lengths, capacity)) == best_fit_decreasing_one_by_one(lengths, capacity)
    first_documents = [rows_of(lengths, capacity).index(row) for row in range(max(rows_of(lengths, capacity)) + 1)]
    assert first_documents == sorted(first_documents)


def test_text_wastes_next_to_nothing():
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1.2, 20_000), 2, 2048).astype(np.int64)
    assert lengths.sum() / ((best_fit_rows(lengths, 2048).max() + 1) * 2048) > 0.998


@pytest.mark.parametrize("lengths", [[5, 9], [0, 3]])
def test_a_length_that_no_row_holds_is_refused(lengths):
    with pytest.raises(ValueError, match="1 to 8"):
        rows_of(lengths, 8)
