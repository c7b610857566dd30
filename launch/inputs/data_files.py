"""Files of a source of data: listing, sizes and the first row only, so that planning never tokenises anything.

A source is a file, a folder, a data set of the Hugging Face hub, or the built-in name `python-stdlib`. A name is looked
for on this machine first. Of a folder, files are selected by suffix, with all sub-folders, sorted, without hidden and
empty files:

- a folder that `save_to_disk` made: the files it lists, of its split `train` or the requested one
- a folder of rows, or any folder with a subset or split: that part, as on the hub (see `dataset_files`)
- any other: its text, and its rows as well; `.json` files, which in a folder of text are usually settings, only if
  there is nothing else

`python-stdlib` is four megabytes of the Python standard library's own source code: text that is on every machine, of
one kind, large enough to learn from and small enough for a first run that starts within seconds. Left out are tests,
demonstrations, generated tables (`encodings`, `pydoc_data`) and modules that not every version of Python has, so that
it is much the same text from 3.11 to 3.13.

Of the first row only the columns are read, for a plan of data that is not prepared yet: the first row of a file of JSON
lines, the header of a CSV, the schema of a Parquet file. Preparation reads more rows, and its result replaces this one.
"""

import errno
import os
import re
import shlex
import stat
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, getincrementaldecoder
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from shardwise.launch.inputs.dataset_files import (
    SETTINGS_FILES,
    Part,
    dataset_files,
    files_of_part,
    is_dataset_id,
    list_dataset,
    read_readme,
    saved_files,
)
from shardwise.launch.inputs.hub import hub_cache
from shardwise.trainer.spec.data.json_text import decode_json, kind_of
from shardwise.trainer.spec.data.profile import ROW_SUFFIXES, PrepareRequest, SourceFile, compression, content_suffix
from shardwise.trainer.spec.data.shapes import Encoding, column_names, encoding_of, fitting_shapes, shape_of_row
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.kinds import one_of
from shardwise.trainer.spec.job.sections import BadRows, DataFormat
from shardwise.trainer.spec.job.sources import DataSource

PYTHON_STDLIB = "python-stdlib"
STDLIB_MAX_BYTES = 4_000_000
STDLIB_MIN_BYTES = 500_000
STDLIB_EXCLUDED = frozenset({
    "test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload", "__pycache__",
    "lib2to3", "idlelib", "turtledemo", "distutils", "ensurepip", "encodings", "pydoc_data",
})  # fmt: skip

TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html", ".htm", ".xml",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala", ".swift",
    ".js", ".ts", ".jsx", ".tsx", ".rb", ".pl", ".php", ".lua", ".r", ".jl", ".hs", ".ml", ".clj", ".ex", ".erl",
    ".sh", ".sql", ".yaml", ".yml", ".toml", ".f90", ".lean", ".v",
})  # fmt: skip
_DOCUMENTATION = frozenset({"README.md", "LICENSE.txt", "LICENSE.md"})  # in folders of rows
_NEVER_READ = r"\.(bin|pt|pth|pkl|pickle|npy|npz|zip|tar|tgz|rar|7z|docx?|xlsx?|pdf|db|sqlite3?|safetensors)\Z"
# Measured on Python sources, on prose and on Markdown (levels as the programs choose them); each within a fifth of it.
CONTENT_PER_BYTE = {".gz": 3.6, ".zst": 3.3, ".bz2": 4.5, ".xz": 4.6, ".parquet": 2.4}
_BEGINNING = 4096  # bytes
_LEGIBLE = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")  # the suffixes of rows whose beginning is text
_UTF_16 = (BOM_UTF16_LE, BOM_UTF16_BE)
_LONGEST_ROW = 2**20  # bytes; a longer one is not parsed
_LINES = (".jsonl", ".ndjson", ".csv", ".tsv")
_SAMPLED_PLACES, _SAMPLED_AT_A_PLACE, _GOLDEN = 20, 15, 0.618034
_LARGEST_ARRAY = 2**26  # bytes; of a longer one, which may come of a small compressed file, rows are not counted
_MODULES: Mapping[str, str] = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}  # milliseconds each, so imported on use


