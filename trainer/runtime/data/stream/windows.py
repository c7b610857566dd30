"""Windows of a stream: read from the files of its sources, written as rows, and prepared ahead of the ranks.

The stream is the listed files in order. A window is the consecutive documents whose text reaches its size; a longer
text is cut at a line end, and its rest begins the next window. Of several sources each gives a share of every window,
its weight times its bytes; their documents are mixed when the rows are shuffled. A source that ends begins again, its
files in another order; within one window it is not read more often than its weight allows, so that small data give
small windows. A place counts what was read of a file: going on there reads the file again up to it, and tokenises
nothing.

No file is read to its end before training starts: the shape of the rows is that of the first rows of each source. The
split is that of the first window, as are the held-out rows; what a later window would hold out is dropped.

Files of the hub are fetched when they are read and removed afterwards; at its commit a file never changes. Only listed
names are fetched: rows and text, by suffix, never a script.

`python -m shardwise.trainer.runtime.data.stream.windows REQUEST.json` is one process per machine, started by its first
rank (`stream.rows`) and ended with it. It builds a window while at most WINDOWS_AHEAD beyond the one in use are there,
and removes those that no rank reads any more. A window is built under another name and renamed when it is complete. An
error is written to `error.json` for the ranks.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from msgspec.structs import replace

from shardwise.trainer.runtime.data.cache import remove_locked, scratch_folder
from shardwise.trainer.runtime.data.prepare import Work, build, prepare_cached, write_rows
from shardwise.trainer.runtime.data.sources import size_of
from shardwise.trainer.runtime.data.sources.files import holds_rows
from shardwise.trainer.runtime.data.sources.rows import RowReading, detect_shape
from shardwise.trainer.runtime.data.sources.scan import (
    Block,
    Item,
    Sources,
    Split,
    check_file,
    format_row_of,
    read_unchecked_blocks,
    scan_rows,
)
from shardwise.trainer.runtime.data.stream.rows import (
    ENTRY_NAME,
    ERROR_NAME,
    START_NAME,
    WINDOWS_AHEAD,
    Failure,
    Place,
    ProducerRequest,
    StreamStart,
    Window,
    window_folder,
)
from shardwise.trainer.runtime.data.tokenizer import load_tokenizer
from shardwise.trainer.runtime.run.process import end_with_parent
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.data.order import permuted
from shardwise.trainer.spec.data.profile import (
    LISTING_NAME,
    DataProfile,
    PrepareRequest,
    SourceFile,
    content_suffix,
    stream_note,
)
from shardwise.trainer.spec.data.shapes import SHAPES
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, ShardwiseError
from shardwise.trainer.spec.job.sections import DataFormat

_PARTIAL = ".partial"


class FileFetcher:
    """Fetches files into a folder, which the caller removes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def opened(self, file: SourceFile) -> Iterator[SourceFile]:
        """The file as it is on this machine; a fetched one is removed afterwards."""
        if not file.is_remote:
            yield file
            return
        try:
            yield self.fetch(file)
        finally:
            shutil.rmtree(self._place(file), ignore_errors=True)

    def fetch(self, file: SourceFile) -> SourceFile:
        """The file on this machine, fetched where it is not there yet; EnvironmentFaultError where it cannot be."""
        if not file.is_remote:
            return file
        repository, commit, name = _parsed(file.path)
        path = self._place(file) / name
        if not path.is_file():
            _download(repository, commit, name, self._place(file))
        status = path.stat()
        if status.st_size != file.size_bytes:
            raise EnvironmentFaultError(
                f"{file.path}: has {status.st_size} bytes, the hub listed {file.size_bytes}; start again with --resume"
            )
        return replace(file, path=str(path), mtime_ns=status.st_mtime_ns)

    def _place(self, file: SourceFile) -> Path:
        return self._folder / f"fetched-{blake2b(file.path.encode(), digest_size=8).hexdigest()}"


