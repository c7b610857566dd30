"""Token ids on disk as they come, and beside them which are learned, where those are not all."""

from array import array
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_PIECES_AT_ONCE = 256  # are moved; at most 256 x seq_len tokens
_MASK_BLOCK = 2**20  # tokens, a multiple of 8
_INVERTED = bytes((1, 0))  # of a byte that is 0 or 1


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
        """Whether some token is ignored that has another before it in its row."""
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
        """Closes the files; the mask is gone then."""
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


def _write_pieces(stream: IO[bytes], values: NDArray[Any], pieces: NDArray[np.int64]) -> None:
    for begin in range(0, len(pieces), _PIECES_AT_ONCE):
        block = pieces[begin : begin + _PIECES_AT_ONCE].tolist()
        stream.write(np.concatenate([values[first : first + length] for first, length in block]).tobytes())