class FoundFile(NamedTuple):
    """A file on disk."""

    path: str
    size_bytes: int
    mtime_ns: int
    ctime_ns: int | None = None
    hub: str | None = None  # as in SourceFile


class _Listed(NamedTuple):
    """A source's files, and its name on the hub."""

    files: Sequence[FoundFile]
    reference: str | None = None  # ORG/NAME@COMMIT


def list_files(request: PrepareRequest) -> PrepareRequest:
    """The request with `files` and `eval_files` filled in from its sources on disk.

    A data set of the hub that is not in its cache is downloaded; of a streamed one only the names are requested.
    """
    eval_sources = (
        []
        if request.eval_source is None
        else [DataSource(source=request.eval_source, subset=request.eval_subset, split=request.eval_split)]
    )
    cache = hub_cache(None if request.hub_home is None else Path(request.hub_home))
    streams = request.window_bytes is not None
    train = [
        (source, _list_source(source, setting="data.train", cache=cache, streams=streams)) for source in request.sources
    ]
    held_out = [(source, _list_source(source, setting="data.eval", cache=cache)) for source in eval_sources]
    references = (listed.reference for _, listed in (*train, *held_out))
    return msgspec.structs.replace(
        request,
        files=_weighted(train, streams=streams),
        eval_files=_weighted(held_out),
        revisions=tuple(dict.fromkeys(reference for reference in references if reference is not None)),
    )


def is_of_hub(source: str) -> bool:
    """True if a source is looked up on the hub, because nothing on this machine has its name."""
    if source == PYTHON_STDLIB or Path(source).expanduser().exists():
        return False
    return not _names_file(source) and is_dataset_id(source)


def source_bytes(listed: PrepareRequest) -> int:
    """Bytes of the listed training files when decompressed, each multiplied by its weight."""
    return round(sum(file.size_bytes * _content_per_byte(file.path) * file.weight for file in listed.files))


def _content_per_byte(path: str) -> float:
    """Usual ratio of a compressed file's content to its size; nothing is read."""
    return CONTENT_PER_BYTE.get(os.path.splitext(path.lower())[1], 1.0)  # noqa: PTH122 - hundreds of paths at every start


def _weighted(listed: Sequence[tuple[DataSource, _Listed]], *, streams: bool = False) -> tuple[SourceFile, ...]:
    """The files of the sources; those of a stream are compared by size and time alone, as it is never read whole."""
    return tuple(
        SourceFile(
            path=found.path,
            size_bytes=found.size_bytes,
            mtime_ns=found.mtime_ns,
            ctime_ns=None if streams else found.ctime_ns,
            weight=source.weight,
            source=number,
            hub=found.hub,
        )
        for number, (source, files) in enumerate(listed)
        for found in files.files
    )


def _list_source(source: DataSource, *, setting: str, cache: Path, streams: bool = False) -> _Listed:
    if not source.weight > 0:
        raise InputError(f"{setting}: weight {source.weight:g} of {source.source}: must be above 0")
    part = Part(source.subset, source.split)
    if source.source == PYTHON_STDLIB:
        _refuse_part(part, f"{setting}: {PYTHON_STDLIB}")
        return _Listed(python_stdlib_files(Path(os.__file__).parent))
    path = Path(os.path.abspath(Path(source.source).expanduser()))  # noqa: PTH100 - resolve() would follow links
    if path.is_dir():
        return _Listed(_files_in_folder(path, part, setting=setting))
    if not path.exists():
        _refuse_missing_file(source.source, path, setting=setting)
        if streams:
            return _list_stream(source.source, part, setting=setting, cache=cache)
        return _list_from_hub(source.source, part, setting=setting, cache=cache)
    if not path.is_file():
        raise InputError(f"{setting}: {path} is neither a file nor a folder")
    _refuse_part(part, f"{setting}: {path}")
    if never := re.search(_NEVER_READ, path.name.lower()):
        raise InputError(
            f"{setting}: {path}: {never[0]} files are not read; give text, or rows as {', '.join(sorted(ROW_SUFFIXES))}"
        )
    found = _found(str(path))
    if found is None or found.size_bytes == 0:
        raise InputError(f"{setting}: {path} is empty (0 bytes)")
    return _Listed((found,))


