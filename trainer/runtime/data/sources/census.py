"""One look at every file and every row before anything is tokenised: what is there, what is bad, what is held out.

`survey_sources` reads each file once, for its digest and for bytes that are not text. `take_census` then decodes every
row, judges the bad ones by the job's policy and lets the split be chosen. `units_of` is how later passes read: what
can be used, in order, each stretch with its side.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from trainer.runtime.data.held_out import ALL_HELD_OUT, ALL_TRAIN, Split, SplitCensus, Unit, units
from trainer.runtime.data.sources.examples import size_of
from trainer.runtime.data.sources.row_files import Row, kind_of
from trainer.runtime.data.sources.row_shapes import FormatRow, RowReading, detect_shape
from trainer.runtime.data.sources.source_streams import BadRow
from trainer.runtime.data.sources.text_sources import Block, Survey, read_blocks, survey
from trainer.runtime.run.extension import load_hooks
from trainer.spec.data.request import PrepareRequest, SourceFile
from trainer.spec.errors import InputError
from trainer.spec.job.sections import BadRows
from trainer.spec.messages.extension import Hook

NUM_BAD_ROWS_SHOWN = 5
PROGRESS_INTERVAL_S = 1.0


class SurveyedFile(NamedTuple):
    """A file and what one pass over its bytes told."""

    source: SourceFile
    survey: Survey


class Sources(NamedTuple):
    """The files that are learned from, those that are only scored, how rows are read, and who hears of progress."""

    train: Sequence[SurveyedFile]
    held_out: Sequence[SurveyedFile]
    reading: RowReading
    report: Callable[[str], None]
    window: Sequence[Block | BadRow] | None = None  # of a stream: what was read of the training files; None: all is
    drops_held_out: bool = False  # what the split holds out is neither learned nor scored


class RejectedRows:
    """The rows that cannot be used: all are counted, the first few kept."""

    def __init__(self) -> None:
        self.num = 0
        self._kept: list[BadRow] = []

    def add(self, row: BadRow) -> None:
        """Notes one more."""
        self.num += 1
        if self.num <= NUM_BAD_ROWS_SHOWN:
            self._kept.append(row)

    def __str__(self) -> str:
        """The first of them in one line."""
        more = "" if self.num <= len(self._kept) else f"; and {self.num - len(self._kept)} more"
        return "; ".join(map(str, self._kept)) + more

    def check(self, request: PrepareRequest, *, num_rows: int) -> None:
        """InputError where they are more of all `num_rows` than the job lets pass."""
        skips = request.bad_rows is BadRows.SKIP
        allowed = request.bad_rows_max * num_rows if skips else 0
        if self.num <= allowed:
            return
        remedy = (
            f"data.bad_rows_max lets {request.bad_rows_max:.3%} pass, {int(allowed)} rows; mend the others or raise it"
            if skips
            else "mend them, or leave out a few with data.bad_rows=skip"
        )
        raise InputError(
            f"data: {self}"
            if num_rows == 1
            else f"data: {self.num} of {num_rows} rows cannot be used: {self}\n{remedy}"
        )


class Census(NamedTuple):
    """What the look at every row found."""

    split: Split
    num_chars: int  # of text that can be used, both sides; tokens where the data came tokenised
    num_documents: int
    bad_rows: RejectedRows

    @property
    def num_rows(self) -> int:
        """Those that cannot be used included."""
        return self.num_documents + self.bad_rows.num


def survey_sources(request: PrepareRequest, report: Callable[[str], None]) -> Sources:
    """Every file with its digest; InputError where their rows are of a shape that is not read."""
    listed = [*request.files, *request.eval_files]
    format_row = format_row_of(request)
    shape = detect_shape(listed, request.format, request.fields, format_row)
    progress = _Progress(report, "reading", listed)
    files = []
    for source in listed:
        files.append(SurveyedFile(source, survey(source)))
        progress.finished(source)
    num_train = len(request.files)
    reading = RowReading(shape, request.fields, request.vocab_size, format_row)
    return Sources(files[:num_train], files[num_train:], reading, report)


def format_row_of(request: PrepareRequest) -> FormatRow | None:
    """The function of the user's extensions file that rows go through; InputError from it where it fails."""
    hooks = load_hooks(request.extension)
    if hooks is None or not hooks.has(Hook.FORMAT_ROW):
        return None
    call = hooks.call

    def format_row(row: Row) -> Row | None:
        made = call(Hook.FORMAT_ROW, row)
        if made is not None and not isinstance(made, dict):
            raise InputError(
                f"extensions: format_row returned {kind_of(made)}; a row is a dict, and None leaves it out"
            )
        return made

    return format_row


