"""Reads the files of rows that were listed: JSON lines and arrays, CSV and TSV, Parquet, Arrow, plain or compressed.

The last suffix names the compression (`.gz`, `.bz2`, `.xz`, `.zst`). A row is a mapping from column to value. Rows are
numbered from 1 as a person counts them: by line in JSON lines (blank lines have a number and are no rows), by record
below the header in CSV (a record may span lines), by position elsewhere. A row that cannot be read is a BadRow at its
number. A file that changed since it was listed, or that is damaged, is an InputError, because its missing rows cannot
be known.

Everything is read in bounded memory: lines one by one, tables in batches of about BATCH_BYTES. A row is at most
ROW_BYTES; a longer one is a BadRow, and its bytes are passed over. The exception is a `.json` array, of which JSON has
no way to read half: one of more than ARRAY_BYTES is an InputError. So is a file whose content is more than EXPANSION
times its own size and more than EXPANSION_BYTES: a compression bomb, as no text is compressed so far.
"""

import bz2
import codecs
import csv
import gzip
import io
import lzma
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import chain
from pathlib import Path
from shlex import quote
from shutil import copyfileobj
from typing import Any, BinaryIO, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from shardwise.trainer.spec.data.json_text import decode_json, kind_of
from shardwise.trainer.spec.data.profile import ROW_SUFFIXES, SourceFile, compression, content_suffix
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.units import format_bytes

READ_BYTES = 2**20
BATCH_BYTES = 2**24
BATCH_ROWS = 2**12
SAMPLE_ROWS = 16
ROW_BYTES = 2**26  # also the most characters of a CSV cell
ARRAY_BYTES = 2**31
EXPANSION = 500  # times a file's size; source code and prose reach 5, logs 100
EXPANSION_BYTES = 2**28
_ARROW_FILE_MAGIC = b"ARROW1"
_ARROW_ERRORS = (pa.ArrowException, MemoryError, OSError, ValueError, OverflowError)  # of pyarrow at damaged bytes
_DELIMITERS = ",;\t|"

_NAMES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
_DAMAGES = (EOFError, zlib.error, lzma.LZMAError, OSError)  # BadGzipFile is an OSError, as are bz2's and pyarrow's
TOO_LONG = f"is longer than {format_bytes(ROW_BYTES)}, the most of a row; a longer text may be a file of its own"
Row = dict[str, Any]


class BadRow(NamedTuple):
    """A row, or a whole text file, that cannot be used."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class LeftOutRow(NamedTuple):
    """A row that the data mark as not to be learned."""

    where: str
    mark: str  # as in label: false


def open_listed(file: SourceFile) -> BinaryIO:
    """The file's own bytes; InputError if it is not as it was when it was listed."""
    path = Path(file.path)
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        raise InputError(f"{path}: is missing since the sources were listed; start again") from None
    except OSError as error:
        raise EnvironmentFaultError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        refuse_changed(file)
    except InputError:
        stream.close()
        raise
    return stream


def refuse_changed(file: SourceFile) -> None:
    """InputError with both values if the file is not as it was when it was listed."""
    try:
        status = os.stat(file.path)  # noqa: PTH116 - thousands of paths
    except FileNotFoundError:
        raise InputError(f"{file.path}: is missing since the sources were listed; start again") from None
    if status.st_size != file.size_bytes:
        change = f"{file.size_bytes} bytes then, {status.st_size} now"
    elif status.st_mtime_ns != file.mtime_ns:
        change = f"written {_local_time(file.mtime_ns)} then, {_local_time(status.st_mtime_ns)} now"
    elif file.ctime_ns not in (None, status.st_ctime_ns):
        change = f"the time of writing is the same, but it was replaced or touched {_local_time(status.st_ctime_ns)}"
    else:
        return
    raise InputError(f"{file.path}: changed since it was listed ({change}); start again")


def _local_time(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9).astimezone().isoformat(" ", timespec="milliseconds")


