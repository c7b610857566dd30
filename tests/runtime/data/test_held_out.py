"""The split: decided by content, near the requested share, and never empty where that is possible."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_request_factory import listed_request, numbered_text

from shardwise.trainer.runtime.data.prepare import prepare
from shardwise.trainer.runtime.data.sources import Chat, Completion, Preference, TokenIds
from shardwise.trainer.runtime.data.sources.scan import Block, Split, SplitSearch, content_hash, units
from shardwise.trainer.spec.job.sources import DataSource


def blocks_of(*documents):
    return [Block(document, 1.0, opens_document=True, where="") for document in documents]


def split_of(blocks, share):
    search = SplitSearch(share)
    for block in blocks:
        search.add(block)
    return search.split()


def held_out_of(blocks, split):
    return [unit.content for unit in units(iter(blocks), split) if unit.is_held_out]


MANY = [numbered_text(3, word=f"document {number}") for number in range(3000)]
HELD_OUT = [42, 44, 56, 62, 86]  # of the first ninety


@pytest.mark.parametrize(
    "content_of",
    [
        lambda number: MANY[number],
        lambda number: TokenIds([number, number + 1, 7]),
        lambda number: Chat([{"role": "user", "content": f"question {number} " * 20}]),
    ],
)
def test_of_many_a_tenth_is_held_out_each_as_a_whole(content_of):
    contents = [content_of(number) for number in range(2000)]
    split = split_of(blocks_of(*contents), 0.1)
    assert split.piece_chars is None
    held_out = held_out_of(blocks_of(*contents), split)
    assert 120 < len(held_out) < 280 and all(content in contents for content in held_out)


def test_order_and_company_do_not_move_a_document_and_copies_are_on_one_side():
    alone = split_of(blocks_of(*MANY), 0.1)
    shuffled = random.Random(0).sample(MANY, len(MANY))
    more = [numbered_text(3, word=f"new {number}") for number in range(1000)]
    blocks = blocks_of(*shuffled, *more, *shuffled)
    together = Counter(held_out_of(blocks, split_of(blocks, 0.1)))
    expected = Counter(held_out_of(blocks_of(*MANY), alone) * 2)
    assert Counter({text: count for text, count in together.items() if text in MANY}) == expected


def test_the_split_is_the_one_that_earlier_runs_had():
    split = Split(threshold=2**64 // 10)
    assert [number for number in range(90) if held_out_of(blocks_of(MANY[number]), split)] == HELD_OUT


@pytest.mark.parametrize("share", [1e-9, 0.5, 1 - 1e-9])
def test_two_pieces_are_enough_for_both_sides(share):
    blocks = blocks_of(numbered_text(100), numbered_text(90))
    split = split_of(blocks, share)
    sides = {unit.is_held_out for unit in units(iter(blocks), split)}
    assert sides == {True, False}


def test_a_document_in_blocks_opens_again_on_the_other_side_alone():
    contents = [f"{number}\n" for number in range(60)]
    blocks = [Block(content, 1.0, opens_document=content == "0\n", where="") for content in contents]
    found = list(units(iter(blocks), Split(threshold=2**63)))
    assert {unit.is_held_out for unit in found} == {True, False}
    assert found[0].opens_document
    for before, after in pairwise(found):
        assert after.opens_document is (before.is_held_out is not after.is_held_out)


@given(texts=st.lists(st.text(min_size=1, max_size=300), min_size=1, max_size=8), piece_chars=st.integers(1, 50))
def test_no_character_is_lost_or_moved(texts, piece_chars):
    split = Split(threshold=2**63, piece_chars=piece_chars)
    assert "".join(str(unit.content) for unit in units(iter(blocks_of(*texts)), split)) == "".join(texts)


def test_an_example_is_known_by_what_is_said_whatever_the_order_of_its_keys():
    one = Chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    other = Chat([{"content": "a", "role": "user"}, {"content": "b", "role": "assistant"}])
    assert content_hash(one) == content_hash(other)
    different = (Chat(one.messages[::-1]), Completion("a", "b"), Preference("a", "b", "c"), "ab", TokenIds([1, 2]))
    assert len({content_hash(content) for content in (one, *different)}) == 6


def test_held_out_rows_that_are_learned_are_counted_and_left_out_on_request(tmp_path):
    """Of 40 rows of a source of its own ten are training rows; one of these is there twice."""
    lines = [f'{{"text": "{numbered_text(2, word=f"line {number}").strip()!r}"}}' for number in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:100], lines[95]]))
    (tmp_path / "b.jsonl").write_text("\n".join(lines[90:130]))
    source = DataSource(source=str(tmp_path / "b.jsonl"))
    settings = {"cache_root": tmp_path / "cache", "eval_source": source.source, "packing": False, "seq_len": 64}
    learned, dropped = (
        prepare(listed_request(tmp_path / "a.jsonl", drop_copies=drops, **settings), lambda line: None)
        for drops in (False, True)
    )
    assert (learned.num_rows, learned.num_eval_rows, learned.num_eval_copies) == (101, 40, 10)
    assert any(note.startswith("10 of 40 held-out rows are also in data.train") for note in learned.notes)
    assert (dropped.num_rows, dropped.num_eval_rows, dropped.num_eval_copies) == (90, 40, 0)
    assert any("11 rows of data.train are also in data.eval" in note for note in dropped.notes)
    assert learned.fingerprint != dropped.fingerprint
