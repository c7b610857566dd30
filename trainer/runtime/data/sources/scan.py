"""Documents of text files and of rows, block by block: digests, bad rows, and the held-out part.

A text file is one document. Documents come in blocks of at most about a million characters, cut at line ends, so that
memory is bounded. `check_sources` reads each file once, for its digest and for the first byte that is not text: a text
file is good or bad as a whole. `scan_rows` then decodes every row, applies the job's policy for bad ones and chooses
the split. `units_of` yields what can be used, in order, each stretch with its side.

The split depends on content alone: a unit is held out if the hash of its content is below a threshold. New data,
another order or another folder never move a unit to the other side, and copies of a text are on one side, so that
nothing that is learned is scored. A unit is a whole document (each block of a very long one). Where few documents make
one side miss its share by more than a factor of two, units are pieces of 4096 characters cut at line ends; where even
this results in an empty side, the piece with the lowest or highest hash goes there.
"""

import codecs
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from hashlib import blake2b
from itertools import chain, groupby
from math import ceil
from typing import NamedTuple

from shardwise.trainer.runtime.data.sources import Content, TooLong, identity_of, is_plain_pair, size_of
from shardwise.trainer.runtime.data.sources.files import (
    BadRow,
    LeftOutRow,
    Row,
    holds_rows,
    is_columnar,
    open_content,
    open_listed,
    read_rows,
    refuse_changed,
)
from shardwise.trainer.runtime.data.sources.rows import FormatRow, RowReading, detect_shape, read_example
from shardwise.trainer.runtime.run.extension import load_hooks
from shardwise.trainer.spec.data.json_text import kind_of
from shardwise.trainer.spec.data.profile import PrepareRequest, SourceFile, compression
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import BadRows
from shardwise.trainer.spec.messages.extension import Hook

READ_BYTES = 2**20
BLOCK_CHARS = 2**20
PIECE_CHARS = 4096
NUM_BAD_ROWS_SHOWN = 5
FEW_BAD_ROWS = 0.1  # of all rows; more are no slips but another format
PROGRESS_INTERVAL_S = 1.0
_BYTE_ORDER_MARK = "\ufeff"
_HASH_BYTES = 8
_HASH_END = 2 ** (8 * _HASH_BYTES)


class Block(NamedTuple):
    """An example, or a stretch of a long text."""

    content: Content
    weight: float  # of its source
    opens_document: bool
    where: str  # the file, or file:row
    unread: tuple[str, ...] = ()  # columns that are no part of the example


Item = Block | BadRow | LeftOutRow


class Split(NamedTuple):
    """Units whose hash is below `threshold` are held out."""

    threshold: int
    piece_chars: int | None = None  # None: documents are not cut
    left_out: Container[int] = ()  # hashes of blocks that are on neither side


class Unit(NamedTuple):
    """A stretch of one document that lies on one side of the split."""

    content: Content
    weight: float
    opens_document: bool  # nothing of the same document precedes it directly on its side
    is_held_out: bool
    where: str  # the file, or file:row


ALL_TRAIN = Split(threshold=0)
ALL_HELD_OUT = Split(threshold=_HASH_END)


class CheckedFile(NamedTuple):
    """A file after one pass over its bytes."""

    source: SourceFile
    digest: bytes
    defect: str | None  # why a text file is not text; None for files of rows, which are judged row by row


class Sources(NamedTuple):
    """The files for training, those for evaluation alone, how rows are read, and where progress is reported."""

    train: Sequence[CheckedFile]
    held_out: Sequence[CheckedFile]
    reading: RowReading
    report: Callable[[str], None]
    window: Sequence[Item] | None = None  # of a stream: the part that was read; None: all of it
    drops_held_out: bool = False  # held-out units are neither learned nor scored


