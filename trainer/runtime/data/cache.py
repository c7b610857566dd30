"""The cache of prepared data: its rows, memory-mapped and read by number, and folders that one process fills or uses.

    <cache>/data/<fingerprint>/
        layout.json       how to read the rest
        tokens.bin        the ids of all rows, uint16 or uint32, little-endian
        train_rows.npy    int64 [num_rows, 2]: first token and length of each row; a row sampled twice is there twice
        eval_rows.npy     the same for the held-out rows
        starts.bin        int64, little-endian, ascending: the token with which each document of a packed row starts
        learned.bin       a bit a token, the lowest of a byte first: 1 where it is learned; only where some are not
        tokenizer/        a Hugging Face tokenizer folder; missing where the data came tokenised without one
        profile.json      the DataProfile

Every token is predicted from those before it in its document. So a row of n tokens has n - 1 targets, and one less for
each document that starts after its first token; under a mask as many as are learned, which a first token never is. The
pieces of a document that is longer than a row are documents of their own. An example is a row, or the two rows of a
preference pair, the chosen answer's and the rejected one's, which stand one after the other in the table.

The mean width of padded batches is counted on the rows themselves, shuffled by a fixed seed, for every power of two: an
expectation from a histogram would be off by the width of its bins. Rows that are not packed are grouped by length
(trainer.spec.data.order) in windows of a number of steps. The rows of a step, not known here, are assumed to be 32, the
default (65,536 tokens a step, 2,048 a row), or one micro batch if that is more. Larger steps have less padding: of
lognormal lengths (sigma 0.9) in micro batches of 8, 3.9 % at 8 rows a step, 1.6 % at 32, 0.9 % at 256, and 62 %
unsorted.

Each folder, of a prepared data set or of a running process (scratch), has a lock file (flock) of the same name in
`locks/`. The kernel releases a lock when the last process that has it open ends. A partial or scratch folder whose lock
is free belonged to a killed process, and the next start removes it. A prepared data set is built under another name and
renamed when it is complete: the first process that needs it locks and builds it, the others wait.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.data.order import WINDOW_STEPS, DataOrder
from shardwise.trainer.spec.data.profile import BatchWidth, DataProfile, LengthHistogram
from shardwise.trainer.spec.errors import EnvironmentFaultError, ShardwiseError
from shardwise.trainer.spec.value import Value

CACHE_FORMAT = 4
WIDTH_MULTIPLE = 8  # a batch is padded to its longest row, rounded up to this
IGNORED_LABEL = -100
SplitName = Literal["train", "eval"]


class TokenLayout(Value, frozen=True, kw_only=True):
    """How tokens.bin is read."""

    format: int = CACHE_FORMAT
    dtype: Literal["uint16", "uint32"]
    num_tokens: int
    seq_len: int
    pad_id: int
    num_starts: int = 0  # in starts.bin; 0: every row is one document, and there need be no such file
    rows_per_example: int = 1  # 2: preference pairs
    is_packed: bool = False
    is_masked: bool = False  # there is learned.bin; else every token is learned that has one before it


class TokenRows:
    """The examples of one split, `len` of them, and their rows."""

    def __init__(
        self,
        tokens: NDArray[np.unsignedinteger],
        rows: NDArray[np.int64],
        layout: TokenLayout,
        starts: NDArray[np.int64] | None = None,
        learned: NDArray[np.uint8] | None = None,
    ) -> None:
        self.layout = layout
        self._tokens = tokens
        self._rows = rows  # [num_examples * rows_per_example, 2]
        self._starts = np.zeros(0, np.int64) if starts is None else starts  # of documents, in tokens
        self._learned = learned  # packed bits
        self._orders: dict[tuple[int, int], DataOrder] = {}

    @classmethod
    def open(cls, cache_dir: Path, split: SplitName) -> "TokenRows":
        """Maps the rows; EnvironmentFaultError if the cache is not whole."""
        layout = codec.read(cache_dir / "layout.json", TokenLayout)
        tokens = _mapped(cache_dir / "tokens.bin", np.dtype(layout.dtype).newbyteorder("<"), layout.num_tokens)
        starts = _mapped(cache_dir / "starts.bin", np.dtype("<i8"), layout.num_starts) if layout.num_starts else None
        num_bytes = -(-layout.num_tokens // 8)
        learned = _mapped(cache_dir / "learned.bin", np.dtype(np.uint8), num_bytes) if layout.is_masked else None
        try:
            rows = np.asarray(np.load(cache_dir / f"{split}_rows.npy", mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError) as error:
            raise EnvironmentFaultError(f"{cache_dir}: is damaged ({error}); delete it and start again") from error
        return cls(tokens, rows, layout, starts, learned)

    def __len__(self) -> int:
        return len(self._rows) // self.layout.rows_per_example

    def rows_of(self, example: int) -> range:
        """The numbers of the rows of an example: one, or the chosen answer's and the rejected one's."""
        return range(example * self.layout.rows_per_example, (example + 1) * self.layout.rows_per_example)

    def row(self, number: int) -> NDArray[np.int64]:
        """The ids of one row, a copy."""
        start, length = self._rows[number]
        return self._tokens[start : start + length].astype(np.int64)

    def labels(self, number: int) -> NDArray[np.int64]:
        """The ids of one row where they are learned, IGNORED_LABEL elsewhere."""
        labels = self.row(number)
        labels[[0, *self.document_starts(number)]] = IGNORED_LABEL
        if self._learned is not None:
            labels[~self._is_learned(self._learned, number)] = IGNORED_LABEL
        return labels

    def length(self, number: int) -> int:
        """Tokens of one row, without reading them."""
        return int(self._rows[number, 1])

    def document_starts(self, number: int) -> NDArray[np.int64]:
        """Places in a row, ascending, of the tokens after its first with which another document starts."""
        first, length = self._rows[number]
        begin, end = np.searchsorted(self._starts, (first + 1, first + length))
        starts: NDArray[np.int64] = self._starts[begin:end] - first
        return np.asarray(starts)

    def num_targets(self, number: int) -> int:
        """Tokens of a row that are learned, without reading them."""
        if self._learned is not None:
            return int(self._is_learned(self._learned, number).sum())
        return self.length(number) - 1 - len(self.document_starts(number))

    def num_terms(self, example: int) -> int:
        """Number of terms in the mean of the loss: the targets of a row; a preference pair counts as one."""
        return self.num_targets(example) if self.layout.rows_per_example == 1 else 1

    def example_length(self, example: int) -> int:
        """Tokens of the longest row of an example: the width that it needs."""
        return max(self.length(number) for number in self.rows_of(example))

    @cached_property
    def example_lengths(self) -> NDArray[np.int64]:
        """`example_length` of every example."""
        lengths: NDArray[np.int64] = self._rows[:, 1].reshape(-1, self.layout.rows_per_example).max(axis=1)
        return lengths

    def order(self, *, seed: int, sequences_per_step: int) -> DataOrder:
        """In which order the examples are learned: grouped by length where they are not packed."""
        key = (seed, sequences_per_step)
        if key not in self._orders:
            self._orders[key] = DataOrder(
                self.example_length,
                num_rows=len(self),
                longest=int(np.argmax(self.example_lengths)),
                seed=seed,
                sequences_per_step=sequences_per_step,
                is_grouped=not self.layout.is_packed,
            )
        return self._orders[key]

    def _is_learned(self, bits: NDArray[np.uint8], number: int) -> NDArray[np.bool_]:
        start, length = (int(value) for value in self._rows[number])
        in_bytes = np.unpackbits(bits[start // 8 : -(-(start + length) // 8)], bitorder="little")
        return in_bytes[start % 8 : start % 8 + length].astype(bool)


def _mapped(path: Path, dtype: np.dtype[Any], num_elements: int) -> NDArray[Any]:
    """A file of so many numbers, memory-mapped."""
    expected_bytes = num_elements * dtype.itemsize
    try:
        found_bytes = path.stat().st_size
    except OSError as error:
        raise EnvironmentFaultError(f"{path.parent}: is damaged ({error}); delete it and start again") from error
    if found_bytes != expected_bytes:
        raise EnvironmentFaultError(
            f"{path}: has {found_bytes} bytes, {expected_bytes} were written; delete {path.parent} and start again"
        )
    return np.asarray(np.memmap(path, dtype=dtype, mode="r")) if num_elements else np.zeros(0, dtype)


def padded_width(lengths: Sequence[int], *, seq_len: int) -> int:
    """Width of a batch of these rows: the longest, rounded up where `seq_len` allows; one multiple for no rows."""
    longest = max(lengths, default=1)
    return max(longest, min(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, seq_len))


def unigram_entropy_nats(rows: TokenRows) -> float:
    """Entropy of the empirical distribution of the rows' targets: the loss of knowing frequencies and nothing else."""
    counts = np.zeros(0, np.int64)
    for number in range(len(rows) * rows.layout.rows_per_example):
        labels = rows.labels(number)
        row_counts = np.bincount(labels[labels != IGNORED_LABEL])
        counts = np.pad(counts, (0, max(0, len(row_counts) - len(counts))))
        counts[: len(row_counts)] += row_counts
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


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
    """The lengths of an epoch, sorted within each window; without a last incomplete step, if there are others."""
    num_steps = max(1, len(lengths) // sequences_per_step)
    bounds = np.linspace(0, num_steps, -(-num_steps // WINDOW_STEPS) + 1).astype(np.int64) * sequences_per_step
    windows = [np.sort(lengths[first:end])[::-1] for first, end in pairwise(bounds.tolist())]
    return np.concatenate(windows)


def _mean_width(lengths: NDArray[np.int64], size: int, seq_len: int) -> float:
    """Mean width over complete batches of neighbours."""
    longest = lengths[: len(lengths) // size * size].reshape(-1, size).max(axis=1)
    rounded = np.minimum(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, seq_len)
    return float(np.maximum(longest, rounded).mean())


_PARTIAL = ".partial-"
_LOCKS = "locks"


def prepared_once(
    root: Path, fingerprint: str, build: Callable[[Path], DataProfile], report: Callable[[str], None]
) -> DataProfile:
    """The profile of `root/fingerprint`, which `build` fills if it does not exist yet.

    EnvironmentFaultError if another user can change what is there: a run would train on it.
    """
    final = root / fingerprint
    if final.exists():
        codec.refuse_foreign(final, consequence="the run would train on it")
    if (ready := _ready_profile(final)) is not None:
        return ready
    _make_lock_folder(root)
    with _locked(root, fingerprint, report):
        if (ready := _ready_profile(final)) is not None:
            return ready
        partial = root / f"{_PARTIAL}{fingerprint}"
        shutil.rmtree(partial, ignore_errors=True)
        _remove_abandoned(root, _PARTIAL)
        shutil.rmtree(final, ignore_errors=True)  # it exists, but is incomplete
        try:
            partial.mkdir()
            codec.write(partial / "profile.json", build(partial))
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return codec.read(final / "profile.json", DataProfile)


def lock_folder(folder: Path) -> int:
    """Creates an empty folder, removes abandoned ones next to it, and returns the descriptor of its lock."""
    root = folder.parent
    _make_lock_folder(root)
    try:
        _remove_abandoned(root)
        descriptor = _try_lock(root, folder.name)
        if descriptor is None:
            raise EnvironmentFaultError(f"{folder}: is in use by another process; end it, and start again")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    except OSError as error:
        raise _cannot_be_made(root, error) from error
    return descriptor


def remove_locked(folder: Path) -> None:
    """Removes a folder that this process has locked, and its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder.parent / _LOCKS / folder.name).unlink(missing_ok=True)


@contextmanager
def scratch_folder(root: Path, name: str) -> Iterator[Path]:
    """A folder of this process, removed at the end."""
    folder = root / f"{name}-{os.getpid()}-{os.urandom(4).hex()}"
    descriptor = lock_folder(folder)
    try:
        yield folder
    finally:
        remove_locked(folder)
        os.close(descriptor)


def _ready_profile(final: Path) -> DataProfile | None:
    """The profile of a complete folder, else None."""
    if not (final / "profile.json").is_file():
        return None
    try:
        TokenRows.open(final, "train")
        TokenRows.open(final, "eval")
        return codec.read(final / "profile.json", DataProfile)
    except ShardwiseError:  # damaged: it is built again
        return None


@contextmanager
def _locked(root: Path, fingerprint: str, report: Callable[[str], None]) -> Iterator[None]:
    descriptor = _try_lock(root, fingerprint)
    if descriptor is None:
        report("waiting for another process that prepares the same data")
        descriptor = _open_lock(root, fingerprint)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def _try_lock(root: Path, name: str) -> int | None:
    """The descriptor of a lock that was free; None if another process holds it."""
    descriptor = _open_lock(root, name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _open_lock(root: Path, name: str) -> int:
    path = root / _LOCKS / name
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise EnvironmentFaultError(f"{path}: cannot be opened: {error.strerror}") from error


def _remove_abandoned(root: Path, prefix: str = "") -> None:
    """Removes the folders whose lock is free, with their locks; the prefix is not part of a lock's name."""
    for folder in root.glob(f"{prefix}*"):
        name = folder.name.removeprefix(prefix)
        if name == _LOCKS or (descriptor := _try_lock(root, name)) is None:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        if not prefix:
            (root / _LOCKS / name).unlink(missing_ok=True)
        os.close(descriptor)


def _make_lock_folder(root: Path) -> None:
    try:
        (root / _LOCKS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_be_made(root, error) from error


def _cannot_be_made(root: Path, error: OSError) -> EnvironmentFaultError:
    return EnvironmentFaultError(f"{root}: cannot be created: {error.strerror}; name another cache folder")
