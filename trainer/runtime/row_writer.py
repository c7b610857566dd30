"""Cuts streams of token ids into rows and writes them as they come, in one file and in bounded memory.

Packed: documents are joined, each ended by the eos token, and the stream is cut into rows of exactly `seq_len` tokens;
a remainder shorter than a row is dropped and counted. Where documents start is written to a second file as it becomes
known, since a row is to be learned as if each of its documents stood alone. A row in which each document is one token
has nothing to predict; it is dropped and counted. Not packed: a row is one document with its eos token, and what
exceeds `seq_len` is dropped and counted. The sides of the split and the sources of different weight are streams of
their own, so that a row never mixes them.

Weights: the rows of a source of weight w stand floor(w) times in an epoch, and an evenly spaced share w - floor(w) of
them once more. Held-out rows stand once.
"""

from array import array
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray


class RowShape(NamedTuple):
    """What a row is."""

    seq_len: int
    is_packed: bool
    eos_id: int | None  # ends a document that does not end with it already; None: nothing does
    document_prefix: tuple[int, ...] = ()


class Rows(NamedTuple):
    """What was written."""

    train: NDArray[np.int64]  # [num_rows, 2]: first token and length
    held_out: NDArray[np.int64]
    num_tokens: int  # in the file
    num_starts: int  # documents of packed rows whose first token is in the file
    num_cut: int
    num_dropped_tokens: int
    documents: NDArray[np.int64]  # tokens of each training document, end included, before packing and cutting