class RejectedRows:
    """The rows that cannot be used: all are counted, the first few retained."""

    def __init__(self) -> None:
        self.num = 0
        self._num_long = 0
        self._retained: list[BadRow] = []

    def add(self, row: BadRow) -> None:
        self.num += 1
        self._num_long += isinstance(row.reason, TooLong)
        if self.num <= NUM_BAD_ROWS_SHOWN:
            self._retained.append(row)

    def __str__(self) -> str:
        """The first of them in one line."""
        more = "" if self.num <= len(self._retained) else f"; and {self.num - len(self._retained)} more"
        return "; ".join(map(str, self._retained)) + more

    def check(self, request: PrepareRequest, *, num_rows: int) -> None:
        """InputError where they are more of all `num_rows` than the job allows."""
        skips = request.bad_rows is BadRows.SKIP
        allowed = request.bad_rows_max * num_rows if skips else 0
        if self.num <= allowed:
            return
        if self._num_long == num_rows:
            remedy = "raise train.seq_len, or cut them: every row needs more tokens"
        elif self._num_long > self.num / 2:
            share = ceil(100 * self.num / num_rows) / 100
            remedy = f"raise train.seq_len, or skip them with data.bad_rows=skip data.bad_rows_max={share}"
        elif self.num > FEW_BAD_ROWS * num_rows:
            remedy = "too many to skip: mend the file, or name its columns with data.fields"
        elif skips:
            remedy = (
                f"data.bad_rows_max allows {request.bad_rows_max:.3%}, {int(allowed)} rows; mend the others or raise it"
            )
        else:
            remedy = "mend them, or skip a few with data.bad_rows=skip"
        raise InputError(
            f"data: {self}"
            if num_rows == 1
            else f"data: {self.num} of {num_rows} rows cannot be used: {self}\n{remedy}"
        )


class Copies:
    """Held-out rows, of a source of their own, that are also training rows."""

    def __init__(self, held_out: Iterator[Item]) -> None:
        self._held_out = Counter(content_hash(item.content) for item in held_out if isinstance(item, Block))
        self._found: dict[int, int] = {}  # training rows, by their hash

    def note(self, block: Block) -> None:
        """Counts a training row, if it is one of the held-out ones."""
        key = content_hash(block.content)
        if key in self._held_out:
            self._found[key] = self._found.get(key, 0) + 1

    @property
    def num_held_out(self) -> int:
        """Held-out rows."""
        return self._held_out.total()

    @property
    def num_learned(self) -> int:
        """Held-out rows that are also training rows."""
        return sum(self._held_out[key] for key in self._found)

    @property
    def num_train(self) -> int:
        """Training rows that are also held out."""
        return sum(self._found.values())

    @property
    def keys(self) -> frozenset[int]:
        """Their hashes."""
        return frozenset(self._found)


class RowScan(NamedTuple):
    """Result of the pass over every row."""

    split: Split
    num_chars: int  # of text that can be used, both sides; tokens where the data came tokenised
    num_documents: int
    bad_rows: RejectedRows
    num_plain: int  # prompts and answers of plain text
    unread: Counter[str]  # rows by the keys that are no part of their tokens; rendering adds those of messages
    shortened: Counter[str]  # rows by the keys that the chat template leaves out of earlier answers
    left_out: Counter[str]  # rows by the mark that excludes them
    copies: "Copies | None" = None  # of a source of held-out rows

    @property
    def num_rows(self) -> int:
        """Rows, those that cannot be used included."""
        return self.num_documents + self.bad_rows.num


def check_sources(request: PrepareRequest, report: Callable[[str], None]) -> Sources:
    """Every file with its digest; InputError where their rows are of a shape that is not read."""
    listed = [*request.files, *request.eval_files]
    format_row = format_row_of(request)
    shape = detect_shape(listed, request.format, request.fields, format_row)
    progress = _Progress(report, "reading", listed)
    files = []
    for source in listed:
        files.append(check_file(source))
        progress.finished(source)
    num_train = len(request.files)
    reading = RowReading(shape, request.fields, request.vocab_size, format_row)
    return Sources(files[:num_train], files[num_train:], reading, report)