def _refuse_part(part: Part, what: str) -> None:
    requested = part.subset or part.split
    if requested is not None:
        kind = "subset" if part.subset else "split"
        raise InputError(f"{what} has no {kind} {requested}; only folders and data sets do")


def _refuse_missing_file(source: str, path: Path, *, setting: str) -> None:
    """Raises InputError unless the source may be a data set of the hub."""
    if _names_file(source) or not is_dataset_id(source):
        raise InputError(f"{setting}: {source} was not found: there is no {path}")


def _names_file(source: str) -> bool:
    return content_suffix(source) in TEXT_SUFFIXES | ROW_SUFFIXES or compression(source) is not None


def _list_stream(source: str, part: Part, *, setting: str, cache: Path) -> _Listed:
    listed = list_dataset(source, part, cache=cache, setting=setting)
    if not listed.files:
        raise InputError(f"{setting}: {source}: all files of {part.split or 'train'} are empty")
    found = [
        local._replace(hub=file.address)
        if (local := _found(str(file.path))) is not None
        else FoundFile(file.address, file.size_bytes, 0, hub=file.address)
        for file in listed.files
    ]
    return _Listed(found, listed.reference)


def _list_from_hub(source: str, part: Part, *, setting: str, cache: Path) -> _Listed:
    found = dataset_files(source, part, cache=cache, setting=setting)
    files = [file for file in map(_found, map(str, found.paths)) if file is not None and file.size_bytes]
    if not files:
        raise InputError(f"{setting}: {source}: all {len(found.paths)} files of {part.split or 'train'} are empty")
    return _Listed(files, found.reference)


def _files_in_folder(folder: Path, part: Part, *, setting: str) -> Sequence[FoundFile]:
    if (saved := saved_files(folder, part, setting=setting)) is not None:
        files = [file for file in map(_found, map(str, saved)) if file is not None and file.size_bytes]
        if len(files) < len(saved):
            raise InputError(f"{setting}: {folder} lacks some of the {len(saved)} files that its state.json lists")
        return files
    files = [found for found in _walk(folder) if found.size_bytes > 0]
    rows = [found for found in files if _holds_rows(found)]
    texts = [found for found in files if content_suffix(found.path) in TEXT_SUFFIXES]
    if not all(content_suffix(found.path) == ".json" for found in rows):
        rows = [found for found in rows if content_suffix(found.path) != ".json"]
    elif texts:
        rows = []
    if part != Part(None, None) or (rows and all(Path(found.path).name in _DOCUMENTATION for found in texts)):
        return _files_of_part(folder, rows or texts, part, setting=setting)
    selected = [found for found in files if found in {*rows, *texts}]
    if not selected:
        raise InputError(
            f"{setting}: {folder} holds no text and no rows among its {len(files)} non-empty files;\n"
            "they are selected by suffix: .txt, .md, .py and other sources, .jsonl, .csv, .parquet, .arrow, ...; "
            "name a file to read it with any suffix"
        )
    return selected


def _holds_rows(found: FoundFile) -> bool:
    return content_suffix(found.path) in ROW_SUFFIXES and os.path.basename(found.path) not in SETTINGS_FILES  # noqa: PTH119


def _files_of_part(folder: Path, files: Sequence[FoundFile], part: Part, *, setting: str) -> Sequence[FoundFile]:
    by_name = {Path(found.path).relative_to(folder).as_posix(): found for found in files}
    chosen = files_of_part(tuple(by_name), read_readme(folder), part, origin=f"{setting}: {folder}")
    return [by_name[name] for name in chosen]


def python_stdlib_files(folder: Path) -> Sequence[FoundFile]:
    """The standard library's own modules in `folder`, sorted, up to STDLIB_MAX_BYTES."""
    files: list[FoundFile] = []
    num_bytes = 0
    for found in _walk(folder, excluded=STDLIB_EXCLUDED, accepts=_is_stdlib_source):
        if num_bytes + found.size_bytes > STDLIB_MAX_BYTES:
            break
        if found.size_bytes:
            files.append(found)
            num_bytes += found.size_bytes
    if num_bytes < STDLIB_MIN_BYTES:
        raise InputError(
            f"data.train: {PYTHON_STDLIB}: {folder} holds {num_bytes} bytes of sources, {STDLIB_MIN_BYTES} needed;\n"
            "install the whole standard library (Debian: apt-get install libpython3-stdlib) "
            "or give text of your own: data.train=FILE"
        )
    return files


