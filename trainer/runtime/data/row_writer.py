"""Cuts documents into rows and writes them as they come, in bounded memory: all but their lengths goes to disk.

Packed: a document is ended by the eos token; one longer than `seq_len` is cut into full rows and a rest. Documents and
rests are then packed whole by best-fit decreasing, with the starts of documents in a second file, since a row is to be
learned as if each of its documents stood alone. Rows may end short. Not packed: a row is one document with its eos
token, and what exceeds `seq_len` is dropped and counted. Preference pairs: an example is two rows, the chosen answer's
and the rejected one's, never apart and never packed. Sides of the split and sources of different weight are packed
apart, so that a row never mixes them.

What has no target is dropped and counted: the first token of a row or of a document is no target, and where ids come
with a mask, only the tokens that it names are learned. An example that has a row without a target is dropped whole.

Weights: the examples of a source of weight w stand floor(w) times in an epoch, and an evenly spaced share w - floor(w)
of them once more. Held-out examples stand once.

Best-fit decreasing: the longest document that is left goes into the fullest row that still has room for it, or into a
new row (Ding et al., "Fewer Truncations Improve Language Modeling", arXiv:2404.10830, section 3.2); never more than
11/9 of the fewest possible rows, and 4 (Johnson et al., "Worst-Case Performance Bounds for Simple One-Dimensional
Packing Algorithms", 1974). Documents of one length are placed together, and rows of equal room are filled alike, so
that the work is that of the lengths that differ. Which rooms there are is a bit each in one large number; the smallest
that suffices is its lowest bit from there on.

Memory: 32 bytes a document or row, a few times that while they are packed. Disk: packed tokens lie there twice then.
"""

from array import array
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.trainer.runtime.data.cache import TokenLayout
from shardwise.trainer.runtime.data.sources import TokenIds
from shardwise.trainer.spec import codec


class RowShape(NamedTuple):
    """Shape of a row."""

    seq_len: int
    is_packed: bool
    eos_id: int | None  # ends a document that does not end with it already; None: nothing does
    document_prefix: tuple[int, ...] = ()
    rows_per_example: int = 1  # 2: preference pairs
    pad_id: int = 0


class Rows(NamedTuple):
    """Rows that were written."""

    train: NDArray[np.int64]  # [num_examples * rows_per_example, 2]: first token and length
    held_out: NDArray[np.int64]
    num_tokens: int  # in the file
    num_starts: int  # documents of packed rows
    num_cut: int  # examples that lost an end
    num_dropped_tokens: int
    documents: NDArray[np.int64]  # tokens of each training document, end included, before packing and cutting
    num_targets: int  # tokens that are learned in one epoch
    is_masked: bool  # some tokens are not learned though others come before them
    packing_efficiency: float  # tokens of the training rows, of as many rows of seq_len


class TokenFile:
    """A file of ids that grows at its end.

    The mask is a temporary file of a byte a token, 1 where it is ignored. It is there from the first ignored token on;
    the hole before it reads as zeros, so what came earlier is learned.
    """

    def __init__(self, stream: IO[bytes], dtype: np.dtype[np.unsignedinteger], *, scratch: Path) -> None:
        self.num_tokens = 0
        self._stream = stream  # open for writing and reading
        self._dtype = dtype
        self._scratch = scratch
        self._ignored: IO[bytes] | None = None

    @property
    def is_masked(self) -> bool:
        """True if a token that is not the first of its row is ignored by the loss."""
        return self._ignored is not None

    def append(self, ids: "array[int]", is_learned: bytearray) -> int:
        """Adds ids, with a byte each that is 1 where one is learned; the place of the first."""
        first = self.num_tokens
        self._stream.write(np.asarray(ids).astype(self._dtype).tobytes())
        if self._ignored is None and is_learned.count(0, 1):
            self._start_mask()
        if self._ignored is not None:
            self._ignored.write(is_learned.translate(_INVERTED.ljust(256, b"\0")))
        self.num_tokens += len(ids)
        return first

    def append_from(self, other: "TokenFile", pieces: NDArray[np.int64]) -> None:
        """Adds pieces [n, 2] of another file, first token and length, one after the other."""
        if other.is_masked:
            self._start_mask()
        if len(pieces):
            _write_pieces(self._stream, other._mapped(other._stream, self._dtype), pieces)
        if len(pieces) and self._ignored is not None and other._ignored is not None:
            _write_pieces(self._ignored, other._mapped(other._ignored, np.dtype(np.uint8)), pieces)
        self.num_tokens += int(pieces[:, 1].sum())

    def write_mask(self, path: Path, starts: NDArray[np.int64]) -> None:
        """Writes a bit a token, the lowest of a byte first: 1 where one is learned; never at `starts`, ascending."""
        assert self._ignored is not None, "a file without a mask"
        ignored = self._mapped(self._ignored, np.dtype(np.uint8))
        with path.open("wb") as stream:
            for begin in range(0, self.num_tokens, _MASK_BLOCK):
                is_learned = ignored[begin : begin + _MASK_BLOCK] == 0
                first, end = np.searchsorted(starts, (begin, begin + _MASK_BLOCK))
                is_learned[starts[first:end] - begin] = False
                stream.write(np.packbits(is_learned, bitorder="little").tobytes())

    def close(self) -> None:
        """Closes the files, and removes the mask."""
        if self._ignored is not None:
            self._ignored.close()
        self._stream.close()

    def _start_mask(self) -> None:
        if self._ignored is None:
            self._ignored = TemporaryFile(dir=self._scratch)  # noqa: SIM115  # `close` closes it
            self._ignored.seek(self.num_tokens)

    @staticmethod
    def _mapped(stream: IO[bytes], dtype: np.dtype[Any]) -> NDArray[Any]:
        stream.flush()
        return np.asarray(np.memmap(stream, dtype=dtype, mode="r"))  # slices of a memmap take ten times as long


