"""Windows of a stream as rows on disk: the first one, which settles how, and those that follow it.

No file is read to its end before it is trained on: nothing takes a digest of the content, and the shape of the rows is
that of the first rows of each source. What is held out is decided by content, as ever, at the rule that fits the first
window; the held-out rows are those of the first window, and what a later one would hold out is never learned.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from trainer.runtime.data.held_out import Split
from trainer.runtime.data.prepared_rows import Work, write_rows
from trainer.runtime.data.sources.census import Census, Sources, SurveyedFile, format_row_of, take_census
from trainer.runtime.data.sources.row_files import holds_rows
from trainer.runtime.data.sources.row_shapes import RowReading, detect_shape
from trainer.runtime.data.sources.text_sources import survey
from trainer.runtime.data.stream.files import FileFetcher
from trainer.runtime.data.stream.reading import Item, StreamReader
from trainer.runtime.data.stream.values import ENTRY_NAME, Place, StreamStart, Window, window_folder
from trainer.runtime.data.tokenizer import TextTokenizer, load_tokenizer
from trainer.spec import codec
from trainer.spec.data.request import PrepareRequest, SourceFile, content_suffix
from trainer.spec.job.sections import DataFormat

_PARTIAL = ".partial"


class FirstWindow:
    """Reads the first window of a stream, and says what it settled."""

    def __init__(self, request: PrepareRequest, fetcher: FileFetcher, report: Callable[[str], None]) -> None:
        assert request.window_bytes is not None
        self.window_bytes = request.window_bytes
        reading = _reading_of(request, _detected_shape(request, fetcher))
        held_out = [SurveyedFile(file, survey(file)) for file in request.eval_files]
        self.sources = Sources((), held_out, reading, report)
        self._reader = StreamReader(request.files, request.window_bytes, (), reading, fetcher)
        self._begin = self._reader.places

    def read(self) -> Sequence[Item]:
        """What is in it."""
        self.sources.report("reading the first window of the stream")
        return self._reader.read_window()

    def start(self, num_examples: int, census: Census) -> StreamStart:
        """What the windows after it are made by, once rows were made of it."""
        first = Window(
            number=0,
            num_examples=num_examples,
            begin=self._begin,
            end=self._reader.places,
            num_bad_rows=census.bad_rows.num,
            bad_rows=str(census.bad_rows),
        )
        split = census.split
        return StreamStart(
            format=self.sources.reading.format, threshold=split.threshold, piece_chars=split.piece_chars, first=first
        )


class WindowWriter:
    """Writes the windows after the first into a folder, one after the other."""

    def __init__(
        self, listed: PrepareRequest, start: StreamStart, cache_dir: Path, folder: Path, begin: Sequence[Place]
    ) -> None:
        assert listed.window_bytes is not None
        self._request = replace(listed, eval_share=None, eval_source=None, eval_files=())
        self._split = Split(start.threshold, start.piece_chars)
        self._reading = _reading_of(listed, start.format)
        self._reader = StreamReader(listed.files, listed.window_bytes, begin, self._reading, FileFetcher(folder))
        self._tokenizer_folder, self._folder = cache_dir / "tokenizer", folder
        self._tokenizer = self._load_tokenizer()

    def write(self, number: int) -> Window:
        """The next window, whole in its folder when this returns; InputError as of any data."""
        partial = self._folder / _PARTIAL
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        if self._tokenizer is not None:
            (partial / "tokenizer").symlink_to(self._tokenizer_folder.absolute(), target_is_directory=True)
        begin, items = self._reader.places, self._reader.read_window()
        sources = Sources((), (), self._reading, _silent, window=items, drops_held_out=True)
        census = take_census(self._request, sources)._replace(split=self._split)
        rows = write_rows(Work(self._request, sources, "", partial), census, self._tokenizer)
        window = Window(
            number=number,
            num_examples=len(rows.train) // (2 if self._reading.format is DataFormat.PREFERENCE else 1),
            begin=begin,
            end=self._reader.places,
            num_bad_rows=census.bad_rows.num,
            bad_rows=str(census.bad_rows) if census.bad_rows.num else "",
        )
        codec.write(partial / ENTRY_NAME, window)
        partial.rename(window_folder(self._folder, number))
        return window

    def _load_tokenizer(self) -> TextTokenizer | None:
        return load_tokenizer(self._tokenizer_folder) if self._tokenizer_folder.is_dir() else None


def _silent(_line: str) -> None:
    """Nobody watches the producer."""


def identity_in_stream(file: SourceFile) -> tuple[str, int, int, float, int]:
    """What a file of a stream is known by: its content is not read."""
    name, mtime_ns = (file.hub, 0) if file.hub is not None else (Path(file.path).name, file.mtime_ns)
    return name, file.size_bytes, mtime_ns, file.weight, file.source


def _reading_of(request: PrepareRequest, shape: DataFormat) -> RowReading:
    return RowReading(shape, request.fields, request.vocab_size, format_row_of(request))


def _detected_shape(request: PrepareRequest, fetcher: FileFetcher) -> DataFormat:
    """The shape of the first file of rows of each source and suffix, and of the files that are only scored."""
    firsts = {(file.source, content_suffix(file.path), holds_rows(file)): file for file in reversed(request.files)}
    looks_inside = request.format is DataFormat.AUTO
    files = [fetcher.fetch(file) if looks_inside and holds_rows(file) else file for file in firsts.values()]
    return detect_shape([*files[::-1], *request.eval_files], request.format, request.fields, format_row_of(request))