def _is_stdlib_source(name: str) -> bool:
    return name.endswith(".py") and not name.startswith("_sysconfigdata")


def _walk(
    folder: Path, *, excluded: frozenset[str] = frozenset(), accepts: Callable[[str], bool] = lambda _: True
) -> Iterator[FoundFile]:
    """Every file that is not hidden and whose name is accepted, in sorted order, top level first."""
    for parent, folders, names in os.walk(folder, onerror=_cannot_be_listed):
        folders[:] = sorted(
            name
            for name in folders
            if name not in excluded and not name.startswith(".") and not (excluded and name.startswith("config-"))
        )
        for name in sorted(names):
            if not name.startswith(".") and accepts(name):
                found = _found(f"{parent}{os.sep}{name}")
                if found is not None:
                    yield found


def _cannot_be_listed(error: OSError) -> None:
    raise EnvironmentFaultError(f"{error.filename}: cannot be listed: {error.strerror}") from error


def _found(path: str) -> FoundFile | None:
    """A regular file; None for a pipe, a device, or a broken link."""
    try:
        status = os.stat(path)  # noqa: PTH116 - thousands of paths at every start
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise EnvironmentFaultError(f"{path}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        return None
    return FoundFile(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class RowSizes(NamedTuple):
    """Number of rows of some files, and the bytes of the longest; None if only some of the rows were read."""

    num_rows: int
    longest_bytes: int | None


def row_sizes(listed: PrepareRequest) -> RowSizes | None:
    """The sizes of the rows of the listed files, which are read; None unless every file has rows of JSON or of text."""
    if not all(content_suffix(file.path) in _LEGIBLE and file.weight == 1 for file in listed.files):
        return None
    num_rows = longest = 0
    try:
        for file in listed.files:
            with closing(_open(file.path)) as stream:
                sizes = _row_sizes(stream, content_suffix(file.path))
            num_rows += len(sizes) - (content_suffix(file.path) in (".csv", ".tsv"))
            longest = max(longest, *sizes)
    except (OSError, EOFError, ValueError, KeyError, TypeError):  # damaged, which preparation reports
        return None
    return RowSizes(num_rows, longest) if num_rows > 0 else None


def _row_sizes(stream: IO[bytes], suffix: str) -> list[int]:
    """Bytes of each row: a line, or an element of a `.json` array; ValueError for an array that is too large."""
    start = stream.read(_BEGINNING) if suffix == ".json" else b""
    if not start.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
        stream.seek(0)
        return [len(line) for line in stream if line.strip()]
    content = start + stream.read(_LARGEST_ARRAY)
    return [len(row) for row in msgspec.json.decode(content.removeprefix(BOM_UTF8), type=list[msgspec.Raw])]


def sampled_row_sizes(listed: PrepareRequest) -> RowSizes | None:
    """About how many rows the listed files have, by the lengths of some hundred lines at places all over them.

    None unless every file has a row a line, is on this machine and is not compressed.
    """
    files = [file for file in listed.files if file.size_bytes]
    is_line = all(
        content_suffix(file.path) in _LINES and compression(file.path) is None and not file.is_remote for file in files
    )
    if not files or not is_line or listed.window_bytes is not None:
        return None
    ends = list(accumulate(file.size_bytes * file.weight for file in files))
    rows_per_byte = []
    try:
        for place in range(_SAMPLED_PLACES):
            at = (place * _GOLDEN + 0.5) % 1.0 * ends[-1]  # spread evenly, and not as files of one size are
            file, end = next((file, end) for file, end in zip(files, ends, strict=True) if at < end)
            lengths = _lengths_of_lines(file, before_end=int((end - at) / file.weight))
            rows_per_byte.append(len(lengths) / sum(lengths))
    except (OSError, ValueError, ZeroDivisionError):  # changed meanwhile, which preparation reports
        return None
    return RowSizes(max(1, round(ends[-1] * sum(rows_per_byte) / len(rows_per_byte))), None)


def _lengths_of_lines(file: SourceFile, *, before_end: int) -> list[int]:
    """Bytes of some whole lines that begin so far before the end of a file; of its first ones if none does."""
    with closing(_open(file.path)) as stream:
        for start in (max(0, file.size_bytes - before_end), 0):
            stream.seek(start)
            if start:
                stream.readline(_LONGEST_ROW)  # the rest of a line
            lines = [stream.readline(_LONGEST_ROW) for _ in range(_SAMPLED_AT_A_PLACE)]
            if any(line.strip() for line in lines):
                break
    return [len(line) for line in lines if line.strip()]


def shape_of_first_row(listed: PrepareRequest) -> DataFormat | None:
    """The shape of the first row of the listed files; None if they are text or the row cannot be read."""
    file = next((file for file in listed.files if content_suffix(file.path) in ROW_SUFFIXES), None)
    if file is None or listed.extension is not None:  # a user's format_row makes other rows of these
        return None
    return _shape_of(_columns(file), listed, fitting_shapes(listed.fields))


def _shape_of(columns: Sequence[str], listed: PrepareRequest, allowed: Collection[DataFormat]) -> DataFormat | None:
    return shape_of_row(lambda field: any(name in columns for name in column_names(field, listed.fields)), allowed)


def refuse_first_row(listed: PrepareRequest) -> DataFormat | None:
    """The shape of the listed files by their beginning, None if that does not show it; preparation reads every row.

    InputError for a fault that is seen there already.
    """
    file = next((file for file in listed.files if content_suffix(file.path) in ROW_SUFFIXES), None)
    if file is None:
        return _refuse_text(listed)
    is_line = (
        not file.is_remote and content_suffix(file.path) in _LEGIBLE and compression(file.path) in (None, *_MODULES)
    )
    if listed.extension is not None or not is_line or listed.bad_rows is not BadRows.FAIL:
        return shape_of_first_row(listed) if listed.format is DataFormat.AUTO else listed.format
    _refuse_encoding(file)
    columns = _columns(file, with_nulls=True)
    if not columns and file.size_bytes < _LONGEST_ROW:
        raise InputError(
            f"data: {file.path}: its first row {_fault_of_first_row(file)}; with data.bad_rows=skip a few are skipped"
        )
    if not columns:
        return None if listed.format is DataFormat.AUTO else listed.format
    allowed = fitting_shapes(listed.fields) if listed.format is DataFormat.AUTO else [listed.format]
    shape = _shape_of(_columns(file), listed, allowed) or _shape_of(columns, listed, allowed)
    if shape is None:
        raise InputError(
            f"data.format: {listed.format} finds no {one_of(tuple(allowed))} in the columns of {file.path}: "
            f"{', '.join(columns)};\n"
            "name them: data.fields={text: COLUMN}, {messages: COLUMN}, {prompt: COLUMN, completion: COLUMN}, ..."
        )
    return shape if listed.format is DataFormat.AUTO else listed.format


def _refuse_text(listed: PrepareRequest) -> DataFormat:
    """The shape of files of text; InputError if the job wants rows, or the first file is not text."""
    first = listed.files[0]
    if encoding_of(listed.format) not in (None, Encoding.TEXT):
        raise InputError(
            f"data.format: {listed.format} rows are read from .jsonl, .csv, .parquet or .arrow files; "
            f"{first.path} is text"
        )
    if not first.is_remote and compression(first.path) is None:
        with open(first.path, "rb") as stream:  # noqa: PTH123 - as everywhere here
            beginning = stream.read(_BEGINNING)
        place = beginning.find(b"\0")
        if place >= 0 and not beginning.startswith(_UTF_16):
            raise InputError(f"data: {first.path}: is not text: NUL byte at offset {place}")
        _refuse_encoding(first)
    return DataFormat.TEXT


def _refuse_encoding(file: SourceFile) -> None:
    """InputError with the command that converts a file whose beginning is not UTF-8; a compressed one is not read."""
    if compression(file.path) is not None:
        return
    try:
        with closing(_open(file.path)) as stream:
            beginning = stream.read(_BEGINNING)
    except (OSError, EOFError, ValueError):  # damaged, which preparation reports
        return
    try:
        getincrementaldecoder("utf-8")().decode(beginning)  # which may end within a character
    except UnicodeDecodeError as error:
        usual, path = "utf-16" if beginning.startswith(_UTF_16) else "latin1", Path(file.path)
        old, new = (shlex.quote(str(each)) for each in (path, path.with_name(f"utf8-{path.name}")))
        convert = f"iconv -f {usual} -t utf-8 {old} > {new}"
        skip = "; data.bad_rows=skip leaves out a few damaged rows" if content_suffix(file.path) in ROW_SUFFIXES else ""
        raise InputError(
            f"data: {path}: is not UTF-8 (byte 0x{beginning[error.start]:02x} at offset {error.start}); "
            f"if it is {usual}: {convert}{skip}"
        ) from None


def _columns(file: SourceFile, *, with_nulls: bool = False) -> Sequence[str]:
    """Columns with a value in the first row, or those of all rows; empty if they cannot be read."""
    suffix = content_suffix(file.path)
    try:
        if suffix == ".parquet" and compression(file.path) is None:
            from pyarrow.parquet import read_schema  # 0.1 s that no other kind of file costs

            return list(read_schema(file.path).names)
        if suffix in (".parquet", ".arrow") or compression(file.path) not in (None, *_MODULES):
            return ()
        with closing(_open(file.path)) as stream:
            line = _first_json_row(stream) if suffix == ".json" else _first_line(stream)
        if suffix in (".csv", ".tsv"):
            return _header(line.decode("utf-8-sig"), is_tabbed=suffix == ".tsv")
        row = msgspec.json.decode(line.removeprefix(BOM_UTF8))
    except Exception:  # noqa: BLE001 - damaged; every format has errors of its own, and preparation reports them
        return ()
    return [name for name, value in row.items() if with_nulls or value is not None] if isinstance(row, dict) else ()


def _fault_of_first_row(file: SourceFile) -> str:
    """Why the first row cannot be read, as preparation states it of any row."""
    try:
        with closing(_open(file.path)) as stream:
            is_json = content_suffix(file.path) == ".json"
            line = (_first_json_row if is_json else _first_line)(stream).removeprefix(BOM_UTF8)
        if content_suffix(file.path) in (".csv", ".tsv"):
            line.decode()
            return "cannot be read"
        row = decode_json(line)
    except UnicodeDecodeError as error:
        return f"is not UTF-8 ({error.reason}); save the file as UTF-8"
    except ValueError as error:
        return str(error)
    except Exception:  # noqa: BLE001 - damaged; every format has errors of its own, and preparation reports them
        return "cannot be read"
    return "has no columns" if row == {} else f"is {kind_of(row)}, not an object"


def _open(path: str) -> IO[bytes]:
    name = compression(path)
    found: IO[bytes] = open(path, "rb") if name is None else import_module(_MODULES[name]).open(path)  # noqa: SIM115, PTH123
    return found


def _first_line(stream: IO[bytes]) -> bytes:
    """The first line that is not empty; of one too long its beginning, which is not a row."""
    line = stream.readline(_LONGEST_ROW)
    while line and not line.removeprefix(BOM_UTF8).strip():
        line = stream.readline(_LONGEST_ROW)
    return line


def _first_json_row(stream: IO[bytes]) -> bytes:
    """The first value of an array, or of lines; the whole beginning if it ends in the middle of the value."""
    from json import JSONDecoder

    start = stream.read(_LONGEST_ROW).removeprefix(BOM_UTF8).lstrip().removeprefix(b"[").lstrip()
    text = start.decode(errors="surrogateescape")
    try:
        _, end = JSONDecoder().raw_decode(text)
    except ValueError:
        return start
    return text[:end].encode(errors="surrogateescape")


def _header(line: str, *, is_tabbed: bool) -> Sequence[str]:
    from csv import reader

    delimiters = "\t" if is_tabbed else ",;\t|"
    delimiter = max(delimiters, key=line.count)
    return next(reader([line], delimiter=delimiter), [])
