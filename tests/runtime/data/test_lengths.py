"""What is counted of lengths is what batches of those rows are like."""

import numpy as np
import pytest
from prepare_request_factory import rows_of_lengths

from shardwise.trainer.runtime.data.batches import step_micro_batches
from shardwise.trainer.runtime.data.cache import MAX_SAMPLED_ROWS, batch_widths, length_histogram

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
            rows,
            step=step,
            seed=0,
            sequences_per_step=sequences_per_step,
            rank=0,
            num_ranks=1,
            micro_batch=micro_batch,
            accumulation=sequences_per_step // micro_batch,
        )
        widths += [batch.input_ids.shape[1] for batch in batches]
    assert counted.mean_width_sorted == pytest.approx(np.mean(widths), rel=0.02)


@pytest.mark.parametrize("micro_batch", [4, 16])
def test_the_mean_width_in_random_order_is_that_of_shuffled_rows(micro_batch):
    (counted,) = [width for width in batch_widths(GEOMETRIC, seq_len=512) if width.micro_batch == micro_batch]
    longest = np.random.default_rng(1).permutation(GEOMETRIC).reshape(-1, micro_batch).max(axis=1)
    assert counted.mean_width == pytest.approx(np.minimum(-(-longest // 8) * 8, 512).mean(), rel=0.05)


def test_sorting_saves_what_random_order_pays():
    widths = {width.micro_batch: width for width in batch_widths(np.array([8] * 64 + [64] * 64), seq_len=64)}
    assert widths[64].mean_width_sorted == widths[1].mean_width == 36
    assert widths[16].mean_width == pytest.approx(64)
    assert all(width.mean_width_sorted <= width.mean_width <= 64 for width in widths.values())
    (single,) = batch_widths(np.array([13]), seq_len=13)
    assert single.mean_width == 13, "never above the longest row that is allowed"


def test_of_very_many_rows_a_sample_is_taken_and_always_the_same():
    lengths = np.random.default_rng(3).integers(2, 1000, 3 * MAX_SAMPLED_ROWS)
    first = batch_widths(lengths, seq_len=1024)
    assert first == batch_widths(lengths, seq_len=1024)
    exact = np.minimum(-(-lengths // 8) * 8, 1024).mean()
    assert first[0].mean_width == pytest.approx(exact, rel=0.01)