class StreamReader:
    """All sources of a stream, from a place in each of them."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        window_bytes: int,
        begin: Sequence[Place],
        reading: RowReading,
        fetcher: FileFetcher,
    ) -> None:
        groups = grouped(files)
        places = begin or [Place()] * len(groups)
        self._sources = [
            _SourceReader(group, place, reading, fetcher) for group, place in zip(groups, places, strict=True)
        ]
        sampled = [sum(file.size_bytes for file in group) * group[0].weight for group in groups]  # bytes of a pass
        size = window_bytes if len(groups) == 1 else min(window_bytes, math.ceil(sum(sampled)))
        self._sizes = [size * num_bytes / sum(sampled) for num_bytes in sampled]
        self._num_passes = [1 if len(groups) == 1 else math.ceil(group[0].weight) for group in groups]

    @property
    def places(self) -> tuple[Place, ...]:
        """Where the next window begins."""
        return tuple(source.place for source in self._sources)

    def read_window(self) -> list[Item]:
        """The next window, its sources one after the other."""
        return [
            item
            for source, size, num_passes in zip(self._sources, self._sizes, self._num_passes, strict=True)
            for item in source.read(size, num_passes)
        ]


def grouped(files: Sequence[SourceFile]) -> list[list[SourceFile]]:
    """The files of each source."""
    groups: dict[int, list[SourceFile]] = {}
    for file in files:
        groups.setdefault(file.source, []).append(file)
    return list(groups.values())


class _SourceReader:
    """The documents of one source, without an end."""

    def __init__(self, files: Sequence[SourceFile], place: Place, reading: RowReading, fetcher: FileFetcher) -> None:
        self._files, self._reading, self._fetcher = files, reading, fetcher
        self.place = place
        self._items = self._read_from(place)

    def read(self, size: float, num_passes: int) -> Iterator[Item]:
        """Items until they have `size` characters, or until `num_passes` passes began and ended here."""
        num_chars = num_whole = 0
        begins_pass, opens = self.place == Place(num_passes=self.place.num_passes), True
        while num_chars < size and num_whole < num_passes:
            item, self.place = next(self._items)
            if item is None:
                num_whole += begins_pass
                begins_pass = True
            elif isinstance(item, Block):
                num_chars += size_of(item.content)
                yield item._replace(opens_document=opens or item.opens_document)
                opens = False
            else:
                yield item

    def _read_from(self, place: Place) -> Iterator[tuple[Item | None, Place]]:
        """Each item with the place after it; None at the end of a pass."""
        num_passes, first_file, num_items = place.num_passes, place.file, place.num_items
        while True:
            for number in range(first_file, len(self._files)):
                # the first pass is in the order of the listing
                mixed = permuted(number, num_rows=len(self._files), seed=0, epoch=num_passes) if num_passes else number
                file = self._files[mixed]
                for count, item in enumerate(self._read_file(file), start=1):
                    if count > num_items:
                        yield item, Place(num_passes=num_passes, file=number, num_items=count)
                num_items = 0
            num_passes, first_file = num_passes + 1, 0
            yield None, Place(num_passes=num_passes)

    def _read_file(self, file: SourceFile) -> Iterator[Item]:
        with self._fetcher.opened(file) as local:
            alike = replace(local, weight=1.0)  # the share of a source is that of its windows
            for item in read_unchecked_blocks(alike, self._reading):
                yield item._replace(where=item.where.replace(local.path, file.path))


def prepare_first_window(request: PrepareRequest, report: Callable[[str], None]) -> DataProfile:
    """The profile of the first window, prepared in the cache as any data, with what later windows are built by."""
    assert request.window_bytes is not None
    with scratch_folder(Path(request.cache_root, "streams"), "first") as scratch:
        fetcher = FileFetcher(scratch)
        reading = _reading_of(request, _detected_shape(request, fetcher))
        reader = StreamReader(request.files, request.window_bytes, (), reading, fetcher)
        sources = Sources((), [check_file(file) for file in request.eval_files], reading, report)
        return prepare_cached(request, sources, lambda work: _build_first(work, reader))


def _build_first(work: Work, reader: StreamReader) -> DataProfile:
    """Fills the folder with the first window of a stream."""
    assert work.request.window_bytes is not None
    work.sources.report("reading the first window of the stream")
    begin, window = reader.places, reader.read_window()
    profile, scan = build(work._replace(sources=work.sources._replace(window=window)))
    first = Window(
        number=0,
        num_examples=profile.num_rows,
        begin=begin,
        end=reader.places,
        num_bad_rows=scan.bad_rows.num,
        bad_rows=str(scan.bad_rows),
    )
    split = scan.split
    start = StreamStart(format=work.shape, threshold=split.threshold, piece_chars=split.piece_chars, first=first)
    codec.write(work.folder / START_NAME, start)
    return replace(
        profile,
        is_stream=True,
        longest_row=work.request.seq_len,  # the next window may have one
        notes=(*profile.notes, stream_note(work.request.window_bytes, eval_share=work.request.eval_share)),
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
        has_tokenizer = self._tokenizer_folder.is_dir()
        self._tokenizer = load_tokenizer(self._tokenizer_folder) if has_tokenizer else None

    def write(self, number: int) -> Window:
        """The next window, whole in its folder when this returns; InputError as of any data."""
        partial = self._folder / _PARTIAL
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        if self._tokenizer is not None:
            (partial / "tokenizer").symlink_to(self._tokenizer_folder.absolute(), target_is_directory=True)
        begin, items = self._reader.places, self._reader.read_window()
        sources = Sources((), (), self._reading, lambda _: None, window=items, drops_held_out=True)
        scan = scan_rows(self._request, sources)._replace(split=self._split)
        rows = write_rows(Work(self._request, sources, "", partial), scan, self._tokenizer)
        window = Window(
            number=number,
            num_examples=len(rows.train) // SHAPES[self._reading.format].rows_per_example,
            begin=begin,
            end=self._reader.places,
            num_bad_rows=scan.bad_rows.num,
            bad_rows=str(scan.bad_rows) if scan.bad_rows.num else "",
        )
        codec.write(partial / ENTRY_NAME, window)
        partial.rename(window_folder(self._folder, number))
        return window


def _reading_of(request: PrepareRequest, shape: DataFormat) -> RowReading:
    return RowReading(shape, request.fields, request.vocab_size, format_row_of(request))


def _detected_shape(request: PrepareRequest, fetcher: FileFetcher) -> DataFormat:
    """The shape of the first file of rows of each source and suffix, and of the files that are only scored."""
    firsts = {(file.source, content_suffix(file.path), holds_rows(file)): file for file in reversed(request.files)}
    looks_inside = request.format is DataFormat.AUTO
    files = [fetcher.fetch(file) if looks_inside and holds_rows(file) else file for file in firsts.values()]
    return detect_shape([*files[::-1], *request.eval_files], request.format, request.fields, format_row_of(request))


_HUB = "hf://datasets/"
_PAUSES_S = (10.0, 60.0)  # between attempts at one file, in each of which the library tries six times in half a minute


def _parsed(path: str) -> tuple[str, str, str]:
    """(ORG/NAME, commit, file) of hf://datasets/ORG/NAME@COMMIT/file."""
    repository, _, rest = path.removeprefix(_HUB).partition("@")
    commit, _, name = rest.partition("/")
    return repository, commit, name


