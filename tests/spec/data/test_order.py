"""The order of rows: each once in every epoch, grouped by length or not, and the same for every reader."""

from collections import Counter
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.trainer.spec.data.order import WINDOW_STEPS, DataOrder, permuted

ORDER_OF_12 = [0, 9, 7, 2, 6, 10, 5, 3, 1, 8, 11, 4]
ORDER_OF_12_SEED_1 = [11, 6, 1, 3, 0, 2, 4, 10, 8, 7, 5, 9]
ORDER_OF_12_EPOCH_1 = [0, 3, 10, 8, 6, 7, 2, 1, 9, 11, 4, 5]
GROUPED_OF_12 = [  # of the lengths 3, 9, 4, 4, 8, 1, 7, 2, 6, 5, 12, 10; two epochs of four steps
    *([10, 11, 1], [0, 7, 5], [4, 6, 8], [9, 2, 3]),
    *([4, 6, 8], [9, 3, 2], [10, 11, 1], [0, 7, 5]),
]


def order(num_rows, *, seed=0, epoch=0):
    return [permuted(position, num_rows=num_rows, seed=seed, epoch=epoch) for position in range(num_rows)]


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
    grouped = order_of([3, 9, 4, 4, 8, 1, 7, 2, 6, 5, 12, 10], sequences_per_step=3)
    assert [grouped.rows_of_step(step) for step in range(8)] == GROUPED_OF_12