def open_content(file: SourceFile) -> BinaryIO:
    """The content of the file, decompressed on the way; reading raises InputError where it is damaged."""
    stream = open_listed(file)
    suffix = compression(file.path)
    if suffix is None:
        return stream
    return io.BufferedReader(_Decompressed(stream, suffix, file), buffer_size=io.DEFAULT_BUFFER_SIZE * 16)


def open_for_seeking(file: SourceFile) -> BinaryIO:
    """The content as a file that can be read from anywhere: of a compressed one, a temporary copy."""
    stream = open_content(file)
    if compression(file.path) is None:
        return stream
    with stream:
        copy = tempfile.TemporaryFile(prefix="shardwise-")  # noqa: SIM115 - the reader closes it
        try:
            copyfileobj(stream, copy)
        except BaseException:
            copy.close()
            raise
    copy.seek(0)
    return cast("BinaryIO", copy)


class _Decompressed(io.RawIOBase):
    """Decompressed bytes; a library's error at a damaged stream becomes an InputError."""

    def __init__(self, stream: BinaryIO, suffix: str, file: SourceFile) -> None:
        self._file, self._suffix, self._path = stream, suffix, file.path
        self._num_bytes, self._size_bytes = 0, file.size_bytes
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
        refuse_bomb(self._path, self._num_bytes, self._size_bytes)
        return len(chunk)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _damage(self, error: BaseException) -> InputError:
        name = _NAMES[self._suffix]
        what = f"is damaged after {self._num_bytes} bytes of content" if self._num_bytes else "cannot be decompressed"
        return InputError(
            f"{self._path}: {what}: not a whole {name} file ({error});\nfetch it again, or remove it from data.train"
        )