def _download(repository: str, commit: str, name: str, folder: Path) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    transport_error = HfHubHTTPError.__bases__[0]  # of whichever HTTP library this version uses
    for pause_s in (*_PAUSES_S, None):
        try:
            hf_hub_download(repository, name, repo_type="dataset", revision=commit, local_dir=folder)
        except (transport_error, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                reason = os.strerror(error.errno)
                raise EnvironmentFaultError(f"{folder}: {name} cannot be written there: {reason}") from error
            if pause_s is None or _is_final(error):
                raise EnvironmentFaultError(
                    f"data.train: {repository}@{commit}: {name} cannot be fetched: {_summary(error)}\n"
                    "mend that, and go on from the last checkpoint with --resume"
                ) from error
            time.sleep(pause_s)
        else:
            shutil.rmtree(folder / ".cache", ignore_errors=True)
            return


def _summary(error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError):
        return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_final(error: Exception) -> bool:
    """True if a retry would not help: the hub has refused the file."""
    from huggingface_hub import constants, errors

    refusals = (errors.EntryNotFoundError, errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
    is_refusal = isinstance(error, refusals) and not isinstance(error, errors.LocalEntryNotFoundError)
    return is_refusal or bool(constants.HF_HUB_OFFLINE)


POLL_S = 0.05
NICENESS = 5  # a step that waits for a core costs more than a window that comes later


def produce(request: ProducerRequest) -> None:
    """Builds windows for ever; ShardwiseError where one cannot be built."""
    cache_dir, folder = Path(request.cache_dir), Path(request.folder)
    writer = WindowWriter(
        codec.read(cache_dir / LISTING_NAME, PrepareRequest),
        codec.read(cache_dir / START_NAME, StreamStart),
        cache_dir,
        folder,
        request.begin,
    )
    number, oldest = request.number, request.number
    while True:
        in_use = window_in_use(folder, num_readers=request.num_readers)
        for done in range(oldest, min(in_use, number)):
            shutil.rmtree(window_folder(folder, done), ignore_errors=True)
        oldest = max(oldest, min(in_use, number))
        if number > in_use + WINDOWS_AHEAD:
            time.sleep(POLL_S)
            continue
        writer.write(number)
        number += 1


def window_in_use(folder: Path, *, num_readers: int) -> int:
    """The oldest window that a rank of this machine reads from; 0 until all have published theirs."""
    numbers = []
    for reader in range(num_readers):
        try:
            numbers.append(int((folder / f"reader-{reader}").read_text()))
        except FileNotFoundError:
            return 0
    return min(numbers)


def main(arguments: Sequence[str]) -> int:
    """Serves the request in the first file; returns the exit code of the error."""
    request = codec.read(Path(arguments[0]), ProducerRequest)
    try:
        if os.getppid() != request.parent_pid:  # it ended before this process could watch it
            raise SystemExit(ExitCode.ENVIRONMENT)
        try:
            produce(request)
        except OSError as error:
            place = error.filename or request.folder
            remedy = "a stream needs room for its windows there"
            raise EnvironmentFaultError(f"{place}: {error.strerror}; {remedy}") from error
    except ShardwiseError as error:
        failure = Failure(message=str(error), exit_code=int(error.exit_code))
        codec.write(Path(request.folder, ERROR_NAME), failure)
        return error.exit_code
    except SystemExit:  # requested to end: no rank reads here any more
        remove_locked(Path(request.folder))
        raise
    return ExitCode.DONE


if __name__ == "__main__":
    end_with_parent()
    os.nice(NICENESS)
    try:
        sys.exit(main(sys.argv[1:]))
    except SystemExit as ending:
        os._exit(int(ending.code or 0))  # a thread may still be in native code; nothing is left to clean up