def check_file(file: SourceFile) -> CheckedFile:
    """Digest and first defect of the file; InputError if it is not the file that was listed."""
    digest = blake2b(digest_size=32)
    judge = None if holds_rows(file) else _TextJudge()
    is_compressed = compression(file.path) is not None
    with open_listed(file) as stream:
        while chunk := stream.read(READ_BYTES):
            digest.update(chunk)
            if judge and not is_compressed:
                judge.read(chunk)
    if judge and is_compressed:
        with open_content(file) as stream:
            while judge.defect is None and (chunk := stream.read(READ_BYTES)):
                judge.read(chunk)
    refuse_changed(file)  # while it was read
    if judge:
        judge.read(b"")
    return CheckedFile(file, digest.digest(), judge.defect if judge else None)


class _TextJudge:
    """Finds the first byte that is not UTF-8 text, in chunks of which the last is empty."""

    def __init__(self) -> None:
        self.defect: str | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._offset = 0  # of the chunk in the file's content

    def read(self, chunk: bytes) -> None:
        if self.defect is not None:
            return
        num_retained, nul = len(self._decoder.getstate()[0]), chunk.find(b"\0")
        try:
            self._decoder.decode(chunk if nul < 0 else chunk[:nul], final=not chunk or nul >= 0)
        except UnicodeDecodeError as error:
            byte, place = error.object[error.start], self._offset - num_retained + error.start
            self.defect = f"is not text: byte 0x{byte:02x} at offset {place} is not UTF-8 ({error.reason})"
        else:
            self.defect = None if nul < 0 else f"is not text: NUL byte at offset {self._offset + nul}"
        self._offset += len(chunk)


def format_row_of(request: PrepareRequest) -> FormatRow | None:
    """The function of the user's extensions file that rows go through; InputError from it where it fails."""
    hooks = load_hooks(request.extension)
    if hooks is None or not hooks.has(Hook.FORMAT_ROW):
        return None
    call = hooks.call

    def format_row(row: Row) -> Row | None:
        made = call(Hook.FORMAT_ROW, row)
        if made is not None and not isinstance(made, dict):
            raise InputError(f"extensions: format_row returned {kind_of(made)}; a row is a dict, or None to skip it")
        return made

    return format_row


def read_blocks(file: SourceFile, reading: RowReading, *, defect: str | None = None) -> Iterator[Item]:
    """The blocks of all documents of `file`, in order; `defect` is what `check_file` found."""
    if defect is not None:
        yield BadRow(file.path, defect)
    elif holds_rows(file):
        holds_columns = is_columnar(file)
        for number, row in read_rows(file):
            where = f"{file.path}:{number}"
            example = row if isinstance(row, BadRow) else read_example(row, where, reading, is_columnar=holds_columns)
            if isinstance(example, BadRow | LeftOutRow):
                yield example
            elif example is not None and isinstance(example.content, str):
                yield from _blocks_of_text(iter([example.content]), file.weight, where, example.unread)
            elif example is not None:
                yield Block(example.content, file.weight, opens_document=True, where=where, unread=example.unread)
    else:
        yield from _blocks_of_text(_decoded(_chunks(file)), file.weight, file.path)


def read_unchecked_blocks(file: SourceFile, reading: RowReading) -> Iterator[Item]:
    """As `read_blocks`, without `check_file` before: text is used up to the megabyte before its first defect."""
    if holds_rows(file):
        yield from read_blocks(file, reading)
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
    before = b""
    for chunk in chain(chunks, (b"",)):
        judge.read(chunk)
        if judge.defect is not None:
            return
        if before:
            yield before
        before = chunk


