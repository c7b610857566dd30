"""Which files a source of data is: listing and sizes only, so that planning never reads or tokenises anything.

A source is a file, a folder, or the built-in name `python-stdlib`. Of a folder, text files are taken by suffix, with
all sub-folders, sorted, hidden and empty files left out, and `.jsonl` files with them; `.json` files, which in a folder
of text are usually somebody's settings, only where there is nothing else.

`python-stdlib` is the Python standard library's own source code: text that is on every machine, of one kind, and large
enough to learn from. Left out are tests, demonstrations, generated tables (`encodings`, `pydoc_data`) and whatever
one version of Python has and the next has not, so that it is much the same text from 3.11 to 3.13.
"""

import errno
import os
import stat
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from trainer.spec.data_request import PrepareRequest, SourceFile, check_format_is_served
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.job import DataSource

PYTHON_STDLIB = "python-stdlib"
STDLIB_MAX_BYTES = 8_000_000
STDLIB_MIN_BYTES = 500_000
STDLIB_LEFT_OUT = frozenset({
    "test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload", "__pycache__",
    "lib2to3", "idlelib", "turtledemo", "distutils", "ensurepip", "encodings", "pydoc_data",
})  # fmt: skip

TEXT_SUFFIXES = frozenset({
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".html", ".htm", ".xml",
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt", ".scala", ".swift",
    ".js", ".ts", ".jsx", ".tsx", ".rb", ".pl", ".php", ".lua", ".r", ".jl", ".hs", ".ml", ".clj", ".ex", ".erl",
    ".sh", ".sql", ".yaml", ".yml", ".toml", ".f90", ".lean", ".v",
})  # fmt: skip
ROW_SUFFIXES = frozenset({".jsonl", ".ndjson"})
LATER_SUFFIXES = frozenset({".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", ".bz2", ".xz", ".zip", ".tar"})


class FoundFile(NamedTuple):
    """A file on disk."""

    path: str
    size_bytes: int
    mtime_ns: int


def list_files(request: PrepareRequest) -> PrepareRequest:
    """The request with `files` and `eval_files` filled in from what its sources are on disk now."""
    check_format_is_served(request.format)
    eval_sources = [] if request.eval_source is None else [DataSource(source=request.eval_source)]
    return msgspec.structs.replace(
        request,
        files=_files_of(request.sources, setting="data.train"),
        eval_files=_files_of(eval_sources, setting="data.eval"),
    )


def source_bytes(listed: PrepareRequest) -> int:
    """Bytes of the listed training files, each counted as often as its weight draws it."""
    return round(sum(file.size_bytes * file.weight for file in listed.files))


def _files_of(sources: Sequence[DataSource], *, setting: str) -> tuple[SourceFile, ...]:
    files = []
    for source in sources:
        if not source.weight > 0:
            raise InputError(f"{setting}: weight {source.weight:g} of {source.source}: must be above 0")
        files += [
            SourceFile(path=found.path, size_bytes=found.size_bytes, mtime_ns=found.mtime_ns, weight=source.weight)
            for found in _files_in(source.source, setting=setting)
        ]
    return tuple(files)


def _files_in(source: str, *, setting: str) -> Sequence[FoundFile]:
    if source == PYTHON_STDLIB:
        return python_stdlib_files(Path(sysconfig.get_path("stdlib")))
    path = Path(os.path.abspath(Path(source).expanduser()))  # noqa: PTH100 - resolve() would follow links
    if path.is_dir():
        return _files_in_folder(path, setting=setting)
    if not path.exists():
        raise InputError(_missing(source, path, setting=setting))
    if not path.is_file():
        raise InputError(f"{setting}: {path} is neither a file nor a folder")
    if path.suffix.lower() in LATER_SUFFIXES:
        raise InputError(
            f"{setting}: {path}: {path.suffix} files come with shardwise 0.4; this version reads text and JSON lines"
        )
    found = _found(str(path))
    if found is None or found.size_bytes == 0:
        raise InputError(f"{setting}: {path} is empty (0 bytes)")
    return (found,)


def _missing(source: str, path: Path, *, setting: str) -> str:
    looks_like_hub = source.count("/") == 1 and not source.startswith((".", "~", "/")) and not path.suffix
    hint = "; data sets of the hub come with shardwise 0.4" if looks_like_hub else ""
    return f"{setting}: {source} was not found: there is no {path}{hint}"


def _files_in_folder(folder: Path, *, setting: str) -> Sequence[FoundFile]:
    files = [found for found in _walk(folder) if found.size_bytes > 0]
    taken = [found for found in files if _suffix(found) in TEXT_SUFFIXES | ROW_SUFFIXES]
    taken = taken or [found for found in files if _suffix(found) == ".json"]
    if not taken:
        raise InputError(
            f"{setting}: {folder} holds no text among its {len(files)} non-empty files;\n"
            "text is taken by suffix: .txt, .md, .py and other sources, .jsonl; name a file to read it whatever it is"
        )
    return taken


def _suffix(found: FoundFile) -> str:
    return os.path.splitext(found.path)[1].lower()  # noqa: PTH122 - thousands of paths at every start


def python_stdlib_files(folder: Path) -> Sequence[FoundFile]:
    """The standard library's own modules in `folder`, sorted, up to STDLIB_MAX_BYTES."""
    files: list[FoundFile] = []
    num_bytes = 0
    for found in _walk(folder, left_out=STDLIB_LEFT_OUT, takes=_is_stdlib_source):
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
    folder: Path, *, left_out: frozenset[str] = frozenset(), takes: Callable[[str], bool] = lambda _: True
) -> Iterator[FoundFile]:
    """Every file that is not hidden and whose name is taken, in sorted order, top level first."""
    for parent, folders, names in os.walk(folder, onerror=_cannot_be_listed):
        folders[:] = sorted(
            name
            for name in folders
            if name not in left_out and not name.startswith(".") and not (left_out and name.startswith("config-"))
        )
        for name in sorted(names):
            if not name.startswith(".") and takes(name):
                found = _found(f"{parent}{os.sep}{name}")
                if found is not None:
                    yield found


def _cannot_be_listed(error: OSError) -> None:
    raise EnvironmentFaultError(f"{error.filename}: cannot be listed: {error.strerror}") from error


def _found(path: str) -> FoundFile | None:
    """A regular file; None for a pipe, a device, or a link that leads nowhere."""
    try:
        status = os.stat(path)  # noqa: PTH116 - thousands of paths at every start
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise EnvironmentFaultError(f"{path}: cannot be read: {error.strerror}") from error
    return FoundFile(path, status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None