def refuse_bomb(path: str, num_bytes: int, size_bytes: int) -> None:
    """InputError if a file of `size_bytes` cannot hold as much text as was read from it."""
    if num_bytes > max(EXPANSION_BYTES, EXPANSION * size_bytes):
        raise InputError(
            f"{path}: its {size_bytes} bytes expand to more than {num_bytes}, over {EXPANSION} times as many, "
            "which no text does;\nremove it from data.train, or decompress it"
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


def holds_rows(file: SourceFile) -> bool:
    """True if the file holds a document a row; any other is one text."""
    return content_suffix(file.path) in ROW_SUFFIXES


def is_columnar(file: SourceFile) -> bool:
    """True for a table of typed columns, whose objects have all keys of the column: null where the row has none."""
    return content_suffix(file.path) in (".parquet", ".arrow")


def read_rows(file: SourceFile) -> Iterator[tuple[int, Row | BadRow]]:
    """(row number from 1, row) of a file that holds rows; InputError where the file itself is damaged."""
    suffix = content_suffix(file.path)
    if suffix in (".csv", ".tsv"):
        return _delimited_rows(file, "\t" if suffix == ".tsv" else None)
    if suffix in (".parquet", ".arrow"):
        return _batched_rows(file, _parquet_batches if suffix == ".parquet" else _arrow_batches)
    return _json_rows(file)


def _json_rows(file: SourceFile) -> Iterator[tuple[int, Row | BadRow]]:
    is_one_document = content_suffix(file.path) == ".json" and _holds_one_document(file)
    with open_content(file) as stream:
        if is_one_document:
            content = stream.read(ARRAY_BYTES + 1)
            if len(content) > ARRAY_BYTES:
                raise InputError(
                    f"{file.path}: is one JSON value of more than {format_bytes(ARRAY_BYTES)}, which is read whole;\n"
                    f"write its rows as lines: jq -c '.[]' {quote(file.path)} > rows.jsonl"
                )
            rows = _decoded(content, file.path)
            for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
                yield number, _row(row, f"{file.path}:{number}")
            return
        for number, line in enumerate(_lines(stream), start=1):
            where = f"{file.path}:{number}"
            if line is None:
                yield number, BadRow(where, TOO_LONG)
            elif line.strip():
                yield number, _row(_decoded(line, where), where)


def _lines(stream: BinaryIO) -> Iterator[bytes | None]:
    """The lines of a file; None for one of more than ROW_BYTES, which is never held as a whole."""
    while line := stream.readline(ROW_BYTES + 1):
        is_whole = len(line) <= ROW_BYTES
        end = line[-1:]
        while not is_whole and end not in (b"\n", b""):
            end = stream.readline(READ_BYTES)[-1:]
        yield line if is_whole else None


def _holds_one_document(file: SourceFile) -> bool:
    """True if a `.json` file is an array, or an object over several lines; else it is JSON lines by another name."""
    with open_content(file) as stream:
        start = stream.read(READ_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    first_line = start.partition(b"\n")[0].rstrip()
    return start.startswith(b"[") or (start.startswith(b"{") and first_line.endswith((b"{", b"[", b",")))


def _decoded(content: bytes, where: str) -> Any:  # noqa: ANN401 - any JSON
    try:
        return decode_json(content.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        return BadRow(where, str(error))


def _row(row: Any, where: str) -> Row | BadRow:  # noqa: ANN401 - any JSON
    return row if isinstance(row, dict | BadRow) else BadRow(where, f"is {kind_of(row)}, not an object")


def _delimited_rows(file: SourceFile, delimiter: str | None) -> Iterator[tuple[int, Row | BadRow]]:
    """Every record below the header; a cell that is not UTF-8 makes its record a bad row, not the file."""
    csv.field_size_limit(ROW_BYTES)  # of the whole process; without it 128 KiB, which documents exceed
    with open_content(file) as stream:
        lines = (_csv_line(line, file.path) for line in _lines(stream))
        first = next(lines, "").removeprefix("\ufeff")
        if delimiter is None:  # the comma, unless the header has none and something else that separates columns
            delimiter = "," if "," in first else max(_DELIMITERS, key=lambda mark: (first.count(mark), mark == ","))
        records = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
        header = _header(records, file.path)
        number = 0
        while True:
            try:
                record = next(records, None)
            except csv.Error as error:
                number += 1
                reason = "a quote is left open" if "unexpected end" in str(error) else str(error)
                yield number, BadRow(f"{file.path}:{number}", f"is not CSV: {reason} (line {records.line_num})")
                continue
            if record is None:
                return
            if record:
                number += 1
                yield number, _record(record, header, f"{file.path}:{number}", records.line_num)


def _csv_line(line: bytes | None, path: str) -> str:
    if line is None:  # the quotes in it decide where its record ends
        raise InputError(f"{path}: one of its lines {TOO_LONG}")
    return line.decode("utf-8", "surrogateescape")


def _header(records: Iterator[list[str]], path: str) -> list[str]:
    """The names in the first record that is not blank; no list where there is none."""
    try:
        header = next(filter(None, records), [])
        "".join(header).encode()
    except csv.Error as error:
        raise InputError(f"{path}: its header is not CSV: {error}") from None
    except UnicodeEncodeError:
        raise InputError(f"{path}: its header is not UTF-8; save the file as UTF-8") from None
    twice = next((name for position, name in enumerate(header) if name in header[:position]), None)
    if twice is not None:
        raise InputError(f'{path}: its header names "{twice}" twice; the first line of a CSV file names its columns')
    return header


def _record(record: list[str], header: list[str], where: str, line: int) -> Row | BadRow:
    if len(record) != len(header):
        return BadRow(where, f"has {len(record)} cells, the header names {len(header)} (line {line})")
    if not all(map(str.isascii, record)):
        try:
            "".join(record).encode()
        except UnicodeEncodeError as error:
            byte = ord(error.object[error.start]) - 0xDC00
            return BadRow(where, f"is not UTF-8 (byte 0x{byte:02x}, line {line})")
    return dict(zip(header, record, strict=True))


def _batched_rows(
    file: SourceFile, batches_of: Callable[[BinaryIO], Iterator[pa.RecordBatch]]
) -> Iterator[tuple[int, Row | BadRow]]:
    """The rows of each batch; InputError with the place at damaged bytes."""
    num_rows = num_bytes = 0
    with open_for_seeking(file) as stream:
        batches = batches_of(stream)
        while True:
            try:
                batch = next(batches, None)
                rows = [] if batch is None else _rows_of_batch(batch, file.path, num_rows)
            except _ARROW_ERRORS as error:
                raise _damage(file.path, num_rows, error) from error
            if batch is None:
                return
            num_bytes += batch.nbytes
            refuse_bomb(file.path, num_bytes, file.size_bytes)
            yield from enumerate(rows, start=num_rows + 1)
            num_rows += batch.num_rows


def _rows_of_batch(batch: pa.RecordBatch, path: str, num_before: int) -> Iterable[Row | BadRow]:
    kinds = enumerate(batch.schema.types)  # without times and decimals, of which Python cannot hold all that Arrow can
    batch = batch.select([n for n, kind in kinds if not pa.types.is_temporal(kind) and not pa.types.is_decimal(kind)])
    one_by_one = (_one_row(batch, number, f"{path}:{num_before + number + 1}") for number in range(batch.num_rows))
    if batch.nbytes > ROW_BYTES:
        return one_by_one
    try:
        return batch.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:  # somewhere in these rows; the others can be used
        return one_by_one


def _one_row(batch: pa.RecordBatch, number: int, where: str) -> Row | BadRow:
    row = batch.slice(number, 1)
    if row.nbytes > ROW_BYTES:
        return BadRow(where, TOO_LONG)
    try:
        return row.to_pylist()[0]  # type: ignore[no-any-return]
    except UnicodeDecodeError as error:
        return BadRow(where, f"is not UTF-8 ({error.reason})")


def _parquet_batches(stream: BinaryIO) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(stream, pre_buffer=False, buffer_size=READ_BYTES) as table:
        for index in range(table.metadata.num_row_groups):
            group = table.metadata.row_group(index)
            size = _batch_rows(group.total_byte_size, group.num_rows)
            # One text for many rows is stored once, so the sizes in the file are not those in memory.
            sample = next(table.iter_batches(batch_size=min(size, SAMPLE_ROWS), row_groups=[index]), None)
            if sample is not None:
                size = min(size, _batch_rows(sample.nbytes, sample.num_rows))
            yield from table.iter_batches(batch_size=size, row_groups=[index])


def _batch_rows(num_bytes: int, num_rows: int) -> int:
    """Rows of a batch where so many rows have so many bytes."""
    return min(BATCH_ROWS, max(1, BATCH_BYTES * num_rows // max(num_bytes, 1)))


def _arrow_batches(stream: BinaryIO) -> Iterator[pa.RecordBatch]:
    """Of an IPC file or an IPC stream (what datasets writes); both are called `.arrow`."""
    is_file = stream.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
    stream.seek(0)
    if is_file:
        table = pa.ipc.open_file(stream)
        batches = (table.get_batch(index) for index in range(table.num_record_batches))
    else:
        batches = iter(pa.ipc.open_stream(stream))
    for batch in batches:
        _check_offsets(batch)
        size = _batch_rows(batch.nbytes, batch.num_rows)
        for start in range(0, batch.num_rows, size):
            yield batch.slice(start, size)


def _check_offsets(batch: pa.RecordBatch) -> None:
    """Unlike Parquet, Arrow is memory as it lay: a damaged offset would be followed, and end the process."""
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):  # which is judged row by row
            raise


def _damage(path: str, num_rows: int, error: Exception) -> InputError:
    what = f"is damaged after row {num_rows}" if num_rows else "cannot be read"
    sentence = str(error).partition("\n")[0].rstrip(". ") or "it states sizes that no memory holds"
    return InputError(
        f"{path}: {what}: not a whole {Path(path).suffix} file ({sentence});\n"
        "fetch it again, or remove it from data.train"
    )