def _decoded(chunks: Iterator[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    is_start = True
    for chunk in chunks:
        text = decoder.decode(chunk)
        yield text.removeprefix(_BYTE_ORDER_MARK) if is_start else text
        is_start = False


def _blocks_of_text(texts: Iterator[str], weight: float, where: str, unread: tuple[str, ...] = ()) -> Iterator[Block]:
    """Blocks of one document; they end at line ends unless a line is longer than a block. Blank ones are nothing."""
    opens, carried = True, ""
    for text in texts:
        carried += text
        start, rest = 0, ""
        for piece in cut_at_line_ends(carried, BLOCK_CHARS):
            start, rest = start + len(piece), piece
            if start < len(carried):
                yield Block(piece, weight, opens, where, unread)
                opens, unread = False, ()
        carried = rest
    if carried and not (opens and carried.isspace()):
        yield Block(carried, weight, opens, where, unread)


def cut_at_line_ends(text: str, max_chars: int) -> Iterator[str]:
    """`text` in pieces of at most `max_chars`, each ending with a line where a line fits."""
    start = 0
    while start < len(text):
        end = start + max_chars
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def scan_rows(request: PrepareRequest, sources: Sources) -> RowScan:
    """The counts and the split; InputError where there is nothing to use or more bad rows than the job allows."""
    search = None if request.eval_share is None else SplitSearch(request.eval_share)
    num_chars = num_documents = num_plain = 0
    bad_rows, unread, left_out = RejectedRows(), Counter[tuple[str, ...]](), Counter[str]()
    copies = Copies(_read(sources, sources.held_out, "checking")) if sources.held_out else None
    train = ((item, search) for item in _noted(_read_train(sources, "checking"), copies))
    held_out = ((item, None) for item in _read(sources, sources.held_out, "checking"))
    for item, side in chain(train, held_out):
        if isinstance(item, BadRow):
            bad_rows.add(item)
            continue
        if isinstance(item, LeftOutRow):
            left_out[item.mark] += 1
            continue
        num_chars += size_of(item.content)
        num_documents += item.opens_document
        num_plain += is_plain_pair(item.content)
        unread[item.unread] += 1
        if side is not None:
            side.add(item)
    by_column = Counter[str]()
    for columns, count in unread.items():
        by_column.update(dict.fromkeys(columns, count))
    scan = RowScan(ALL_TRAIN, num_chars, num_documents, bad_rows, num_plain, by_column, Counter(), left_out, copies)
    bad_rows.check(request, num_rows=scan.num_rows)
    if not num_documents:
        first = request.files[0].path
        if left_out:
            raise InputError(f"data.train: every row is excluded ({', '.join(left_out)}); nothing would be learned")
        raise InputError(f"data.train: holds nothing but blanks ({len(request.files)} files, the first {first})")
    if request.drop_copies and copies is not None:
        scan = scan._replace(split=ALL_TRAIN._replace(left_out=copies.keys))
    return scan if search is None else scan._replace(split=search.split())


def _noted(items: Iterator[Item], copies: Copies | None) -> Iterator[Item]:
    """The same items, after those that are held out as well were counted."""
    for item in items:
        if copies is not None and isinstance(item, Block):
            copies.note(item)
        yield item


def units_of(sources: Sources, split: Split, verb: str) -> Iterator[Unit]:
    """Every stretch of every document that can be used, in order, with its side."""
    train = units((item for item in _read_train(sources, verb) if isinstance(item, Block)), split)
    yield from (unit for unit in train if not (unit.is_held_out and sources.drops_held_out))
    held_out = (item for item in _read(sources, sources.held_out, verb) if isinstance(item, Block))
    yield from units(held_out, ALL_HELD_OUT)


def _read_train(sources: Sources, verb: str) -> Iterator[Item]:
    return _read(sources, sources.train, verb) if sources.window is None else iter(sources.window)


def _read(sources: Sources, files: Sequence[CheckedFile], verb: str) -> Iterator[Item]:
    progress = _Progress(sources.report, verb, [file.source for file in files])
    for file in files:
        num_chars = 0
        try:
            for item in read_blocks(file.source, sources.reading, defect=file.defect):
                yield item
                num_chars += size_of(item.content) if isinstance(item, Block) else 0
                progress.reached(file.source, num_chars)
        except InputError:  # damage, which a change of the file explains
            refuse_changed(file.source)
            raise
        refuse_changed(file.source)
        progress.finished(file.source)


class _Progress:
    """Reports how far a pass over the files is, a line a second at most."""

    def __init__(self, report: Callable[[str], None], verb: str, files: Sequence[SourceFile]) -> None:
        self._report, self._verb = report, verb
        self._total_bytes = sum(file.size_bytes for file in files)
        self._finished_bytes = 0
        self._last_s = time.monotonic()

    def finished(self, file: SourceFile) -> None:
        self._finished_bytes += file.size_bytes
        self.reached(file, 0)

    def reached(self, file: SourceFile, num_chars: int) -> None:
        """Somewhere in `file`; characters stand for bytes, which they are in most text."""
        now_s = time.monotonic()
        if now_s - self._last_s >= PROGRESS_INTERVAL_S:
            self._last_s = now_s
            num_bytes = self._finished_bytes + min(num_chars, file.size_bytes)
            self._report(f"{self._verb} {num_bytes / 1e6:.1f} of {self._total_bytes / 1e6:.1f} MB")


class SplitSearch:
    """Finds the split that comes nearest to the requested share, from every block once."""

    def __init__(self, share: float) -> None:
        if not 0 < share < 1:
            raise InputError(f"data.eval: {share:.0%} cannot be held out; give a share above 0% and below 100%")
        self.share = share
        self.by_document = _Tally(Split(threshold=int(share * _HASH_END)))
        self.by_piece = _Tally(Split(threshold=int(share * _HASH_END), piece_chars=PIECE_CHARS))

    def add(self, block: Block) -> None:
        self.by_document.add(block)
        self.by_piece.add(block)

    def split(self) -> Split:
        """The split; InputError if there is nothing to divide."""
        held_out = self.by_document.held_out_share
        if self.share / 2 <= held_out <= self.share * 2 and (1 - self.share) / 2 <= 1 - held_out:
            return self.by_document.split
        pieces = self.by_piece
        if 0 < pieces.held_out_share < 1:
            return pieces.split
        if pieces.lowest_hash == pieces.highest_hash:
            raise InputError(
                f"data.eval: {self.share:.3g} of {pieces.size} characters cannot be held out: there is one piece;\n"
                "give more text, a file of its own with data.eval=FILE, or data.eval=none"
            )
        threshold = pieces.lowest_hash + 1 if pieces.held_out_share == 0 else pieces.highest_hash
        return Split(threshold=threshold, piece_chars=PIECE_CHARS)


class _Tally:
    """How much a split would hold out."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.size = self.held_out_size = 0  # characters or tokens
        self.lowest_hash, self.highest_hash = _HASH_END, 0

    def add(self, block: Block) -> None:
        for content in _cut(block.content, self.split):
            key = content_hash(content)
            self.lowest_hash, self.highest_hash = min(key, self.lowest_hash), max(key, self.highest_hash)
            size = size_of(content)
            self.size += size
            self.held_out_size += size if key < self.split.threshold else 0

    @property
    def held_out_share(self) -> float:
        return self.held_out_size / max(self.size, 1)


def units(blocks: Iterator[Block], split: Split) -> Iterator[Unit]:
    """The blocks of a split in order, cut where the side changes; neighbours on one side stay in one piece."""
    was_held_out = None
    for block in blocks:
        is_left_out = bool(split.left_out) and content_hash(block.content) in split.left_out
        if block.opens_document or is_left_out:
            was_held_out = None
        if is_left_out:
            continue
        pieces = _cut(block.content, split)
        for is_held_out, neighbours in groupby(pieces, key=lambda piece: content_hash(piece) < split.threshold):
            content = "".join(map(str, neighbours)) if isinstance(block.content, str) else block.content
            yield Unit(content, block.weight, is_held_out is not was_held_out, is_held_out, block.where)
            was_held_out = is_held_out


def _cut(content: Content, split: Split) -> Iterator[Content]:
    if not isinstance(content, str) or split.piece_chars is None:
        yield content
    else:
        yield from cut_at_line_ends(content, split.piece_chars)


def content_hash(content: Content) -> int:
    """64 bits that depend on the content alone."""
    return int.from_bytes(blake2b(identity_of(content), digest_size=_HASH_BYTES).digest(), "big")