class RowWriter:
    """Writer of token ids in the order of the documents; `finish` writes the files of a cache but profile, tokenizer.

    A context: it holds files open in `folder`.
    """

    def __init__(self, folder: Path, dtype: np.dtype[np.unsignedinteger], shape: RowShape) -> None:
        self._folder = folder
        self._dtype = dtype.newbyteorder("<")
        self._shape = shape
        self._sides: dict[tuple[bool, float], _Side] = {}
        self._tokens = self._token_file(is_final=not shape.is_packed)

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tokens.close()

    def add(
        self,
        ids: Sequence[int],
        *,
        opens_document: bool,
        is_held_out: bool,
        weight: float,
        is_learned: Sequence[bool] | None = None,
    ) -> None:
        """Appends ids to the open document of their side and weight; one that opens a document ends that before it.

        `is_learned` is one flag for each of the ids; None: all that have a token before them in their document.
        """
        assert is_learned is None or len(is_learned) == len(ids)
        side = self._sides.setdefault((is_held_out, 1.0 if is_held_out else weight), _Side())
        if opens_document:
            self._end_document(side)
            side.ids, side.is_learned, side.last_id = array("q"), bytearray(), None
            side.document_tokens, side.has_open_document = 0, True
            if prefix := self._shape.document_prefix:
                self._extend(side, prefix, None if is_learned is None else (False,) * len(prefix))
        self._extend(side, ids, is_learned)

    def add_pair(self, chosen: TokenIds, rejected: TokenIds, *, is_held_out: bool, weight: float) -> None:
        """Appends the two answers to one prompt, each with its prompt."""
        assert self._shape.rows_per_example == 2 and not self._shape.is_packed
        for ids, is_learned in (chosen, rejected):
            self.add(ids, opens_document=True, is_held_out=is_held_out, weight=weight, is_learned=is_learned)

    def finish(self) -> Rows:
        """Ends the last documents, lays out the rows and writes the tables; returns the rows of all that was added."""
        for side in self._sides.values():
            self._end_document(side)
            assert not side.example, "an example lacks a row"
        tables, starts = self._packed() if self._shape.is_packed else self._as_they_are()
        per_example = self._shape.rows_per_example
        weights = sorted((weight, (is_held_out, weight)) for is_held_out, weight in tables if not is_held_out)
        train = np.concatenate([_weighted(tables[key], weight, per_example) for weight, key in weights] or [_no_rows()])
        held_out = np.concatenate([table for (is_held_out, _), table in tables.items() if is_held_out] or [_no_rows()])
        documents = [np.array(self._sides[key].documents, np.int64) for _, key in weights]
        rows = Rows(
            train=train[:, :2],
            held_out=held_out[:, :2],
            num_tokens=self._tokens.num_tokens,
            num_starts=len(starts) if self._shape.is_packed else 0,
            num_cut=sum(side.num_cut for side in self._sides.values()),
            num_dropped_tokens=sum(side.num_dropped for side in self._sides.values()),
            documents=np.concatenate(documents or [_no_rows()[:, 0]]),
            num_targets=int(train[:, 2].sum()),
            is_masked=self._tokens.is_masked,
            packing_efficiency=float(train[:, 1].sum() / max(1, len(train) * self._shape.seq_len)),
        )
        self._write_tables(rows, starts)
        self._tokens.close()
        return rows

    def _end_document(self, side: "_Side") -> None:
        if not side.has_open_document:
            return
        if self._shape.eos_id is not None and side.last_id != self._shape.eos_id:
            self._extend(side, (self._shape.eos_id,), None)
        side.has_open_document = False
        side.documents.append(side.document_tokens)
        if side.ids or not self._shape.is_packed:
            self._end_row(side, side.ids, side.is_learned)

    def _extend(self, side: "_Side", ids: Sequence[int], is_learned: Sequence[bool] | None) -> None:
        seq_len = self._shape.seq_len
        side.ids.extend(ids)
        side.is_learned.extend(b"\1" * len(ids) if is_learned is None else bytes(is_learned))
        side.document_tokens += len(ids)
        side.last_id = ids[-1] if ids else side.last_id
        if self._shape.is_packed:
            end = len(side.ids) // seq_len * seq_len
            for start in range(0, end, seq_len):
                self._end_row(side, side.ids[start : start + seq_len], side.is_learned[start : start + seq_len])
            del side.ids[:end], side.is_learned[:end]
        elif len(side.ids) > seq_len:
            side.num_dropped += len(side.ids) - seq_len
            side.row_is_cut = True
            del side.ids[seq_len:], side.is_learned[seq_len:]

    def _end_row(self, side: "_Side", ids: "array[int]", is_learned: bytearray) -> None:
        """Adds a row to its example, and writes that if it is whole and every row of it has a target."""
        side.example.append((ids, is_learned))
        if len(side.example) < self._shape.rows_per_example:
            return
        targets = [is_learned.count(1, 1) for _, is_learned in side.example]
        if all(targets):
            for (ids, is_learned), num_targets in zip(side.example, targets, strict=True):
                side.rows.extend((self._tokens.append(ids, is_learned), len(ids), num_targets))
            side.num_cut += side.row_is_cut
        else:
            side.num_dropped += sum(len(ids) for ids, _ in side.example)
        side.example, side.row_is_cut = [], False

    def _as_they_are(self) -> "_LaidOut":
        """The rows of each side, and where documents start: with each row."""
        tables = {key: side.table() for key, side in self._sides.items()}
        starts = np.concatenate([table[:, 0] for table in tables.values()] or [_no_rows()[:, 0]])
        return _LaidOut(tables, np.sort(starts))

    def _packed(self) -> "_LaidOut":
        """Writes the packed rows of each side, one side after the other."""
        pieces_file, self._tokens = self._tokens, self._token_file(is_final=True)
        tables, starts = {}, [_no_rows()[:, 0]]
        with closing(pieces_file):
            for key, side in self._sides.items():
                pieces, side.rows = side.table(), array("q")
                row_of = best_fit_rows(pieces[:, 1], self._shape.seq_len)
                pieces = pieces[np.argsort(row_of, kind="stable")]
                starts.append(self._tokens.num_tokens + np.cumsum(pieces[:, 1]) - pieces[:, 1])
                tables[key] = _rows_of(pieces, starts[-1], np.bincount(row_of))
                self._tokens.append_from(pieces_file, pieces[:, :2])
        return _LaidOut(tables, np.concatenate(starts))

    def _write_tables(self, rows: Rows, starts: NDArray[np.int64]) -> None:
        np.save(self._folder / "train_rows.npy", rows.train)
        np.save(self._folder / "eval_rows.npy", rows.held_out)
        (self._folder / "starts.bin").write_bytes(starts[: rows.num_starts].astype("<i8").tobytes())
        if rows.is_masked:
            self._tokens.write_mask(self._folder / "learned.bin", starts)
        layout = TokenLayout(
            dtype="uint16" if self._dtype.itemsize == 2 else "uint32",
            num_tokens=rows.num_tokens,
            seq_len=self._shape.seq_len,
            pad_id=self._shape.pad_id,
            num_starts=rows.num_starts,
            rows_per_example=self._shape.rows_per_example,
            is_packed=self._shape.is_packed,
            is_masked=rows.is_masked,
        )
        codec.write(self._folder / "layout.json", layout)

    def _token_file(self, *, is_final: bool) -> TokenFile:
        """tokens.bin, or a file without a name for what is moved there later."""
        stream = (self._folder / "tokens.bin").open("w+b") if is_final else TemporaryFile(dir=self._folder)  # noqa: SIM115  # `close` closes them
        return TokenFile(stream, self._dtype, scratch=self._folder)


