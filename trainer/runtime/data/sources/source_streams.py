"""Opens the files that were listed, as the bytes that were meant: checked against the listing, and decompressed.

What is compressed is said by the last suffix (`.gz`, `.bz2`, `.xz`, `.zst`). A stream that is cut off or is not what
its name says is an InputError when the reader gets there: a damaged file is not a bad row, as nobody knows what of it
is missing.
"""

import bz2
import gzip
import io
import lzma
import tempfile
import zlib
from pathlib import Path
from shutil import copyfileobj
from typing import BinaryIO, NamedTuple, cast

import pyarrow as pa

from trainer.spec.data.request import SourceFile, compression
from trainer.spec.errors import EnvironmentFaultError, InputError

_NAMES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
_DAMAGES = (EOFError, zlib.error, lzma.LZMAError, OSError)  # BadGzipFile is an OSError, as are bz2's and pyarrow's


class BadRow(NamedTuple):
    """A row, or a whole text file, that cannot be used."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def open_listed(file: SourceFile) -> BinaryIO:
    """The file's own bytes; InputError if it is not as it was when it was listed."""
    path = Path(file.path)
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        raise InputError(f"{path}: is gone since the sources were listed; start again") from None
    except OSError as error:
        raise EnvironmentFaultError(f"{path}: cannot be read: {error.strerror}") from error
    status = path.stat()
    if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
        stream.close()
        raise InputError(
            f"{path}: changed since it was listed ({file.size_bytes} bytes then, {status.st_size} now); start again"
        )
    return stream


def open_content(file: SourceFile) -> BinaryIO:
    """What the file holds, decompressed on the way; reading raises InputError where it is damaged."""
    stream = open_listed(file)
    suffix = compression(file.path)
    if suffix is None:
        return stream
    return io.BufferedReader(_Decompressed(stream, suffix, file.path), buffer_size=io.DEFAULT_BUFFER_SIZE * 16)


def open_for_seeking(file: SourceFile) -> BinaryIO:
    """The content as a file that can be read from anywhere: of a compressed one a copy that nobody else sees."""
    stream = open_content(file)
    if compression(file.path) is None:
        return stream
    with stream:
        copy = tempfile.TemporaryFile(prefix="shardwise-")  # noqa: SIM115 - whoever reads it closes it
        copyfileobj(stream, copy)
    copy.seek(0)
    return cast("BinaryIO", copy)


class _Decompressed(io.RawIOBase):
    """Decompressed bytes; whatever a library says of a damaged stream is one sentence here."""

    def __init__(self, stream: BinaryIO, suffix: str, path: str) -> None:
        self._file, self._suffix, self._path = stream, suffix, path
        self._num_bytes = 0
        try:
            self._stream = _decompressor(stream, suffix)
        except _DAMAGES as error:
            stream.close()
            raise self._damage(error) from error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            chunk = self._stream.read(len(buffer))
        except _DAMAGES as error:
            raise self._damage(error) from error
        buffer[: len(chunk)] = chunk
        self._num_bytes += len(chunk)
        return len(chunk)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _damage(self, error: BaseException) -> InputError:
        name = _NAMES[self._suffix]
        what = f"is damaged after {self._num_bytes} bytes of content" if self._num_bytes else "cannot be decompressed"
        return InputError(
            f"{self._path}: {what}: not a whole {name} file ({error});\nfetch it again, or leave it out of data.train"
        )


def _decompressor(stream: BinaryIO, suffix: str) -> BinaryIO:
    match suffix:
        case ".gz":
            return cast("BinaryIO", gzip.GzipFile(fileobj=stream, mode="rb"))
        case ".bz2":
            return cast("BinaryIO", bz2.BZ2File(stream))
        case ".xz":
            return cast("BinaryIO", lzma.LZMAFile(stream))
        case _:
            return cast("BinaryIO", pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), "zstd"))
