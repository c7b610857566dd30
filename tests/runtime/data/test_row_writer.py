"""Rows out of a stream of ids: what is packed, cut, dropped, masked and repeated, token by token."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenRows
from shardwise.trainer.runtime.data.row_writer import RowShape, RowWriter, best_fit_rows
from shardwise.trainer.runtime.data.sources import TokenIds

EOS = 0


@pytest.fixture
def write(tmp_path):
    """Writes units (ids, opens_document, is_held_out, weight[, is_learned]) or pairs, and reads them again."""

    def written(units, *, seq_len=4, is_packed=True, eos_id=EOS, prefix=(), dtype="<u2"):
        shape = RowShape(seq_len=seq_len, is_packed=is_packed, eos_id=eos_id, document_prefix=prefix)
        with RowWriter(tmp_path, np.dtype(dtype), shape) as writer:
            for ids, opens_document, is_held_out, weight, *mask in units:
                writer.add(
                    ids, opens_document=opens_document, is_held_out=is_held_out, weight=weight,
                    is_learned=mask[0] if mask else None,
                )  # fmt: skip
            return Written(tmp_path, writer.finish())

    return written


class Written:
    def __init__(self, folder, rows):
        self.rows = rows
        self.splits = {split: TokenRows.open(folder, split) for split in ("train", "eval")}
        self.train, self.held_out = (
            [split.row(n).tolist() for n in range(len(split) * split.layout.rows_per_example)]
            for split in self.splits.values()
        )
        split = self.splits["train"]
        numbers = range(len(self.train))
        starts = [split.document_starts(n) for n in numbers]
        self.cut = [[part.tolist() for part in np.split(split.row(n), starts[n])] for n in numbers]  # into documents
        self.learned = [[label for label in split.labels(n).tolist() if label != IGNORED_LABEL] for n in numbers]


def documents(*contents, is_held_out=False, weight=1.0):
    return [(content, True, is_held_out, weight) for content in contents]


def masked(ids, mask):
    return (ids, True, False, 1.0, [mark == "x" for mark in mask])


@pytest.mark.parametrize(
    ("contents", "settings", "cut"),
    [
        # of 2, 3, 2 and 3 tokens with their ends: the longest first, each into the fullest row with room
        ([[1], [2, 3], [4], [5, 6]], {"seq_len": 5}, [[[1, EOS], [2, 3, EOS]], [[4, EOS], [5, 6, EOS]]]),
        ([[1, EOS], [2, EOS]], {}, [[[1, EOS], [2, EOS]]]),  # no second end
        ([[1, 2], []], {}, [[[1, 2, EOS]]]),
        ([[1], [2]], {"seq_len": 6, "prefix": (9,)}, [[[9, 1, EOS], [9, 2, EOS]]]),
        ([[1, 2], [], [3, 4]], {"eos_id": None}, [[[1, 2], [3, 4]]]),
        ([[1], [2, 3]], {"eos_id": None, "is_packed": False}, [[[2, 3]]]),  # one token has no target
        ([[1], [2, 3]], {"is_packed": False}, [[[1, EOS]], [[2, 3, EOS]]]),
        ([], {}, []),
    ],
)
def test_documents_are_packed_whole_each_with_its_prefix_and_one_end(write, contents, settings, cut):
    found = write(documents(*contents), **settings)
    assert (found.cut, found.held_out) == (cut, [])
    assert found.rows.num_starts == (0 if settings.get("is_packed") is False else sum(map(len, cut)))


def test_stretches_of_both_sides_alternate_and_never_share_a_row(write):
    units = [([1, 2], True, False, 1.0), ([7], True, True, 1.0), ([3, 4], False, False, 1.0), ([8], False, True, 1.0)]
    found = write([*units, *documents([5, 6]), *documents([7], is_held_out=True)], seq_len=8)
    assert found.train == [[1, 2, 3, 4, EOS, 5, 6, EOS]]
    assert found.held_out == [[7, 8, EOS, 7, EOS]]


@pytest.mark.parametrize(
    "weight, copies", [(1.0, [1] * 8), (3.0, [3] * 8), (0.25, [0, 0, 0, 1] * 2), (2.5, [2, 3] * 4)]
)
def test_a_weight_repeats_rows_and_takes_an_even_share_of_them(write, weight, copies):
    found = write(documents(*([number] * 3 for number in range(1, 9)), weight=weight))
    assert [found.train.count([number] * 3 + [EOS]) for number in range(1, 9)] == copies
    assert found.rows.num_targets == 3 * sum(copies)


def test_sources_of_different_weight_share_a_row_only_where_they_are_held_out(write):
    contents = [([1, 1], 1.0), ([2, 2], 2.0), ([1, 1], 1.0)]
    units = [unit for ids, weight in contents for unit in documents(ids, weight=weight)]
    units += [unit for ids, weight in contents for unit in documents(ids, weight=weight / 100, is_held_out=True)]
    found = write(units, seq_len=9)
    assert found.cut == [[[1, 1, EOS], [1, 1, EOS]], [[2, 2, EOS]], [[2, 2, EOS]]]
    assert found.held_out == [[1, 1, EOS, 2, 2, EOS, 1, 1, EOS]]


def test_a_prefix_before_a_mask_is_not_learned_and_data_that_is_learned_whole_has_no_mask(write, tmp_path):
    assert not write([masked([1, 2, 3], ".xx"), *documents([4, 5])], seq_len=9).rows.is_masked
    names = {"tokens.bin", "starts.bin", "train_rows.npy", "eval_rows.npy", "layout.json"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert write([masked([1, 2, 3], "..x"), *documents([4, 5])]).rows.is_masked
    assert {path.name for path in tmp_path.iterdir()} == {*names, "learned.bin"}
    assert write([masked([1], "x")], prefix=(8, 9), seq_len=9).learned == [[1, EOS]]
    assert write(documents([1]), prefix=(8, 9), seq_len=9).learned == [[9, 1, EOS]]


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
    units, dropped, num_cut = [], 0, 0
    for pairs, has_mask in contents:
        ids, mask = [token for token, _ in pairs], [is_learned for _, is_learned in pairs]
        units.append((ids, True, False, 1.0, *([mask] if has_mask else [])))
        whole = [*zip(ids, mask if has_mask else [True] * len(ids), strict=True), (EOS, True)]
        for first in range(0, len(whole), seq_len) if is_packed else [0]:
            piece = whole[first : first + seq_len]
            learned = tuple(token for token, is_learned in piece[1:] if is_learned)
            if learned:
                expected[tuple(token for token, _ in piece), learned] += 1
                num_cut += not is_packed and len(whole) > seq_len
            else:
                dropped += len(piece)
        dropped += 0 if is_packed else max(0, len(whole) - seq_len)
    found = write(units, seq_len=seq_len, is_packed=is_packed, dtype=dtype)
    assert pieces_of(found.splits["train"]) == expected
    assert (found.rows.num_dropped_tokens, found.rows.num_cut) == (dropped, num_cut)
    assert found.rows.num_targets == sum(len(learned) * count for (_, learned), count in expected.items())
    assert all(len(row) <= seq_len for row in found.train)
    room = max(1, len(found.train) * seq_len)
    assert found.rows.packing_efficiency == pytest.approx(sum(map(len, found.train)) / room)


def pieces_of(split):
    """How often each document stands in the rows, with the tokens of it that are learned."""
    pieces: Counter[object] = Counter()
    for number in range(len(split)):
        starts = split.document_starts(number)
        for ids, labels in zip(
            np.split(split.row(number), starts), np.split(split.labels(number), starts), strict=True
        ):
            assert labels[0] == IGNORED_LABEL
            retained = labels != IGNORED_LABEL
            assert (labels[retained] == ids[retained]).all()
            pieces[tuple(ids.tolist()), tuple(ids[retained].tolist())] += 1
        assert split.num_targets(number) == (split.labels(number) != IGNORED_LABEL).sum()
    return pieces


@pytest.mark.parametrize("is_packed", [False, True])
def test_stretches_of_a_document_never_change_what_is_written(write, tmp_path, is_packed):
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
        rows = write(units, seq_len=24, is_packed=is_packed).rows
        files.append(({path.name: path.read_bytes() for path in tmp_path.iterdir()}, rows.num_cut))
    assert files[0] == files[1] == files[2]


def write_pairs(folder, *pairs):
    shape = RowShape(seq_len=6, is_packed=False, eos_id=None, rows_per_example=2)
    with RowWriter(folder, np.dtype("<u2"), shape) as writer:
        for chosen, rejected, is_held_out, weight in pairs:
            answers = (TokenIds(ids, [mark == "x" for mark in mask]) for ids, mask in (chosen, rejected))
            writer.add_pair(*answers, is_held_out=is_held_out, weight=weight)
        return Written(folder, writer.finish())


def test_a_pair_is_two_rows_that_stay_together_over_weights_and_sides_dropped_whole_and_cut_once(tmp_path):
    pairs = [(([n, 10 + n, 20 + n], ".xx"), ([n, 30 + n], ".x"), n == 2, 1.5) for n in range(1, 6)]
    found = write_pairs(tmp_path, *pairs)
    as_pairs = [found.train[n : n + 2] for n in range(0, len(found.train), 2)]
    assert as_pairs == [[[n, 10 + n, 20 + n], [n, 30 + n]] for n in (1, 3, 4, 5, 3, 5)]
    assert found.held_out == [[2, 12, 22], [2, 32]]
    assert [len(split) for split in found.splits.values()] == [6, 1]
    assert found.rows.num_targets == 6 * 3
    long = ([1] * 9, "." * 5 + "xxxx")
    answers = [
        (([1, 2, 3], "..."), ([1, 4], ".x")), (([1, 2], ".x"), ([1], "x")), (([1, 2], ".x"), ([1, 5], ".x")),
        (long, long),
    ]  # fmt: skip
    found = write_pairs(tmp_path, *((*each, False, 1.0) for each in answers))
    assert found.train == [[1, 2], [1, 5], [1] * 6, [1] * 6]
    assert (found.rows.num_cut, found.rows.num_dropped_tokens) == (1, 8 + 6)


def best_fit_decreasing_one_by_one(lengths, capacity):
    """The fills of the rows as the algorithm is defined: each document into the fullest row that has room."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [n for n, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(capacity)
            fitting = [len(rooms) - 1]
        rooms[min(fitting, key=lambda n: rooms[n])] -= length
    return sorted(capacity - room for room in rooms)


@given(data=st.data(), capacity=st.integers(1, 40))
def test_rows_are_those_of_best_fit_decreasing(data, capacity):
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=120))
    rows = best_fit_rows(np.array(lengths), capacity).tolist()
    assert sorted(np.bincount(rows, lengths)) == best_fit_decreasing_one_by_one(lengths, capacity)
    first_documents = [rows.index(row) for row in range(max(rows) + 1)]
    assert first_documents == sorted(first_documents)
    assert best_fit_rows(np.array([], np.int64), capacity).tolist() == []
