"""Reads the documents of text files, JSON lines and files of token lists, block by block, and says which are bad.

A text file is one document, a row of a `.jsonl` file (or an element of a `.json` array) is one document. Documents come
in blocks of at most about a million characters, cut at line ends, so that a file of any size is read in bounded memory;
a `.json` array is the exception, as JSON has no way to read half of one.

A row that cannot be used is yielded as a BadRow with its place (file:row, both as a person counts them) in the order
of reading; what becomes of it is the caller's decision. A text file is good or bad as a whole: `survey` reads it once,
for its digest and for the first thing that is not text, before any block of it is used.

Not covered: rows of prompts and completions, chats and preferences (refused by name), and compressed or columnar files.
"""

import codecs
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from trainer.spec.data_request import SourceFile, check_format_is_served
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.job import DataFormat

READ_BYTES = 2**20
BLOCK_CHARS = 2**20
ROWS_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
NUM_ROWS_TO_DETECT = 100
_BYTE_ORDER_MARK = "\ufeff"

_COLUMNS_OF_FORMAT = {
    DataFormat.TOKENS: ({"tokens"}, {"input_ids"}),
    DataFormat.PREFERENCE: ({"chosen", "rejected"},),
    DataFormat.CHAT: ({"messages"}, {"conversations"}),
    DataFormat.PROMPT_COMPLETION: ({"prompt", "completion"}, {"instruction", "output"}),
}


class Block(NamedTuple):
    """A stretch of one document: text, or the ids of a row that came tokenised."""

    content: str | list[int]
    weight: float  # of its source
    opens_document: bool


class BadRow(NamedTuple):
    """A row, or a whole text file, that cannot be used."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class Survey(NamedTuple):
    """What one pass over a file's bytes tells."""

    digest: bytes
    defect: str | None  # why a text file is not text; None for files of rows, which are judged row by row


class RowReading(NamedTuple):
    """How rows are read: their shape, the columns that hold them, and the ids that the model knows."""

    format: DataFormat  # TEXT or TOKENS
    fields: dict[str, str]
    vocab_size: int


def holds_rows(file: SourceFile) -> bool:
    """Whether the file holds a document a row; any other is one text."""
    return Path(file.path).suffix.lower() in ROWS_SUFFIXES


def survey(file: SourceFile) -> Survey:
    """Digest and first defect of the file; InputError if it is not the file that was listed."""
    digest = blake2b(digest_size=32)
    defect = None
    decoder = None if holds_rows(file) else codecs.getincrementaldecoder("utf-8")()
    with _open(file) as stream:
        offset = 0
        while chunk := stream.read(READ_BYTES):
            digest.update(chunk)
            if decoder and defect is None:
                defect = _defect(chunk, decoder, offset)
            offset += len(chunk)
        if decoder and defect is None:
            defect = _defect(b"", decoder, offset)
    return Survey(digest.digest(), defect)


def _defect(chunk: bytes, decoder: codecs.IncrementalDecoder, offset: int) -> str | None:
    """The first byte of `chunk`, which stands at `offset` in the file, that text in UTF-8 does not have."""
    kept = len(decoder.getstate()[0])
    nul = chunk.find(b"\0")
    try:
        decoder.decode(chunk if nul < 0 else chunk[:nul], final=not chunk or nul >= 0)
    except UnicodeDecodeError as error:
        place = offset - kept + error.start
        return f"is not text: byte 0x{error.object[error.start]:02x} at offset {place} is not UTF-8 ({error.reason})"
    return None if nul < 0 else f"is not text: NUL byte at offset {offset + nul}"


def detect_format(files: Sequence[SourceFile], asked: DataFormat, fields: dict[str, str]) -> DataFormat:
    """TEXT or TOKENS: what was asked for, or what the columns of the first rows say; InputError for other shapes."""
    check_format_is_served(asked)
    texts = [file for file in files if not holds_rows(file)]
    found = asked
    if asked is DataFormat.AUTO:
        found = next((_format_of_columns(file, fields) for file in files if holds_rows(file)), DataFormat.TEXT)
        if found not in (DataFormat.TEXT, DataFormat.TOKENS):
            raise InputError(
                f"data.format: auto found rows of the shape {found}, which comes with shardwise 0.4;\n"
                "for plain text name its column: data.fields={text: COLUMN}"
            )
    if found is DataFormat.TOKENS and texts:
        raise InputError(f"data.format: tokens are read from .jsonl files; {texts[0].path} is text")
    unknown = sorted(set(fields) - {"text", "tokens"})
    if unknown:
        raise InputError(f"data.fields: {unknown[0]} is not a field of {found} rows; they have text or tokens")
    return found