class _LaidOut(NamedTuple):
    """Rows [n, 3] of each side: first token, length, targets; and the tokens that start a document, ascending."""

    tables: "dict[tuple[bool, float], NDArray[np.int64]]"
    starts: NDArray[np.int64]


class _Side:
    """One stream: what waits for its row to end, and the rows or pieces of rows so far."""

    def __init__(self) -> None:
        self.ids: array[int] = array("q")
        self.is_learned = bytearray()
        self.example: list[tuple[array[int], bytearray]] = []  # rows that wait for the others of their example
        self.rows: array[int] = array("q")  # first token, length, targets
        self.documents: array[int] = array("q")
        self.document_tokens = 0
        self.has_open_document = False
        self.last_id: int | None = None
        self.row_is_cut = False
        self.num_cut = 0
        self.num_dropped = 0

    def table(self) -> NDArray[np.int64]:
        """A view of the rows."""
        return np.asarray(self.rows, np.int64).reshape(-1, 3)


def _no_rows() -> NDArray[np.int64]:
    return np.zeros((0, 3), np.int64)


def _rows_of(pieces: NDArray[np.int64], starts: NDArray[np.int64], num_pieces: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows [n, 3] out of pieces [m, 3] in their order, `num_pieces` of them each; `starts` is where the pieces lie."""
    if not len(pieces):
        return _no_rows()
    first_pieces = np.cumsum(num_pieces) - num_pieces
    sums = np.add.reduceat(pieces[:, 1:], first_pieces)
    return np.column_stack([starts[first_pieces], sums])


def _weighted(rows: NDArray[np.int64], weight: float, rows_per_example: int) -> NDArray[np.int64]:
    examples = rows.reshape(-1, rows_per_example, 3)
    whole, share = divmod(weight, 1.0)
    numbers = np.arange(len(examples))
    once_more = examples[np.floor((numbers + 1) * share) > np.floor(numbers * share)]
    return np.concatenate([examples] * int(whole) + [once_more]).reshape(-1, 3)


_PIECES_AT_ONCE = 256  # are moved; at most 256 x seq_len tokens
_MASK_BLOCK = 2**20  # tokens, a multiple of 8
_INVERTED = bytes((1, 0))  # of a byte that is 0 or 1


def _write_pieces(stream: IO[bytes], values: NDArray[Any], pieces: NDArray[np.int64]) -> None:
    for begin in range(0, len(pieces), _PIECES_AT_ONCE):
        block = pieces[begin : begin + _PIECES_AT_ONCE].tolist()
        stream.write(np.concatenate([values[first : first + length] for first, length in block]).tobytes())


def best_fit_rows(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The row of each document [num_documents], rows numbered in the order of their first document.

    A function of the lengths, each from 1 to `capacity`, and their order.
    """
    if not len(lengths):
        return np.zeros(0, np.int64)
    longest_first = np.argsort(-lengths, kind="stable")
    rows = np.empty(len(lengths), np.int64)
    rows[longest_first] = _placed(lengths[longest_first], capacity)
    first_documents = np.empty(rows.max() + 1, np.int64)  # every row has a document
    first_documents[rows[::-1]] = np.arange(len(rows))[::-1]  # of several values for a place numpy keeps the last
    rank = np.empty(len(first_documents), np.int64)
    rank[np.argsort(first_documents)] = np.arange(len(first_documents))
    return rank[rows]


def _placed(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The row of each document of descending lengths."""
    rows = np.empty(len(lengths), np.int64)
    open_rows = _OpenRows(capacity)
    bounds = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    for first, end in pairwise(bounds):
        length = int(lengths[first])
        while first < end:
            room, taken = open_rows.take(length, end - first)
            each = room // length
            placed = min(end - first, len(taken) * each)
            rows[first : first + placed] = np.repeat(taken, each)[:placed]
            first += placed
            last = placed - (len(taken) - 1) * each  # documents in the last of them
            open_rows.put_back(room - each * length, taken[:-1] if last < each else taken)
            if last < each:
                open_rows.put_back(room - last * length, taken[-1:])
    return rows


class _OpenRows:
    """Rows that are not full, by the room that they have."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_room: dict[int, list[int]] = {}
        self._rooms = 0  # bit r: some row has room for r tokens
        self._num_rows = 0

    def take(self, length: int, count: int) -> tuple[int, list[int]]:
        """(room, rows): as many of the fullest rows with room for `length` as `count` documents need, at most."""
        above = self._rooms >> length
        if not above:
            needed = -(-count // (self._capacity // length))
            self._num_rows += needed
            return self._capacity, list(range(self._num_rows - needed, self._num_rows))
        room = length + (above & -above).bit_length() - 1
        rows = self._by_room[room]
        needed = min(len(rows), -(-count // (room // length)))
        taken = rows[-needed:]
        del rows[-needed:]
        if not rows:
            self._rooms ^= 1 << room
        return room, taken

    def put_back(self, room: int, rows: list[int]) -> None:
        if rows and room:
            self._by_room.setdefault(room, []).extend(rows)
            self._rooms |= 1 << room