class RowWriter:
    """Takes token ids in the order of the documents; `finish` tells where the rows are.

    `starts` gets the number of the token with which each document of a packed row starts, ascending, as little-endian
    int64; of rows that are not packed nothing, as there a document is a row.
    """

    def __init__(
        self, stream: BinaryIO, dtype: np.dtype[np.unsignedinteger], shape: RowShape, *, starts: BinaryIO
    ) -> None:
        self._stream = stream
        self._starts = starts
        self._dtype = dtype
        self._shape = shape
        self._num_tokens = 0
        self._num_starts = 0
        self._sides: dict[tuple[bool, float], _Side] = {}

    def add(self, ids: Sequence[int], *, opens_document: bool, is_held_out: bool, weight: float) -> None:
        """Appends ids to the stream of their side and weight; the document before them ends if they open one."""
        side = self._sides.setdefault((is_held_out, 1.0 if is_held_out else weight), _Side())
        if opens_document:
            self._end_document(side)
            side.last_id = None
            if self._shape.is_packed:
                side.open_document()
            side.pending.extend(self._shape.document_prefix)
            side.document_tokens = len(self._shape.document_prefix)
            side.has_open_document = True
        self._extend(side, ids)

    def finish(self) -> Rows:
        """Ends the last documents and returns the rows of all that was added."""
        for side in self._sides.values():
            self._end_document(side)
            side.num_dropped += len(side.pending)
            side.pending = array("q")
        weighted = sorted((weight, side) for (held_out, weight), side in self._sides.items() if not held_out)
        held_out = [side for (is_held_out, _), side in self._sides.items() if is_held_out]
        return Rows(
            train=np.concatenate([_weighted(side.table(), weight) for weight, side in weighted] or [_no_rows()]),
            held_out=np.concatenate([side.table() for side in held_out] or [_no_rows()]),
            num_tokens=self._num_tokens,
            num_starts=self._num_starts,
            num_cut=sum(side.num_cut for side in self._sides.values()),
            num_dropped_tokens=sum(side.num_dropped for side in self._sides.values()),
            documents=np.concatenate([np.asarray(side.documents, np.int64) for _, side in weighted] or [_no_lengths()]),
        )

    def _end_document(self, side: "_Side") -> None:
        if not side.has_open_document:
            return
        side.has_open_document = False
        if self._shape.eos_id is not None and side.last_id != self._shape.eos_id:
            self._extend(side, (self._shape.eos_id,))
        side.documents.append(side.document_tokens)
        if not self._shape.is_packed:
            self._end_row(side)

    def _extend(self, side: "_Side", ids: Sequence[int]) -> None:
        seq_len = self._shape.seq_len
        side.pending.extend(ids)
        side.document_tokens += len(ids)
        side.last_id = ids[-1] if ids else side.last_id
        if self._shape.is_packed:
            if len(side.pending) >= seq_len:
                self._write_packed(side, len(side.pending) // seq_len)
        elif len(side.pending) > seq_len:
            side.num_dropped += len(side.pending) - seq_len
            side.row_is_cut = True
            del side.pending[seq_len:]

    def _write_packed(self, side: "_Side", num_rows: int) -> None:
        """Moves the first rows of what waits into the file, with the starts of the documents in them."""
        seq_len = self._shape.seq_len
        end = num_rows * seq_len
        starts = np.asarray(side.pending_starts, np.int64)
        inside = starts[starts < end]
        # A row has a target unless a document starts with each token after its first.
        later = np.bincount(inside // seq_len, weights=inside % seq_len > 0, minlength=num_rows)
        keeps = later < seq_len - 1
        side.num_dropped += seq_len * int((~keeps).sum())
        tokens = np.asarray(side.pending[:end]).reshape(num_rows, seq_len)[keeps]
        first = self._write(tokens.ravel())
        side.starts.extend(range(first, first + tokens.size, seq_len))
        side.lengths.extend([seq_len] * len(tokens))
        kept = inside[keeps[inside // seq_len]]
        places = np.cumsum(keeps) - 1  # of a row among those that are kept
        self._starts.write((first + places[kept // seq_len] * seq_len + kept % seq_len).astype("<i8").tobytes())
        self._num_starts += len(kept)
        del side.pending[:end]
        side.pending_starts = array("q", (starts[starts >= end] - end).tolist())

    def _end_row(self, side: "_Side") -> None:
        if len(side.pending) < 2:  # nothing to predict
            side.num_dropped += len(side.pending)
        else:
            side.starts.append(self._write(side.pending))
            side.lengths.append(len(side.pending))
            side.num_cut += side.row_is_cut
        side.row_is_cut = False
        side.pending = array("q")

    def _write(self, ids: "array[int] | NDArray[np.int64]") -> int:
        first = self._num_tokens
        self._stream.write(np.asarray(ids).astype(self._dtype).tobytes())
        self._num_tokens += len(ids)
        return first


class _Side:
    """One stream: what waits for a row to be full, and the rows so far."""

    def __init__(self) -> None:
        self.pending: array[int] = array("q")
        self.pending_starts: array[int] = array("q")  # places in `pending` where a document starts, ascending
        self.starts: array[int] = array("q")
        self.lengths: array[int] = array("q")
        self.documents: array[int] = array("q")
        self.document_tokens = 0
        self.has_open_document = False
        self.last_id: int | None = None
        self.row_is_cut = False
        self.num_cut = 0
        self.num_dropped = 0

    def open_document(self) -> None:
        """Notes that what comes next starts a document; one that stayed empty never started."""
        if not self.pending_starts or self.pending_starts[-1] != len(self.pending):
            self.pending_starts.append(len(self.pending))

    def table(self) -> NDArray[np.int64]:
        return np.stack([np.asarray(self.starts, np.int64), np.asarray(self.lengths, np.int64)], axis=1)


def _no_lengths() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


def _no_rows() -> NDArray[np.int64]:
    return np.zeros((0, 2), np.int64)


def _weighted(rows: NDArray[np.int64], weight: float) -> NDArray[np.int64]:
    whole, share = divmod(weight, 1.0)
    numbers = np.arange(len(rows))
    once_more = rows[np.floor((numbers + 1) * share) > np.floor(numbers * share)]
    return np.concatenate([rows] * int(whole) + [once_more])