def test_epochs_and_seeds_differ_and_neighbours_on_disk_are_not_neighbours_in_the_order():
    orders = {tuple(order(50, seed=seed, epoch=epoch)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400
    gaps = Counter(after - before for before, after in pairwise(order(10_000)))
    assert max(gaps.values()) < 10


@pytest.mark.parametrize("num_rows", [2, 3, 5, 8, 13])
def test_every_row_is_equally_likely_at_every_position(num_rows):
    epochs, places = 4000, range(num_rows)
    counts = Counter(place for epoch in range(epochs) for place in enumerate(order(num_rows, epoch=epoch)))
    expected = epochs / num_rows
    deviations = [(counts[place] - expected) ** 2 / expected for place in product(places, places)]
    degrees_of_freedom = (num_rows - 1) ** 2
    assert sum(deviations) < degrees_of_freedom + 5 * (2 * degrees_of_freedom) ** 0.5


@pytest.mark.parametrize("position, num_rows", [(-1, 5), (5, 5), (0, 0)])
def test_a_position_that_is_not_there_is_refused(position, num_rows):
    with pytest.raises(ValueError, match="rows"):
        permuted(position, num_rows=num_rows, seed=0, epoch=0)


def order_of(lengths, *, sequences_per_step, seed=0, is_grouped=True):
    return DataOrder(
        lengths.__getitem__, num_rows=len(lengths), longest=lengths.index(max(lengths)) if lengths else 0, seed=seed,
        sequences_per_step=sequences_per_step, is_grouped=is_grouped,
    )  # fmt: skip


lengths_of_rows = st.lists(st.integers(1, 50), min_size=1, max_size=120)


@given(lengths=lengths_of_rows, sequences_per_step=st.integers(1, 9), seed=st.integers(0, 2**40), grouped=st.booleans())
def test_every_row_comes_exactly_once_in_each_epoch_that_steps_end_with(lengths, sequences_per_step, seed, grouped):
    """As many epochs as there are sequences a step: each starts elsewhere in a step, and all of them end with one."""
    order = order_of(lengths, sequences_per_step=sequences_per_step, seed=seed, is_grouped=grouped)
    seen: Counter[int] = Counter()
    for step in range(len(lengths)):
        rows = order.rows_of_step(step)
        assert len(rows) == sequences_per_step
        seen.update(rows)
    assert seen == Counter(dict.fromkeys(range(len(lengths)), sequences_per_step))


@given(lengths=lengths_of_rows, sequences_per_step=st.integers(1, 9), seed=st.integers(0, 2**40), grouped=st.booleans())
def test_no_row_comes_twice_in_an_epoch_and_steps_start_with_their_longest(lengths, sequences_per_step, seed, grouped):
    """The first of all with a longest row; a step may be shared by two epochs."""
    order = order_of(lengths, sequences_per_step=sequences_per_step, seed=seed, is_grouped=grouped)
    num_rows = len(lengths)
    seen: Counter[int] = Counter()
    assert lengths[order.rows_of_step(0)[0]] == max(lengths)
    for step in range(max(5, 3 * num_rows // sequences_per_step)):
        rows = order.rows_of_step(step)
        of_step = [lengths[row] for row in rows]
        assert of_step == sorted(of_step, reverse=True)
        seen.update(rows)
        done, rest = divmod((step + 1) * sequences_per_step, num_rows)
        assert set(seen.values()) <= ({done, done + 1} if rest else {done})
        assert sum(count > done for count in seen.values()) == rest


@given(lengths=lengths_of_rows, sequences_per_step=st.integers(1, 9), step=st.integers(0, 200), grouped=st.booleans())
def test_a_step_is_the_same_whatever_was_asked_before(lengths, sequences_per_step, step, grouped):
    orders = [order_of(lengths, sequences_per_step=sequences_per_step, is_grouped=grouped) for _ in range(2)]
    for earlier in range(step % 7):
        orders[0].rows_of_step(step + 70 - 13 * earlier)
    assert orders[0].rows_of_step(step) == orders[1].rows_of_step(step)


def test_rows_of_one_length_come_in_the_order_of_the_permutation_with_the_longest_first():
    """What earlier versions did with packed rows, all of them full; a longest changes places in the first epoch."""
    packed = order_of([7] * 12, sequences_per_step=3, is_grouped=False)
    assert [row for step in range(8) for row in packed.rows_of_step(step)] == ORDER_OF_12 + ORDER_OF_12_EPOCH_1
    one_longer = order_of([7] * 5 + [8] + [7] * 6, sequences_per_step=1, is_grouped=False)
    first = [{0: 5, 5: 0}.get(row, row) for row in ORDER_OF_12]
    assert [one_longer.rows_of_step(step)[0] for step in range(24)] == first + ORDER_OF_12_EPOCH_1


def test_a_step_holds_rows_of_like_length():
    """A window of 64 steps over lengths up to 1000: the rows of a step differ by a sixty-fourth, and a bit more."""
    lengths = [Random(row).randrange(1, 1001) for row in range(64 * 32)]
    order_of_rows = order_of(lengths, sequences_per_step=32)

    def spread(rows: DataOrder, step: int) -> int:
        of_step = [lengths[row] for row in rows.rows_of_step(step)]
        return of_step[0] - of_step[-1]

    assert max(spread(order_of_rows, step) for step in range(WINDOW_STEPS)) < 50
    assert spread(order_of(lengths, sequences_per_step=32, is_grouped=False), 1) > 500


def test_the_steps_of_a_window_are_shuffled_differently_in_each_window_and_epoch():
    """Four windows of 64 steps each: no two have their steps in the same order of length, and none is sorted."""
    lengths = [Random(row).randrange(1, 1001) for row in range(4 * 64 * 4)]
    order_of_rows = order_of(lengths, sequences_per_step=4)
    windows = []
    for first in range(0, 8 * 64, 64):
        longest = [lengths[order_of_rows.rows_of_step(first + step)[0]] for step in range(64)]
        windows.append(tuple(sorted(range(64), key=[-length for length in longest].__getitem__)))
    assert len(set(windows)) == 8
    assert all(sum(place == step for place, step in enumerate(window)) < 10 for window in windows)


@pytest.mark.parametrize("step, num_rows, sequences_per_step", [(-1, 5, 1), (0, 0, 1), (0, 5, 0)])
def test_a_step_that_is_not_there_is_refused(step, num_rows, sequences_per_step):
    with pytest.raises(ValueError, match="step"):
        order_of(list(range(num_rows)), sequences_per_step=sequences_per_step).rows_of_step(step)
