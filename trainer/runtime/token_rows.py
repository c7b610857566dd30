"""The prepared data as it lies on disk, and how a rank reads it: memory-mapped, by row number.

    <cache>/data/<fingerprint>/
        layout.json       how to read the rest
        tokens.bin        the ids of all rows, uint16 or uint32, little-endian
        train_rows.npy    int64 [num_rows, 2]: first token and length of each row; a row drawn twice stands twice
        eval_rows.npy     the same for the held-out rows
        tokenizer/        a Hugging Face tokenizer folder; missing where the data came tokenised without one
        profile.json      the DataProfile

A row of n tokens has n - 1 targets: every token but its first is predicted from those before it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.value import Value

CACHE_FORMAT = 2
WIDTH_MULTIPLE = 8  # a batch is padded to its longest row, rounded up to this
SplitName = Literal["train", "eval"]


class TokenLayout(Value, frozen=True, kw_only=True):
    """How tokens.bin is read."""

    format: int = CACHE_FORMAT
    dtype: Literal["uint16", "uint32"]
    num_tokens: int
    seq_len: int
    pad_id: int


class TokenRows:
    """The rows of one split."""

    def __init__(self, tokens: NDArray[np.unsignedinteger], rows: NDArray[np.int64], layout: TokenLayout) -> None:
        self.layout = layout
        self._tokens = tokens
        self._rows = rows  # [num_rows, 2]

    @classmethod
    def open(cls, cache_dir: Path, split: SplitName) -> "TokenRows":
        """Maps the rows; EnvironmentFaultError if the cache is not whole."""
        layout = codec.read(cache_dir / "layout.json", TokenLayout)
        path = cache_dir / "tokens.bin"
        expected_bytes = layout.num_tokens * np.dtype(layout.dtype).itemsize
        try:
            found_bytes = path.stat().st_size
            rows = np.load(cache_dir / f"{split}_rows.npy", mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise EnvironmentFaultError(f"{cache_dir}: is damaged ({error}); delete it and start again") from error
        if found_bytes != expected_bytes:
            raise EnvironmentFaultError(
                f"{path}: has {found_bytes} bytes, {expected_bytes} were written; delete {cache_dir} and start again"
            )
        return cls(np.memmap(path, dtype=f"<{np.dtype(layout.dtype).str[1:]}", mode="r"), rows, layout)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> NDArray[np.int64]:
        """The ids of one row, a copy."""
        start, length = self._rows[number]
        return self._tokens[start : start + length].astype(np.int64)

    def length(self, number: int) -> int:
        """Tokens of one row, without reading them."""
        return int(self._rows[number, 1])


def padded_width(lengths: Sequence[int], *, seq_len: int) -> int:
    """Width of a batch of these rows: the longest, rounded up where `seq_len` allows; one multiple for no rows."""
    longest = max(lengths, default=1)
    return max(longest, min(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, seq_len))


def unigram_entropy_nats(rows: TokenRows) -> float:
    """Entropy of the empirical distribution of the rows' targets: the loss of knowing frequencies and nothing else."""
    counts = np.zeros(0, np.int64)
    for number in range(len(rows)):
        row_counts = np.bincount(rows.row(number)[1:])
        counts = np.pad(counts, (0, max(0, len(row_counts) - len(counts))))
        counts[: len(row_counts)] += row_counts
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
