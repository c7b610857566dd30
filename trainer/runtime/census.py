"""One look at every file and every row before anything is tokenised: what is there, what is bad, what is held out.

`survey_sources` reads each file once, for its digest and for bytes that are not text. `take_census` then decodes every
row, judges the bad ones by the job's policy and lets the split be chosen. `units_of` is how later passes read: what
can be used, in order, each stretch with its side.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from trainer.runtime.held_out import ALL_HELD_OUT, ALL_TRAIN, Split, SplitCensus, Unit, units
from trainer.runtime.text_sources import BadRow, Block, RowReading, Survey, detect_format, read_blocks, survey
from trainer.spec.data_request import PrepareRequest, SourceFile
from trainer.spec.errors import InputError
from trainer.spec.job import BadRows

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


class Census(NamedTuple):
    """What the look at every row found."""

    split: Split
    num_chars: int  # of text that can be used, both sides; tokens where the data came tokenised
    num_documents: int
    bad_rows: Sequence[BadRow]  # the first few
    num_bad_rows: int

    @property
    def shown_bad_rows(self) -> str:
        """The first bad rows in one line."""
        more = "" if self.num_bad_rows <= len(self.bad_rows) else f"; and {self.num_bad_rows - len(self.bad_rows)} more"
        return "; ".join(map(str, self.bad_rows)) + more


def survey_sources(request: PrepareRequest, report: Callable[[str], None]) -> Sources:
    """Every file with its digest; InputError where their rows are of a shape that is not read."""
    listed = [*request.files, *request.eval_files]
    shape = detect_format(listed, request.format, request.fields)
    progress = _Progress(report, "reading", listed)
    files = []
    for source in listed:
        files.append(SurveyedFile(source, survey(source)))
        progress.finished(source)
    num_train = len(request.files)
    reading = RowReading(shape, request.fields, request.vocab_size)
    return Sources(files[:num_train], files[num_train:], reading, report)


def take_census(request: PrepareRequest, sources: Sources) -> Census:
    """The counts and the split; InputError where there is nothing to use or more bad rows than the job lets pass."""
    split_census = None if request.eval_share is None else SplitCensus(request.eval_share)
    num_chars = num_documents = num_bad_rows = 0
    shown: list[BadRow] = []
    train = ((item, split_census) for item in _read(sources, sources.train, "checking"))
    held_out = ((item, None) for item in _read(sources, sources.held_out, "checking"))
    for item, side in chain(train, held_out):
        if isinstance(item, BadRow):
            num_bad_rows += 1
            shown += [item] if num_bad_rows <= NUM_BAD_ROWS_SHOWN else []
            continue
        num_chars += len(item.content)
        num_documents += item.opens_document
        if side is not None:
            side.add(item)
    census = Census(ALL_TRAIN, num_chars, num_documents, shown, num_bad_rows)
    _check_rows(request, census)
    return census if split_census is None else census._replace(split=split_census.split())


def units_of(sources: Sources, split: Split, verb: str) -> Iterator[Unit]:
    """Every stretch of every document that can be used, in order, with its side."""
    for files, rule in ((sources.train, split), (sources.held_out, ALL_HELD_OUT)):
        yield from units((item for item in _read(sources, files, verb) if isinstance(item, Block)), rule)


def _read(sources: Sources, files: Sequence[SurveyedFile], verb: str) -> Iterator[Block | BadRow]:
    progress = _Progress(sources.report, verb, [file.source for file in files])
    for file in files:
        num_chars = 0
        for item in read_blocks(file.source, file.survey.defect, sources.reading):
            yield item
            num_chars += len(item.content) if isinstance(item, Block) else 0
            progress.reached(file.source, num_chars)
        progress.finished(file.source)


def _check_rows(request: PrepareRequest, census: Census) -> None:
    num_rows = census.num_documents + census.num_bad_rows
    skips = request.bad_rows is BadRows.SKIP
    allowed = request.bad_rows_max * num_rows if skips else 0
    if census.num_bad_rows > allowed:
        remedy = (
            f"data.bad_rows_max lets {request.bad_rows_max:.3%} pass, {int(allowed)} rows; mend the others or raise it"
            if skips
            else "mend them, or leave out a few with data.bad_rows=skip"
        )
        raise InputError(
            f"data: {census.shown_bad_rows}"
            if num_rows == 1
            else f"data: {census.num_bad_rows} of {num_rows} rows cannot be used: {census.shown_bad_rows}\n{remedy}"
        )
    if not census.num_documents:
        first = request.files[0].path
        raise InputError(f"data.train: holds nothing but blanks ({len(request.files)} files, the first {first})")


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
