"""Flat ranges: no element lost, none twice, whoever wrote and whoever reads."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.trainer.runtime.checkpoint.manifest import Overlap, covered_in_order, overlap, share_of_rank
from shardwise.trainer.spec.errors import InputError


class Held(NamedTuple):
    start: int
    num_elements: int


SIZES = st.lists(st.tuples(st.integers(0, 50), st.sampled_from([1, 2, 4, 8])), max_size=8)


def test_shares_are_exactly_these() -> None:
    sizes = [(5, 4), (3, 2), (7, 4)]  # 20 + 6 + 28 = 54 bytes: cuts at 18 and 36, both inside an element
    assert [share_of_rank(sizes, rank=rank, world_size=3) for rank in range(3)] == [
        [(0, 0, 5)],
        [(1, 0, 3), (2, 0, 3)],
        [(2, 3, 4)],
    ]


@given(sizes=SIZES, world_size=st.integers(1, 9))
def test_shares_of_all_ranks_are_every_element_once(sizes: list[tuple[int, int]], world_size: int) -> None:
    seen = [
        (share.position, element)
        for rank in range(world_size)
        for share in share_of_rank(sizes, rank=rank, world_size=world_size)
        for element in range(share.start, share.start + share.num_elements)
    ]
    assert seen == [(position, element) for position, (count, _) in enumerate(sizes) for element in range(count)]


@given(sizes=SIZES, world_size=st.integers(1, 9))
def test_no_rank_writes_more_than_its_part_and_one_element(sizes: list[tuple[int, int]], world_size: int) -> None:
    total = sum(count * width for count, width in sizes)
    for rank in range(world_size):
        shares = share_of_rank(sizes, rank=rank, world_size=world_size)
        assert sum(share.num_elements * sizes[share.position][1] for share in shares) <= total / world_size + 8


@pytest.mark.parametrize(
    ("chunks", "sentence"),
    [
        ([], "elements 0 to 9 of 10 are missing"),
        ([(0, 4), (5, 5)], "elements 4 to 4 of 10 are missing"),
        ([(2, 8)], "elements 0 to 1 of 10 are missing"),
        ([(0, 4), (4, 3)], "elements 7 to 9 of 10 are missing"),
        ([(0, 6), (4, 6)], "elements 4 to 5 of 10 are there twice"),
        ([(0, 10), (0, 10)], "elements 0 to 9 of 10 are there twice"),
        ([(0, 4), (4, 8)], "elements 10 to 11 of 10 are too many"),
    ],
)
def test_holes_overlaps_and_overshoot_are_refused_with_their_place(
    chunks: list[tuple[int, int]], sentence: str
) -> None:
    with pytest.raises(InputError, match=f"^w: {sentence}$"):
        covered_in_order([Held(*chunk) for chunk in chunks], num_elements=10, what="w")


def test_chunks_come_back_in_order() -> None:
    chunks = [Held(6, 4), Held(0, 1), Held(1, 5)]
    assert covered_in_order(chunks, num_elements=10, what="w") == (Held(0, 1), Held(1, 5), Held(6, 4))


@pytest.mark.parametrize(
    ("start", "count", "expected"),
    [
        (0, 30, Overlap(in_chunk=0, in_wanted=10, num_elements=5)),
        (12, 2, Overlap(in_chunk=2, in_wanted=0, num_elements=2)),
        (14, 9, Overlap(in_chunk=4, in_wanted=0, num_elements=1)),
        (15, 3, None),
        (7, 3, None),
    ],
)
def test_overlap_of_a_chunk_at_10_to_14(start: int, count: int, expected: Overlap | None) -> None:
    assert overlap(Held(10, 5), start=start, num_elements=count) == expected
