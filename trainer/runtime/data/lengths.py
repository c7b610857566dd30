"""How long the documents are, and what batches of them would look like padded: counted once, when data is prepared.

A padded batch is as wide as its longest row, rounded up as `trainer.runtime.data.token_rows.padded_width` does. How
wide batches are on average is counted on the rows themselves, shuffled by a fixed seed, for every power of two: an
expectation from a histogram would be off by the width of its bins. Of very many rows a sample is taken.

Rows that are not packed are learned grouped by length (trainer.spec.data.order), in windows of a number of steps. How
many rows a step has is not known here. It is taken to be 32, what a job has that says nothing (65,536 tokens a step,
2,048 a row), or one micro batch if that is more. Larger steps have less padding, smaller ones more: of lognormal
lengths (sigma 0.9) in micro batches of 8, 3.9 % at 8 rows a step, 1.6 % at 32, 0.9 % at 256, and 62 % unsorted.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainer.runtime.data.token_rows import WIDTH_MULTIPLE
from trainer.spec.data.order import WINDOW_STEPS
from trainer.spec.data.profile import BatchWidth, LengthHistogram

MAX_SAMPLED_ROWS = 2**18  # milliseconds; the mean width of batches of 64 is known to a per cent
MAX_MICRO_BATCH = 1024
SEQUENCES_PER_STEP = 32


def length_histogram(lengths: NDArray[np.int64]) -> LengthHistogram:
    """Two bins an octave, the last one ending at the longest; lengths of text spread over orders of magnitude."""
    longest = int(lengths.max())
    edges = sorted({edge for power in range(longest.bit_length()) for edge in (2**power, 3 * 2**power // 2)})
    edges = [edge for edge in edges if edge < longest] + [longest]
    counts = np.bincount(np.searchsorted(edges, lengths, side="left"), minlength=len(edges))
    first = int(np.flatnonzero(counts)[0])
    return LengthHistogram(edges=tuple(edges[first:]), counts=tuple(int(count) for count in counts[first:]))


def batch_widths(lengths: NDArray[np.int64], *, seq_len: int) -> tuple[BatchWidth, ...]:
    """Mean width of padded batches of 1, 2, 4, ... documents of these lengths, none above `seq_len`.

    Of preference pairs, `lengths` are those of the longer answer of each.
    """
    shuffled = np.random.default_rng(0).permutation(lengths)[:MAX_SAMPLED_ROWS]
    sizes = [2**power for power in range(MAX_MICRO_BATCH.bit_length()) if 2**power <= len(shuffled)]
    return tuple(
        BatchWidth(
            micro_batch=size,
            mean_width=_mean_width(shuffled, size, seq_len),
            mean_width_sorted=_mean_width(_grouped(shuffled, max(size, SEQUENCES_PER_STEP)), size, seq_len),
        )
        for size in sizes
    )


def _grouped(lengths: NDArray[np.int64], sequences_per_step: int) -> NDArray[np.int64]:
    """The lengths of an epoch, sorted within each window; what fills no step is left out as far as that leaves any."""
    num_steps = max(1, len(lengths) // sequences_per_step)
    bounds = np.linspace(0, num_steps, -(-num_steps // WINDOW_STEPS) + 1).astype(np.int64) * sequences_per_step
    windows = [np.sort(lengths[first:end])[::-1] for first, end in pairwise(bounds.tolist())]
    return np.concatenate(windows)


def _mean_width(lengths: NDArray[np.int64], size: int, seq_len: int) -> float:
    """Over whole batches of neighbours; the last that fill none are left out."""
    longest = lengths[: len(lengths) // size * size].reshape(-1, size).max(axis=1)
    rounded = np.minimum(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, seq_len)
    return float(np.maximum(longest, rounded).mean())
