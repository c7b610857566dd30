"""How long the documents are, and what batches of them would look like padded: counted once, when data is prepared.

A padded batch is as wide as its longest row, rounded up as `trainer.runtime.token_rows.padded_width` does. How wide
batches are on average is counted on the rows themselves, shuffled by a fixed seed, for every power of two: an
expectation from a histogram would be off by the width of its bins. Of very many rows a sample is taken.
"""

import numpy as np
from numpy.typing import NDArray

from trainer.runtime.token_rows import WIDTH_MULTIPLE
from trainer.spec.data_profile import BatchWidth, LengthHistogram

MAX_SAMPLED_ROWS = 2**18  # milliseconds; the mean width of batches of 64 is known to a per cent
MAX_MICRO_BATCH = 1024


def length_histogram(lengths: NDArray[np.int64]) -> LengthHistogram:
    """Two bins an octave, the last one ending at the longest; lengths of text spread over orders of magnitude."""
    longest = int(lengths.max())
    edges = sorted({edge for power in range(longest.bit_length()) for edge in (2**power, 3 * 2**power // 2)})
    edges = [edge for edge in edges if edge < longest] + [longest]
    counts = np.bincount(np.searchsorted(edges, lengths, side="left"), minlength=len(edges))
    first = int(np.flatnonzero(counts)[0])
    return LengthHistogram(edges=tuple(edges[first:]), counts=tuple(int(count) for count in counts[first:]))


def batch_widths(lengths: NDArray[np.int64], *, seq_len: int) -> tuple[BatchWidth, ...]:
    """Mean width of padded batches of 1, 2, 4, ... documents of these lengths, none above `seq_len`."""
    shuffled = np.random.default_rng(0).permutation(lengths)[:MAX_SAMPLED_ROWS]
    ordered = np.sort(shuffled)
    sizes = [2**power for power in range(MAX_MICRO_BATCH.bit_length()) if 2**power <= len(shuffled)]
    return tuple(
        BatchWidth(
            micro_batch=size,
            mean_width=_mean_width(shuffled, size, seq_len),
            mean_width_sorted=_mean_width(ordered, size, seq_len),
        )
        for size in sizes
    )


def _mean_width(lengths: NDArray[np.int64], size: int, seq_len: int) -> float:
    """Over whole batches; of sorted lengths the shortest that fill no batch are left out."""
    longest = lengths[len(lengths) % size :].reshape(-1, size).max(axis=1)
    rounded = np.minimum(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, seq_len)
    return float(np.maximum(longest, rounded).mean())