def _format_of_columns(file: SourceFile, fields: dict[str, str]) -> DataFormat:
    """The shape of the first row that is an object; TEXT where none says otherwise."""
    if "tokens" in fields:
        return DataFormat.TOKENS
    if "text" in fields:
        return DataFormat.TEXT
    for number, row in _rows(file):
        if isinstance(row, dict):
            columns = row.keys()
            if "text" in columns:
                return DataFormat.TEXT
            for shape, alternatives in _COLUMNS_OF_FORMAT.items():
                if any(names <= columns for names in alternatives):
                    return shape
            return DataFormat.TEXT
        if number >= NUM_ROWS_TO_DETECT:
            break
    return DataFormat.TEXT


def read_blocks(file: SourceFile, defect: str | None, reading: RowReading) -> Iterator[Block | BadRow]:
    """The blocks of all documents of `file`, in order; `defect` is what its survey found."""
    if defect is not None:
        yield BadRow(file.path, defect)
    elif holds_rows(file):
        for number, row in _rows(file):
            content = row if isinstance(row, BadRow) else _content(row, f"{file.path}:{number}", reading)
            if isinstance(content, BadRow):
                yield content
            elif isinstance(content, str):
                yield from _blocks_of_text(iter([content]), file.weight)
            else:
                yield Block(content, file.weight, opens_document=True)
    else:
        yield from _blocks_of_text(_decoded(file), file.weight)


def _decoded(file: SourceFile) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _open(file) as stream:
        is_start = True
        while chunk := stream.read(READ_BYTES):
            text = decoder.decode(chunk)
            yield text.removeprefix(_BYTE_ORDER_MARK) if is_start else text
            is_start = False


def _blocks_of_text(texts: Iterator[str], weight: float) -> Iterator[Block]:
    """Blocks of one document; they end at line ends unless a line is longer than a block. Blank ones are nothing."""
    opens, carried = True, ""
    for text in texts:
        carried += text
        while len(carried) >= BLOCK_CHARS:
            piece = next(cut_at_line_ends(carried, BLOCK_CHARS))
            yield Block(piece, weight, opens)
            opens, carried = False, carried[len(piece) :]
    if carried and not (opens and carried.isspace()):
        yield Block(carried, weight, opens)


def cut_at_line_ends(text: str, max_chars: int) -> Iterator[str]:
    """`text` in pieces of at most `max_chars`, each ending with a line where a line fits."""
    start = 0
    while start < len(text):
        end = start + max_chars
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _content(row: Any, where: str, reading: RowReading) -> str | list[int] | BadRow:  # noqa: ANN401 - any JSON
    if not isinstance(row, dict):
        return BadRow(where, f"is {_kind(row)}, not an object")
    if reading.format is DataFormat.TOKENS:
        return _token_ids(row, where, reading)
    column = reading.fields.get("text", "text")
    if column not in row:
        return BadRow(where, f'has no field "{column}"; its fields: {", ".join(map(str, row)) or "none"}')
    text = row[column]
    if not isinstance(text, str):
        return BadRow(where, f'field "{column}" is {_kind(text)}, not text')
    return text if text and not text.isspace() else BadRow(where, f'field "{column}" is empty')


def _token_ids(row: dict[str, Any], where: str, reading: RowReading) -> list[int] | BadRow:
    columns = (reading.fields["tokens"],) if "tokens" in reading.fields else ("tokens", "input_ids")
    column = next((name for name in columns if name in row), None)
    if column is None:
        return BadRow(where, f'has no field "{columns[0]}"; its fields: {", ".join(map(str, row)) or "none"}')
    ids = row[column]
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        return BadRow(where, f'field "{column}" is not a list of token ids')
    if len(ids) < 2:
        return BadRow(where, f'field "{column}" has {len(ids)} tokens; a row without a label teaches nothing')
    if not (min(ids) >= 0 and max(ids) < reading.vocab_size):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        return BadRow(where, f"token {wrong} is not in the model's vocabulary of {reading.vocab_size}")
    return ids


def _kind(content: object) -> str:
    names = {str: "text", list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return names.get(type(content), "a number")


def _rows(file: SourceFile) -> Iterator[tuple[int, Any]]:
    """(row number from 1, decoded row or BadRow); blank lines have a number and are skipped."""
    with _open(file) as stream:
        if file.path.lower().endswith(".json") and _starts_an_array(stream):
            rows = _decode(stream.read(), file.path)
            yield from enumerate(rows if isinstance(rows, list) else [rows], start=1)
            return
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, _decode(line, f"{file.path}:{number}")


def _starts_an_array(stream: BinaryIO) -> bool:
    start = stream.read(READ_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    stream.seek(0)
    return start.startswith(b"[")


def _decode(content: bytes, where: str) -> Any:  # noqa: ANN401 - any JSON
    try:
        return msgspec.json.decode(content.removeprefix(codecs.BOM_UTF8))
    except UnicodeDecodeError as error:
        return BadRow(where, f"is not UTF-8 ({error.reason})")
    except RecursionError:
        return BadRow(where, "is not a row of data: nested too deep")
    except msgspec.DecodeError as error:
        return BadRow(where, f"is not valid JSON: {error}")


def _open(file: SourceFile) -> BinaryIO:
    """The file, opened, if it is still as it was listed."""
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
