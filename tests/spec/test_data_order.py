"""The order of rows: a permutation in every epoch, different in each, and the same for everybody who asks."""

from collections import Counter
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.spec.data_order import permuted, row_of_sequence

SIZES = [*range(1, 40), 97, 101, 128, 255, 256, 257, 1000, 1009, 4096, 4097]
ORDER_OF_12 = [0, 9, 7, 2, 6, 10, 5, 3, 1, 8, 11, 4]
ORDER_OF_12_SEED_1 = [11, 6, 1, 3, 0, 2, 4, 10, 8, 7, 5, 9]
ORDER_OF_12_EPOCH_1 = [0, 3, 10, 8, 6, 7, 2, 1, 9, 11, 4, 5]


def order(num_rows, *, seed=0, epoch=0):
    return [permuted(position, num_rows=num_rows, seed=seed, epoch=epoch) for position in range(num_rows)]


@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_every_row_comes_once_an_epoch(num_rows, epoch):
    assert sorted(order(num_rows, seed=3, epoch=epoch)) == list(range(num_rows))


@given(num_rows=st.integers(1, 300), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
def test_every_seed_and_epoch_gives_a_permutation(num_rows, seed, epoch):
    assert sorted(order(num_rows, seed=seed, epoch=epoch)) == list(range(num_rows))


@given(num_rows=st.integers(10**6, 2**48), seed=st.integers(0, 2**32), data=st.data())
def test_rows_of_a_huge_data_set_are_found_without_a_table(num_rows, seed, data):
    first, second = (data.draw(st.integers(0, num_rows - 1)) for _ in range(2))
    rows = [permuted(position, num_rows=num_rows, seed=seed, epoch=0) for position in (first, second)]
    assert all(0 <= row < num_rows for row in rows)
    assert (rows[0] == rows[1]) == (first == second)


def test_the_order_is_the_one_that_earlier_runs_had():
    """A run that is resumed by a later version has to find its place again."""
    assert order(12) == ORDER_OF_12
    assert order(12, seed=1) == ORDER_OF_12_SEED_1
    assert order(12, epoch=1) == ORDER_OF_12_EPOCH_1


def test_epochs_and_seeds_differ_from_each_other():
    orders = {tuple(order(50, seed=seed, epoch=epoch)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_an_order_is_not_the_order_on_disk():
    for epoch in range(20):
        in_place = sum(position == row for position, row in enumerate(order(1000, epoch=epoch)))
        assert in_place < 10


@pytest.mark.parametrize("num_rows", [2, 3, 5, 8, 13])
def test_every_row_is_equally_likely_at_every_position(num_rows):
    epochs = 4000
    counts = Counter(
        (position, row) for epoch in range(epochs) for position, row in enumerate(order(num_rows, epoch=epoch))
    )
    expected = epochs / num_rows
    deviations = [
        (counts[position, row] - expected) ** 2 / expected for position in range(num_rows) for row in range(num_rows)
    ]
    degrees_of_freedom = (num_rows - 1) ** 2
    assert sum(deviations) < degrees_of_freedom + 5 * (2 * degrees_of_freedom) ** 0.5


def test_every_permutation_of_four_rows_is_equally_likely():
    epochs = 6000
    counts = Counter(tuple(order(4, epoch=epoch)) for epoch in range(epochs))
    assert counts.keys() == set(permutations(range(4)))
    assert sum((count - epochs / 24) ** 2 / (epochs / 24) for count in counts.values()) < 23 + 5 * 46**0.5


def test_neighbours_on_disk_are_not_neighbours_in_the_order():
    rows = order(10_000)
    gaps = Counter(after - before for before, after in pairwise(rows))
    assert max(gaps.values()) < 10


def test_sequences_run_through_one_epoch_after_another():
    rows = [row_of_sequence(sequence, seed=5, num_rows=7) for sequence in range(21)]
    assert rows == order(7, seed=5) + order(7, seed=5, epoch=1) + order(7, seed=5, epoch=2)


@pytest.mark.parametrize("position, num_rows", [(-1, 5), (5, 5), (0, 0)])
def test_a_position_that_is_not_there_is_refused(position, num_rows):
    with pytest.raises(ValueError, match="rows"):
        permuted(position, num_rows=num_rows, seed=0, epoch=0)


@pytest.mark.parametrize("sequence, num_rows", [(-1, 5), (0, 0)])
def test_a_sequence_that_is_not_there_is_refused(sequence, num_rows):
    with pytest.raises(ValueError, match="rows"):
        row_of_sequence(sequence, seed=0, num_rows=num_rows)
