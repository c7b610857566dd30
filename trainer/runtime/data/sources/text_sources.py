"""Reads the documents of text files and of rows of text, block by block, and says which are bad.

A text file is one document. Documents come in blocks of at most about a million characters, cut at line ends, so that
a file of any size is read in bounded memory. A text file is good or bad as a whole: `survey` reads it once, for its
digest and for the first thing that is not text, before any block of it is used. Rows are read by `row_files` and made
examples by `row_shapes`; what cannot be used is yielded as a BadRow in the order of reading.
"""

import codecs
from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

from trainer.runtime.data.sources.examples import Content
from trainer.runtime.data.sources.row_files import holds_rows, read_rows
from trainer.runtime.data.sources.row_shapes import RowReading, example_of
from trainer.runtime.data.sources.source_streams import BadRow, open_content, open_listed
from trainer.spec.data.request import SourceFile, compression

__all__ = [
    "BadRow",
    "Block",
    "RowReading",
    "Survey",
    "cut_at_line_ends",
    "holds_rows",
    "read_blocks",
    "read_unsurveyed_blocks",
    "survey",
]

READ_BYTES = 2**20
BLOCK_CHARS = 2**20
_BYTE_ORDER_MARK = "\ufeff"


class Block(NamedTuple):
    """An example, or a stretch of a long text."""

    content: Content
    weight: float  # of its source
    opens_document: bool
    where: str  # the file, or file:row


class Survey(NamedTuple):
    """What one pass over a file's bytes tells."""

    digest: bytes
    defect: str | None  # why a text file is not text; None for files of rows, which are judged row by row


def survey(file: SourceFile) -> Survey:
    """Digest and first defect of the file; InputError if it is not the file that was listed."""
    digest = blake2b(digest_size=32)
    is_plain_text = not holds_rows(file) and compression(file.path) is None
    judge = _TextJudge() if is_plain_text else None
    with open_listed(file) as stream:
        while chunk := stream.read(READ_BYTES):
            digest.update(chunk)
            if judge:
                judge.read(chunk)
    if judge:
        judge.read(b"")
        return Survey(digest.digest(), judge.defect)
    return Survey(digest.digest(), None if holds_rows(file) else _defect_of_content(file))


def _defect_of_content(file: SourceFile) -> str | None:
    """The first thing in compressed text that is not text; offsets are those of the text."""
    judge = _TextJudge()
    with open_content(file) as stream:
        while judge.defect is None and (chunk := stream.read(READ_BYTES)):
            judge.read(chunk)
    judge.read(b"")
    return judge.defect


class _TextJudge:
    """Is given text chunk by chunk, at the end an empty one; `defect` is the first thing that is not UTF-8 text."""

    def __init__(self) -> None:
        self.defect: str | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._offset = 0

    def read(self, chunk: bytes) -> None:
        if self.defect is None:
            self.defect = _defect(chunk, self._decoder, self._offset)
            self._offset += len(chunk)


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


def read_blocks(file: SourceFile, defect: str | None, reading: RowReading) -> Iterator[Block | BadRow]:
    """The blocks of all documents of `file`, in order; `defect` is what its survey found."""
    if defect is not None:
        yield BadRow(file.path, defect)
    elif holds_rows(file):
        for number, row in read_rows(file):
            where = f"{file.path}:{number}"
            content = row if isinstance(row, BadRow) else example_of(row, where, reading)
            if content is None:
                continue
            if isinstance(content, BadRow):
                yield content
            elif isinstance(content, str):
                yield from _blocks_of_text(iter([content]), file.weight, where)
            else:
                yield Block(content, file.weight, opens_document=True, where=where)
    else:
        yield from _blocks_of_text(_decoded(_chunks(file)), file.weight, file.path)


def read_unsurveyed_blocks(file: SourceFile, reading: RowReading) -> Iterator[Block | BadRow]:
    """As `read_blocks` of a file that nobody surveyed: text is used up to the megabyte before its first defect."""
    if holds_rows(file):
        yield from read_blocks(file, None, reading)
        return
    judge = _TextJudge()
    yield from _blocks_of_text(_decoded(_judged(_chunks(file), judge)), file.weight, file.path)
    if judge.defect is not None:
        yield BadRow(file.path, judge.defect)


def _chunks(file: SourceFile) -> Iterator[bytes]:
    with open_content(file) as stream:
        while chunk := stream.read(READ_BYTES):
            yield chunk


def _judged(chunks: Iterator[bytes], judge: _TextJudge) -> Iterator[bytes]:
    """Each chunk once the one after it is known to be text too; ends before a defect."""
    held = b""
    for chunk in chain(chunks, (b"",)):
        judge.read(chunk)
        if judge.defect is not None:
            return
        if held:
            yield held
        held = chunk


def _decoded(chunks: Iterator[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    is_start = True
    for chunk in chunks:
        text = decoder.decode(chunk)
        yield text.removeprefix(_BYTE_ORDER_MARK) if is_start else text
        is_start = False


def _blocks_of_text(texts: Iterator[str], weight: float, where: str) -> Iterator[Block]:
    """Blocks of one document; they end at line ends unless a line is longer than a block. Blank ones are nothing."""
    opens, carried = True, ""
    for text in texts:
        carried += text
        while len(carried) > BLOCK_CHARS:
            piece = next(cut_at_line_ends(carried, BLOCK_CHARS))
            yield Block(piece, weight, opens, where)
            opens, carried = False, carried[len(piece) :]
    if carried and not (opens and carried.isspace()):
        yield Block(carried, weight, opens, where)


def cut_at_line_ends(text: str, max_chars: int) -> Iterator[str]:
    """`text` in pieces of at most `max_chars`, each ending with a line where a line fits."""
    start = 0
    while start < len(text):
        end = start + max_chars
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end