def take_census(request: PrepareRequest, sources: Sources) -> Census:
    """The counts and the split; InputError where there is nothing to use or more bad rows than the job lets pass."""
    split_census = None if request.eval_share is None else SplitCensus(request.eval_share)
    num_chars = num_documents = 0
    bad_rows = RejectedRows()
    train = ((item, split_census) for item in _read_train(sources, "checking"))
    held_out = ((item, None) for item in _read(sources, sources.held_out, "checking"))
    for item, side in chain(train, held_out):
        if isinstance(item, BadRow):
            bad_rows.add(item)
            continue
        num_chars += size_of(item.content)
        num_documents += item.opens_document
        if side is not None:
            side.add(item)
    census = Census(ALL_TRAIN, num_chars, num_documents, bad_rows)
    bad_rows.check(request, num_rows=census.num_rows)
    if not num_documents:
        first = request.files[0].path
        raise InputError(f"data.train: holds nothing but blanks ({len(request.files)} files, the first {first})")
    return census if split_census is None else census._replace(split=split_census.split())


def units_of(sources: Sources, split: Split, verb: str) -> Iterator[Unit]:
    """Every stretch of every document that can be used, in order, with its side."""
    train = units((item for item in _read_train(sources, verb) if isinstance(item, Block)), split)
    yield from (unit for unit in train if not (unit.is_held_out and sources.drops_held_out))
    held_out = (item for item in _read(sources, sources.held_out, verb) if isinstance(item, Block))
    yield from units(held_out, ALL_HELD_OUT)


def _read_train(sources: Sources, verb: str) -> Iterator[Block | BadRow]:
    return _read(sources, sources.train, verb) if sources.window is None else iter(sources.window)


def _read(sources: Sources, files: Sequence[SurveyedFile], verb: str) -> Iterator[Block | BadRow]:
    progress = _Progress(sources.report, verb, [file.source for file in files])
    for file in files:
        num_chars = 0
        for item in read_blocks(file.source, file.survey.defect, sources.reading):
            yield item
            num_chars += size_of(item.content) if isinstance(item, Block) else 0
            progress.reached(file.source, num_chars)
        progress.finished(file.source)


class _Progress:
    """Says how far a pass over the files is, a line a second at most."""

    def __init__(self, report: Callable[[str], None], verb: str, files: Sequence[SourceFile]) -> None:
        self._report, self._verb = report, verb
        self._total_bytes = sum(file.size_bytes for file in files)
        self._finished_bytes = 0
        self._said_s = time.monotonic()

    def finished(self, file: SourceFile) -> None:
        self._finished_bytes += file.size_bytes
        self._say(self._finished_bytes)

    def reached(self, file: SourceFile, num_chars: int) -> None:
        """Somewhere in `file`; characters stand for bytes, which they are in most text."""
        self._say(self._finished_bytes + min(num_chars, file.size_bytes))

    def _say(self, num_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= PROGRESS_INTERVAL_S:
            self._said_s = now_s
            self._report(f"{self._verb} {num_bytes / 1e6:.1f} of {self._total_bytes / 1e6:.1f} MB")
