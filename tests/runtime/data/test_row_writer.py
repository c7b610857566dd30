"""Rows out of a stream of ids: what is packed, cut, dropped, masked and repeated, token by token."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.trainer.runtime.data.row_writer import RowShape, RowWriter
from shardwise.trainer.runtime.data.sources.examples import TokenIds
from shardwise.trainer.runtime.data.token_rows import IGNORED_LABEL, TokenRows

EOS = 0


@pytest.fixture
def write(tmp_path):
    """Writes units (ids, opens_document, is_held_out, weight[, is_learned]) or pairs, and reads them again."""

    def written(units, *, seq_len=4, is_packed=True, eos_id=EOS, prefix=(), dtype="<u2"):
        shape = RowShape(seq_len=seq_len, is_packed=is_packed, eos_id=eos_id, document_prefix=prefix)
        with RowWriter(tmp_path, np.dtype(dtype), shape) as writer:
            for ids, opens_document, is_held_out, weight, *mask in units:
                writer.add(
                    ids,
                    opens_document=opens_document,
                    is_held_out=is_held_out,
                    weight=weight,
                    is_learned=mask[0] if mask else None,
                )
            return Written(tmp_path, writer.finish())

    return written


class Written:
    """What was written, and its rows as training reads them, cut into documents where that is asked."""

    def __init__(self, folder, rows):
        self.rows = rows
        self.splits = {split: TokenRows.open(folder, split) for split in ("train", "eval")}
        self.train, self.held_out = (
            [split.row(n).tolist() for n in range(len(split) * split.layout.rows_per_example)]
            for split in self.splits.values()
        )
        split = self.splits["train"]
        self.cut = [
            [part.tolist() for part in np.split(split.row(n), split.document_starts(n))] for n in range(len(self.train))
        ]
        self.learned = [
            [label for label in split.labels(n).tolist() if label != IGNORED_LABEL] for n in range(len(self.train))
        ]


def documents(*contents, is_held_out=False, weight=1.0):
    return [(content, True, is_held_out, weight) for content in contents]


def masked(ids, mask, *, opens_document=True):
    return (ids, opens_document, False, 1.0, [mark == "x" for mark in mask])


def test_documents_are_packed_whole_in_the_order_they_came(write):
    """Of 2, 3, 2 and 3 tokens with their ends: the longest first, each into the fullest row with room."""
    found = write(documents([1], [2, 3], [4], [5, 6]), seq_len=5)
    assert found.cut == [[[1, EOS], [2, 3, EOS]], [[4, EOS], [5, 6, EOS]]]
    assert found.held_out == []
    assert found.rows.num_dropped_tokens == 0
    assert found.rows.packing_efficiency == 1


def test_a_row_may_end_short(write):
    found = write(documents([1, 2, 3], [4, 5], [6, 7, 8]))
    assert found.train == [[1, 2, 3, EOS], [4, 5, EOS], [6, 7, 8, EOS]]
    assert found.rows.packing_efficiency == 11 / 12


def test_a_document_that_is_longer_than_a_row_is_full_rows_and_a_rest_that_is_packed(write):
    found = write(documents([1, 2], [3, 4, 5, 6, 7, 8, 9, 1, 2], [3]), seq_len=4)
    assert found.cut == [[[1, 2, EOS]], [[3, 4, 5, 6]], [[7, 8, 9, 1]], [[2, EOS], [3, EOS]]]
    assert found.rows.num_cut == 0


def test_a_rest_of_one_token_has_no_target_and_is_dropped(write):
    found = write(documents([1, 2, 3, 4], [5]))
    assert found.train == [[1, 2, 3, 4], [5, EOS]]
    assert found.rows.num_dropped_tokens == 1  # the end


def test_a_document_that_comes_in_stretches_is_one(write):
    assert write([([1, 2], True, False, 1.0), ([3], False, False, 1.0)]).cut == [[[1, 2, 3, EOS]]]


def test_stretches_of_both_sides_may_alternate(write):
    units = [([1, 2], True, False, 1.0), ([7], True, True, 1.0), ([3, 4], False, False, 1.0), ([8], False, True, 1.0)]
    found = write(units, seq_len=6)
    assert (found.train, found.held_out) == ([[1, 2, 3, 4, EOS]], [[7, 8, EOS]])


def test_a_document_that_ends_with_the_end_token_gets_no_second_one(write):
    found = write(documents([1, EOS], [2, EOS]))
    assert found.train == [[1, EOS, 2, EOS]]


def test_an_empty_document_has_nothing_to_learn(write):
    found = write(documents([1, 2], []))
    assert (found.train, found.rows.num_dropped_tokens) == ([[1, 2, EOS]], 1)


def test_a_prefix_opens_every_document(write):
    assert write(documents([1], [2]), seq_len=6, prefix=(9,)).cut == [[[9, 1, EOS], [9, 2, EOS]]]


def test_sides_never_share_a_row(write):
    units = [
        *documents([1, 2]),
        *documents([3, 4], is_held_out=True),
        *documents([5, 6]),
        *documents([7], is_held_out=True),
    ]
    found = write(units, seq_len=8)
    assert found.train == [[1, 2, EOS, 5, 6, EOS]]
    assert found.held_out == [[3, 4, EOS, 7, EOS]]


def test_without_packing_a_row_is_a_document(write):
    found = write(documents([1], [2, 3], [4, 5, 6, 7, 8]), is_packed=False)
    assert found.train == [[1, EOS], [2, 3, EOS], [4, 5, 6, 7]]
    assert (found.rows.num_cut, found.rows.num_dropped_tokens, found.rows.num_starts) == (1, 2, 0)


def test_without_packing_stretches_after_the_cut_are_dropped_too(write):
    units = [([1, 2, 3], True, False, 1.0), ([4, 5, 6], False, False, 1.0), ([7], False, False, 1.0)]
    found = write(units, is_packed=False)
    assert found.train == [[1, 2, 3, 4]]
    assert (found.rows.num_cut, found.rows.num_dropped_tokens) == (1, 4)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_document_without_a_target_is_dropped(write, is_packed):
    found = write(documents([1], [2, 3]), is_packed=is_packed, eos_id=None)
    assert found.train == [[2, 3]]
    assert found.rows.num_dropped_tokens == 1


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
def test_a_weight_repeats_rows_and_takes_an_even_share_of_them(write, weight, copies):
    found = write(documents(*([number] * 3 for number in range(1, 9)), weight=weight))
    assert [found.train.count([number] * 3 + [EOS]) for number in range(1, 9)] == copies
    assert found.rows.num_targets == 3 * sum(copies)


def test_weights_do_not_touch_held_out_rows(write):
    assert write(documents([1, 2, 3], weight=0.001, is_held_out=True)).held_out == [[1, 2, 3, EOS]]


def test_held_out_rows_are_packed_over_sources_of_any_weight(write):
    units = [*documents([1, 1], weight=1.0, is_held_out=True), *documents([2], weight=2.0, is_held_out=True)]
    assert write(units, seq_len=5).held_out == [[1, 1, EOS, 2, EOS]]


def test_sources_of_different_weight_never_share_a_row(write):
    units = [*documents([1, 1], weight=1.0), *documents([2, 2], weight=2.0), *documents([1, 1], weight=1.0)]
    found = write(units, seq_len=9)
    assert found.cut == [[[1, 1, EOS], [1, 1, EOS]], [[2, 2, EOS]], [[2, 2, EOS]]]


def test_tokens_without_an_end_are_documents_all_the_same_and_empty_ones_are_none(write):
    assert write(documents([1, 2], [], [3, 4]), eos_id=None).cut == [[[1, 2], [3, 4]]]


def test_only_what_a_mask_names_is_learned_and_never_a_first_token(write):
    found = write([masked([1, 2, 3, 4], "..xx"), masked([5, 6], "xx"), *documents([7])], seq_len=16)
    assert found.cut == [[[1, 2, 3, 4, EOS], [5, 6, EOS], [7, EOS]]]
    assert found.learned == [[3, 4, EOS, 6, EOS, EOS]]
    assert found.rows.is_masked
    assert found.splits["train"].num_targets(0) == found.rows.num_targets == 6


def test_the_mask_of_a_stretch_is_its_own(write):
    units = [masked([1, 2], ".."), masked([3, 4], "x.", opens_document=False), masked([5], "x", opens_document=False)]
    assert write(units, seq_len=9).learned == [[3, 5, EOS]]


def test_a_prefix_before_a_mask_is_not_learned(write):
    assert write([masked([1], "x")], prefix=(8, 9), seq_len=9).learned == [[1, EOS]]
    assert write(documents([1]), prefix=(8, 9), seq_len=9).learned == [[9, 1, EOS]]


def test_data_that_is_learned_whole_has_no_mask(write, tmp_path):
    found = write([masked([1, 2, 3], ".xx"), *documents([4, 5])], seq_len=9)
    assert not found.rows.is_masked
    assert not (tmp_path / "learned.bin").exists()
    assert found.splits["train"].num_targets(0) == 5


def test_a_piece_of_a_document_in_which_nothing_is_learned_is_dropped(write):
    found = write([masked([1, 2, 3, 4, 5, 6, 7], "......x")], seq_len=4)
    assert (found.train, found.learned) == ([[5, 6, 7, EOS]], [[7, EOS]])
    assert found.rows.num_dropped_tokens == 4


def test_a_row_whose_learned_part_was_cut_off_is_dropped(write):
    found = write([masked([1, 2, 3, 4, 5], "....x"), *documents([6])], is_packed=False)
    assert found.train == [[6, EOS]]
    assert (found.rows.num_cut, found.rows.num_dropped_tokens) == (0, 6)


def test_a_mask_of_another_length_than_the_ids_is_refused(write):
    with pytest.raises(ValueError, match="3 ids and a mask of 2"):
        write([masked([1, 2, 3], "xx")])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(
    contents=st.lists(
        st.tuples(st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=30), st.booleans()),
        max_size=30,
    ),
    seq_len=st.integers(2, 11),
)
def test_every_document_is_there_once_with_its_mask(write, is_packed, dtype, contents, seq_len):
    """Pieces of at most a row, each with what is learned of it; those with nothing are counted as dropped."""
    expected: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    units, dropped = [], 0
    for pairs, has_mask in contents:
        ids, mask = [token for token, _ in pairs], [is_learned for _, is_learned in pairs]
        units.append((ids, True, False, 1.0, *([mask] if has_mask else [])))
        whole = [*zip(ids, mask if has_mask else [True] * len(ids), strict=True), (EOS, True)]
        ends = range(0, len(whole), seq_len) if is_packed else [0]
        for first in ends:
            piece = whole[first : first + seq_len]
            learned = tuple(token for token, is_learned in piece[1:] if is_learned)
            if learned:
                expected[tuple(token for token, _ in piece), learned] += 1
            else:
                dropped += len(piece)
        dropped += 0 if is_packed else max(0, len(whole) - seq_len)
    found = write(units, seq_len=seq_len, is_packed=is_packed, dtype=dtype)
    assert pieces_of(found.splits["train"]) == expected
    assert found.rows.num_dropped_tokens == dropped
    assert found.rows.num_targets == sum(len(learned) * count for (_, learned), count in expected.items())
    assert all(len(row) <= seq_len for row in found.train)


def pieces_of(split):
    """How often each document stands in the rows, with the tokens of it that are learned."""
    pieces: Counter[object] = Counter()
    for number in range(len(split)):
        starts = split.document_starts(number)
        for ids, labels in zip(
            np.split(split.row(number), starts), np.split(split.labels(number), starts), strict=True
        ):
            assert labels[0] == IGNORED_LABEL
            kept = labels != IGNORED_LABEL
            assert (labels[kept] == ids[kept]).all()
            pieces[tuple(ids.tolist()), tuple(ids[kept].tolist())] += 1
        assert split.num_targets(number) == (split.labels(number) != IGNORED_LABEL).sum()
    return pieces


def test_many_documents_over_many_blocks_keep_their_tokens_and_masks(write):
    """More than the writer moves at once, and masks that begin late."""
    expected: tuple[Counter[object], Counter[object]] = (Counter(), Counter())
    units = []
    for number in range(3000):
        ids, is_held_out = [number % 251 + 1] * (number % 7 + 1), number % 5 == 0
        mask = [True] * (number % 7) + [False] if number > 900 else None
        units.append((ids, True, is_held_out, 1.0, *([] if mask is None else [mask])))
        learned = ids[1:] if mask is None else ids[1:-1]
        expected[is_held_out][(*ids, EOS), (*learned, EOS)] += 1
    found = write(units, seq_len=32)
    assert tuple(pieces_of(split) for split in found.splits.values()) == expected
    assert found.rows.packing_efficiency > 0.99


def test_rows_and_the_documents_in_them_are_in_the_order_they_came(write):
    lengths = np.random.default_rng(2).integers(1, 40, 2000)
    found = write(documents(*([n] * length for n, length in enumerate(lengths.tolist(), 1))), seq_len=40, dtype="<u4")
    numbers = [[document[0] for document in row] for row in found.cut]
    assert all(row == sorted(row) for row in numbers)
    assert [row[0] for row in numbers] == sorted(row[0] for row in numbers)
    assert sorted(number for row in numbers for number in row) == list(range(1, 2001))


@pytest.mark.parametrize("is_packed", [False, True])
def test_stretches_of_a_document_never_change_what_is_written(write, tmp_path, is_packed):
    """Whoever tokenises hands on what a batch or a process came to."""
    draw, contents = np.random.default_rng(4), []
    for _ in range(200):
        length = int(draw.integers(1, 60))
        contents.append((draw.integers(1, 200, length).tolist(), (draw.random(length) < 0.7).tolist()))
    files = []
    for stretch in (1, 7, 100):
        units = [
            (ids[first : first + stretch], first == 0, False, 1.0, mask[first : first + stretch])
            for ids, mask in contents
            for first in range(0, len(ids), stretch)
        ]
        write(units, seq_len=24, is_packed=is_packed)
        files.append({path.name: path.read_bytes() for path in tmp_path.iterdir()})
    assert files[0] == files[1] == files[2]


PAIR_SHAPE = RowShape(seq_len=6, is_packed=False, eos_id=None, rows_per_example=2)


def write_pairs(folder, *pairs, shape=PAIR_SHAPE):
    """Pairs of (ids, mask), each with its side and weight."""
    with RowWriter(folder, np.dtype("<u2"), shape) as writer:
        for chosen, rejected, is_held_out, weight in pairs:
            answers = (TokenIds(ids, [mark == "x" for mark in mask]) for ids, mask in (chosen, rejected))
            writer.add_pair(*answers, is_held_out=is_held_out, weight=weight)
        return Written(folder, writer.finish())


def test_a_pair_is_two_rows_that_stay_together_over_weights_and_sides(tmp_path):
    pairs = [(([n, 10 + n, 20 + n], ".xx"), ([n, 30 + n], ".x"), n == 2, 1.5) for n in range(1, 6)]
    found = write_pairs(tmp_path, *pairs)
    as_pairs = [found.train[n : n + 2] for n in range(0, len(found.train), 2)]
    assert as_pairs == [[[n, 10 + n, 20 + n], [n, 30 + n]] for n in (1, 3, 4, 5, 3, 5)]
    assert found.held_out == [[2, 12, 22], [2, 32]]
    assert [len(split) for split in found.splits.values()] == [6, 1]
    assert found.rows.num_targets == 6 * 3


def test_a_pair_of_which_one_answer_has_no_target_is_dropped_whole(tmp_path):
    found = write_pairs(
        tmp_path,
        (([1, 2, 3], "..."), ([1, 4], ".x"), False, 1.0),
        (([1, 2], ".x"), ([1], "x"), False, 1.0),
        (([1, 2], ".x"), ([1, 5], ".x"), False, 1.0),
    )
    assert found.train == [[1, 2], [1, 5]]
    assert found.rows.num_dropped_tokens == 8


def test_a_pair_that_is_too_long_is_cut_and_counted_once(tmp_path):
    long = ([1] * 9, "." * 5 + "xxxx")
    found = write_pairs(tmp_path, (long, long, False, 1.0))
    assert [len(row) for row in found.train] == [6, 6]
    assert (found.rows.num_cut, found.rows.num_dropped_tokens, found.rows.num_targets) == (1, 6, 2)


def test_pairs_are_never_packed_and_single_rows_are_no_pairs(tmp_path):
    with pytest.raises(ValueError, match="cannot be packed"):
        RowWriter(tmp_path, np.dtype("<u2"), PAIR_SHAPE._replace(is_packed=True))
    with pytest.raises(ValueError, match="a pair in a cache of 1 rows an example"):
        write_pairs(tmp_path, (([1, 2], ".x"), ([1], "x"), False, 1.0), shape=PAIR_SHAPE._replace(rows_per_example=1))


def test_nothing_is_a_cache_without_rows(write):
    found = write([])
    assert (found.train, found.held_out, found.rows.num_tokens) == ([], [], 0)


def test_what_is_written_while_it_works_leaves_no_file(write, tmp_path):
    write([masked([1, 2, 3], "..x"), *documents([4, 5])])
    names = {"tokens.bin", "starts.bin", "learned.bin", "train_rows.npy", "eval_rows.npy", "layout.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
