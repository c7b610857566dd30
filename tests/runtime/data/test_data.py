"""What each rank gets: the same global batch in every arrangement, exactly once, with targets and lengths counted."""

from collections import Counter
from itertools import product
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prepare_request_factory import rows_of_lengths

from shardwise.trainer.runtime.data.batches import eval_micro_batches, step_micro_batches
from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenLayout, TokenRows, batch_widths, length_histogram
from shardwise.trainer.runtime.data.row_writer import RowShape, RowWriter
from shardwise.trainer.runtime.data.sources import TokenIds
from shardwise.trainer.spec.errors import EnvironmentFaultError

LENGTHS = (9, 2, 16, 5, 8, 3, 12)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return rows_of_lengths(tmp_path_factory.mktemp("rows"), LENGTHS, seq_len=16)


def row_numbers(micro_batch):
    """The rows in a micro batch, None for dummies; rows_of_lengths starts row i with token i + 1."""
    return [
        None if (labels == IGNORED_LABEL).all() else int(ids[0]) - 1
        for ids, labels in zip(micro_batch.input_ids, micro_batch.labels, strict=True)
    ]


class Deal(NamedTuple):
    """How the rows of a step are dealt: rows of a micro batch, micro batches of a rank, ranks."""

    micro_batch: int
    accumulation: int = 1
    num_ranks: int = 1

    @classmethod
    def of(cls, sequences: int, num_ranks: int, micro_batch: int, at_least: int = 1) -> "Deal":
        """With as many micro batches as so many sequences need."""
        return cls(micro_batch, max(at_least, -(-sequences // (num_ranks * micro_batch))), num_ranks)


def dealt(rows, deal, *, sequences, step=0, seed=11, rank=0):
    """The micro batches of a rank, and the targets that it names."""
    return step_micro_batches(rows, step=step, seed=seed, sequences_per_step=sequences, rank=rank, **deal._asdict())


def global_batch(rows, deal, *, step, sequences):
    """Row numbers of a step in the order they are dealt, dummies left out, and the targets that each rank names."""
    ranks = [dealt(rows, deal, step=step, sequences=sequences, rank=rank) for rank in range(deal.num_ranks)]
    batches = [batches for batches, _ in ranks]
    in_order = [number for rounds in zip(*batches, strict=True) for batch in rounds for number in row_numbers(batch)]
    return [number for number in in_order if number is not None], {targets for _, targets in ranks}, batches


arrangements = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(arrangement=arrangements, sequences=st.integers(1, 30), step=st.integers(0, 40))
def test_ranks_micro_batch_and_accumulation_never_change_the_global_batch(rows, arrangement, sequences, step):
    deal = Deal.of(sequences, *arrangement)
    numbers, named_targets, batches = global_batch(rows, deal, step=step, sequences=sequences)
    assert numbers == rows.order(seed=11, sequences_per_step=sequences).rows_of_step(step)
    assert named_targets == {sum(LENGTHS[number] - 1 for number in numbers)}
    assert sum(batch.num_targets for rank in batches for batch in rank) == named_targets.pop()
    assert all(len(rank) == deal.accumulation for rank in batches)


def test_labels_are_the_inputs_and_nothing_on_padding(rows):
    [batch], _ = dealt(rows, Deal(7), sequences=7)
    for place, number in enumerate(row_numbers(batch)):
        length = LENGTHS[number]
        assert batch.input_ids[place, :length].tolist() == rows.row(number).tolist()
        assert batch.labels[place, 1:length].tolist() == rows.row(number)[1:].tolist()
        assert batch.labels[place, 0] == IGNORED_LABEL
        assert (batch.labels[place, length:] == IGNORED_LABEL).all()
        assert (batch.input_ids[place, length:] == rows.layout.pad_id).all()
    assert batch.num_targets == int((batch.labels[:, 1:] != IGNORED_LABEL).sum()) == sum(LENGTHS) - 7
    row = rows.row(0)
    row[:] = 0
    assert rows.row(0).tolist()[0] == 1, "rows are copies of what is on disk"


@pytest.mark.parametrize(
    "lengths, seq_len, width",
    [((3,), 64, 8), ((8,), 64, 8), ((9, 2), 64, 16), ((10,), 10, 10), ((9,), 10, 10), ((2,), 5, 5)],
)
def test_width_is_a_multiple_of_eight_but_not_above_seq_len(tmp_path, lengths, seq_len, width):
    batch = only_micro_batch(rows_of_lengths(tmp_path, lengths, seq_len=seq_len), len(lengths))
    assert batch.input_ids.shape == batch.labels.shape == (len(lengths), width)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64


@pytest.mark.parametrize(("num_ranks", "micro_batch"), [(1, 5), (2, 2), (3, 1), (4, 5)])
@pytest.mark.parametrize("max_rows", [None, 4, 100])
def test_evaluation_sees_each_row_once_in_as_many_forwards_on_every_rank(rows, num_ranks, micro_batch, max_rows):
    ranks = [
        [*eval_micro_batches(rows, rank=rank, num_ranks=num_ranks, micro_batch=micro_batch, max_rows=max_rows)]
        for rank in range(num_ranks)
    ]
    seen = Counter(number for rank in ranks for batch in rank for number in row_numbers(batch))
    del seen[None]
    assert seen == Counter(range(min(7, max_rows or 7)))
    assert len({len(rank) for rank in ranks}) == 1


def packed_rows(*lengths_of_rows):
    """Packed rows of documents of these lengths; tokens count from 100."""
    num_tokens = sum(map(sum, lengths_of_rows))
    width = max(map(sum, lengths_of_rows))
    ends = np.cumsum([sum(lengths) for lengths in lengths_of_rows])
    all_lengths = [length for lengths in lengths_of_rows for length in lengths]
    starts = np.cumsum([0, *all_lengths[:-1]])
    table = np.stack([np.concatenate([[0], ends[:-1]]), [sum(lengths) for lengths in lengths_of_rows]], axis=1)
    layout = TokenLayout(
        dtype="uint16", num_tokens=num_tokens, seq_len=width, pad_id=0, is_packed=True, num_starts=len(starts)
    )
    return TokenRows((100 + np.arange(num_tokens)).astype(np.uint16), table, layout, starts.astype(np.int64))


def only_micro_batch(rows, micro_batch):
    [batch] = eval_micro_batches(rows, rank=0, num_ranks=1, micro_batch=micro_batch)
    return batch


def test_positions_start_anew_in_each_document_whose_first_token_is_not_a_target():
    rows = packed_rows((3, 1, 4), (8,), (2, 6))
    batch = only_micro_batch(rows, 3)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3], list(range(8)), [0, 1, 0, 1, 2, 3, 4, 5]]
    assert batch.position_ids.dtype == torch.int64
    is_ignored = (batch.labels == IGNORED_LABEL).tolist()
    assert [[place for place, ignored in enumerate(row) if ignored] for row in is_ignored] == [[0, 3, 4], [0], [0, 2]]
    retained = batch.labels != IGNORED_LABEL
    assert torch.equal(batch.labels[retained], batch.input_ids[retained])
    assert [rows.num_targets(number) for number in range(3)] == [5, 7, 6]
    assert batch.num_targets == 18


def test_packed_rows_are_as_wide_as_a_row_can_be_and_have_positions_where_documents_meet():
    """One width in every forward: a compiled model is compiled once."""
    rows = packed_rows((1, 2), (12,))
    first, second = [*eval_micro_batches(rows, rank=0, num_ranks=1, micro_batch=1)]
    assert first.input_ids.shape == second.input_ids.shape == (1, 12)
    assert first.position_ids is None, "the longest, of one document"
    assert (second.labels[second.input_ids == rows.layout.pad_id] == IGNORED_LABEL).all()
    with_dummy = only_micro_batch(rows, 3).position_ids
    assert with_dummy.tolist() == [list(range(12)), [0, *range(11)], list(range(12))]


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    """1000 rows of lognormal lengths, in the mean 90 tokens."""
    lengths = np.clip(np.random.default_rng(5).lognormal(4, 1, 1000), 2, 512).astype(int)
    return rows_of_lengths(tmp_path_factory.mktemp("varied"), lengths.tolist(), seq_len=512)


@pytest.mark.parametrize("deal", [Deal(4, 8), Deal(8, 2, 2), Deal(8, 1, 4)])
def test_little_of_a_step_is_padding_and_ranks_have_like_work(varied, deal):
    """Of 32 rows a step; a shuffled order pads 2 tokens and more to each token that it learns."""
    padded, unequal = [], []
    for step in range(31):
        _, _, ranks = global_batch(varied, deal, step=step, sequences=32)
        padded += [batch.input_ids.numel() for rank in ranks for batch in rank]
        rounds = [[batch.input_ids.shape[1] for batch in batches] for batches in zip(*ranks, strict=True)]
        unequal += [max(widths) / min(widths) for widths in rounds]
    assert ranks and padded[0] == deal.micro_batch * 512, "a longest row is in the first forward"
    lengths = varied.example_lengths
    shuffled = np.random.default_rng(0).permutation(lengths)[: 31 * 32].reshape(-1, deal.micro_batch).max(axis=1)
    assert 1 - lengths.sum() / sum(padded) < 0.08
    assert 1 - lengths.sum() / (shuffled.sum() * deal.micro_batch) > 0.5
    assert np.mean(unequal) < 1.15


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Seven pairs; the answers of pair n start with n + 1 and go on with 100 and more, or with 200."""
    folder = tmp_path_factory.mktemp("pairs")
    with RowWriter(folder, np.dtype("<u2"), RowShape(16, False, eos_id=None, rows_per_example=2)) as writer:
        for number, (chosen, rejected) in enumerate(zip(LENGTHS, (3, 14, 2, 5, 6, 7, 4), strict=True)):
            answers = (
                [number + 1, *[first + place for place in range(1, length)]]
                for first, length in ((100, chosen), (200, rejected))
            )
            writer.add_pair(*map(TokenIds, answers), is_held_out=False, weight=1.0)
        writer.finish()
    return TokenRows.open(folder, "train")


def test_a_micro_batch_of_pairs_holds_the_chosen_answers_and_then_the_rejected_ones(pairs):
    """The longest answer of either kind decides the width and the order: pairs 2, 1, 6 have 16, 14 and 12 tokens."""
    batches, num_terms = dealt(pairs, Deal(3, 3), sequences=7, seed=0)
    first = batches[0]
    assert first.input_ids[:, 0].tolist() == [3, 2, 7, 3, 2, 7]
    assert first.input_ids[:, 1].tolist() == [101, 101, 101, 201, 201, 201]
    assert [int((labels != IGNORED_LABEL).sum()) + 1 for labels in first.labels] == [16, 2, 12, 2, 14, 4]
    assert first.input_ids.shape == (6, 16)
    assert (first.num_pairs, first.num_terms, first.num_targets) == (3, 3, 50 - 6)
    last = batches[2]
    assert last.input_ids.shape == (6, 8)
    assert (last.num_pairs, num_terms) == (1, 7)
    assert [bool((labels != IGNORED_LABEL).any()) for labels in last.labels] == [True, False, False] * 2
    scored = [*eval_micro_batches(pairs, rank=0, num_ranks=1, micro_batch=2, max_rows=5)]
    assert [batch.num_terms for batch in scored] == [2, 2, 1]


@pytest.mark.parametrize("arrangement", [(2, 2), (3, 3)])
def test_pairs_are_never_separated_and_each_comes_once_an_epoch(pairs, arrangement):
    deal = Deal.of(6, *arrangement)
    seen: Counter[int] = Counter()
    for step, rank in product(range(7), range(deal.num_ranks)):
        batches, num_terms = dealt(pairs, deal, step=step, sequences=6, rank=rank)
        assert num_terms == 6
        for batch in batches:
            chosen, rejected = batch.input_ids.split(deal.micro_batch)
            assert torch.equal(chosen[:, 0], rejected[:, 0])
            assert (chosen[: batch.num_pairs, 1] == 101).all() and (rejected[: batch.num_pairs, 1] == 201).all()
            seen.update((chosen[: batch.num_pairs, 0] - 1).tolist())
    assert seen == Counter(dict.fromkeys(range(7), 6))


def test_a_damaged_cache_is_an_environment_fault_that_names_it(tmp_path):
    layout = rows_of_lengths(tmp_path, (4, 4)).layout

    def assert_damaged(fact, split="train"):
        with pytest.raises(EnvironmentFaultError, match=rf"{tmp_path}\b.*{fact}.*delete"):
            TokenRows.open(tmp_path, split)

    assert_damaged(r"eval_rows\.npy", split="eval")
    (tmp_path / "layout.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(layout, num_starts=2)))
    assert_damaged(r"starts\.bin")
    (tmp_path / "starts.bin").write_bytes(np.array([0], "<i8").tobytes())
    assert_damaged("8 bytes, 16")
    (tmp_path / "tokens.bin").write_bytes((tmp_path / "tokens.bin").read_bytes()[:-2])
    assert_damaged("14 bytes, 16")


GEOMETRIC = np.minimum(np.random.default_rng(7).geometric(1 / 120, 4096) + 1, 512)


@pytest.mark.parametrize(
    ("lengths", "edges", "counts"),
    [
        ([100] * 3, (100,), (3,)),
        (
            [1, 10, 11, 20, 100],
            (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100),
            (1, *[0] * 5, 2, 0, 1, *[0] * 4, 1),
        ),
        ([12, 12, 7], (8, 12), (1, 2)),
    ],
)
def test_lengths_are_counted_up_to_and_with_the_edge(lengths, edges, counts):
    histogram = length_histogram(np.array(lengths))
    assert (histogram.edges, histogram.counts) == (edges, counts)


@pytest.mark.parametrize(("micro_batch", "sequences_per_step"), [(1, 32), (4, 16), (16, 128)])
def test_the_mean_width_is_that_of_the_batches_training_makes(tmp_path, micro_batch, sequences_per_step):
    (counted,) = [width for width in batch_widths(GEOMETRIC, seq_len=512) if width.micro_batch == micro_batch]
    rows = rows_of_lengths(tmp_path, GEOMETRIC.tolist(), seq_len=512)
    widths = []
    for step in range(len(GEOMETRIC) // sequences_per_step):
        batches, _ = step_micro_batches(
            rows, step=step, seed=0, sequences_per_step=sequences_per_step, rank=0, num_ranks=1,
            micro_batch=micro_batch, accumulation=sequences_per_step // micro_batch,
        )  # fmt: skip
        widths += [batch.input_ids.shape[1] for batch in batches]
    assert counted.mean_width_sorted == pytest.approx(np.mean(widths), rel=0.02)


def test_sorting_saves_what_random_order_pays():
    widths = {width.micro_batch: width for width in batch_widths(np.array([8] * 64 + [64] * 64), seq_len=64)}
    assert widths[64].mean_width_sorted == widths[1].mean_width == 36
    assert widths[16].mean_width == pytest.approx(64)
    assert all(width.mean_width_sorted <= width.mean_width <= 64 for width in widths.values())
    (single,) = batch_widths(np.array([13]), seq_len=13)
    assert single.mean_width == 13, "never above the longest row that is allowed"
