"""Flat ranges: no element missing, none twice, for any writer and any reader."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.trainer.runtime.checkpoint.manifest import Overlap, covered_in_order, overlap, share_of_rank
from shardwise.trainer.spec.errors import InputError


class Held(NamedTuple):
    start: int
    num_elements: int


def test_shares_are_exactly_these():
    sizes = [(5, 4), (3, 2), (7, 4)]  # 20 + 6 + 28 = 54 bytes: cuts at 18 and 36, both inside an element
    assert [share_of_rank(sizes, rank=rank, world_size=3) for rank in range(3)] == [
        [(0, 0, 5)],
        [(1, 0, 3), (2, 0, 3)],
        [(2, 3, 4)],
    ]


@given(
    sizes=st.lists(st.tuples(st.integers(0, 50), st.sampled_from([1, 2, 4, 8])), max_size=8),
    world_size=st.integers(1, 9),
)
def test_shares_of_all_ranks_are_every_element_once_and_of_even_size(sizes, world_size):
    total = sum(count * width for count, width in sizes)
    seen = []
    for rank in range(world_size):
        shares = share_of_rank(sizes, rank=rank, world_size=world_size)
        seen += [(each.position, each.start + index) for each in shares for index in range(each.num_elements)]
        assert sum(share.num_elements * sizes[share.position][1] for share in shares) <= total / world_size + 8
    assert seen == [(position, element) for position, (count, _) in enumerate(sizes) for element in range(count)]


@pytest.mark.parametrize(
    ("chunks", "place"),
    [
        ([], "0 to 9 of 10 are missing"),
        ([(0, 4), (5, 5)], "4 to 4 of 10 are missing"),
        ([(0, 4), (4, 3)], "7 to 9 of 10 are missing"),
        ([(0, 6), (4, 6)], "4 to 5 of 10 are there twice"),
        ([(0, 4), (4, 8)], "10 to 11 of 10 are too many"),
    ],
)
def test_holes_overlaps_and_overshoot_are_refused_with_their_place(chunks, place):
    with pytest.raises(InputError, match=f"^w: elements {place}$"):
        covered_in_order([Held(*chunk) for chunk in chunks], num_elements=10, what="w")


def test_chunks_come_back_in_order():
    chunks = [Held(6, 4), Held(0, 1), Held(1, 5)]
    assert covered_in_order(chunks, num_elements=10, what="w") == (Held(0, 1), Held(1, 5), Held(6, 4))


@pytest.mark.parametrize(
    ("start", "count", "expected"),
    [(0, 30, Overlap(0, 10, 5)), (12, 2, Overlap(2, 0, 2)), (14, 9, Overlap(4, 0, 1)), (15, 3, None), (7, 3, None)],
)
def test_overlap_of_a_chunk_at_10_to_14(start, count, expected):
    assert overlap(Held(10, 5), start=start, num_elements=count) == expected
