"""Preparation of the data in a process of its own, unless it was prepared before.

Tokenising needs libraries that `launch` never imports, so a worker does it.

Prepared data is found through an index: a key over the paths, sizes and times of all files and over the settings,
pointing to the fingerprint of the content. So an unchanged source is not read, and a touched one is only read, not
tokenised. Programs can set the time of writing (cp -p, rsync -t), so the time of the last change, which only the kernel
sets, is part of the key. On file systems that do not keep it, each start of a training reads the files. Without the
index everything works, slower. The files of a stream are compared by name, size, and time or commit, because a stream
is never read as a whole; a run keeps the list that it was started with.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path

import msgspec

from shardwise.launch.inputs.data_files import list_files
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.data.profile import LISTING_NAME, DataProfile, PrepareRequest, SourceFile
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.value import Value

GRACE_S = 5.0
RACY_NS = 2 * 10**9  # a file changed twice within this time may have one mtime
RACY_CHANGE_NS = 50 * 10**6  # or one ctime: the kernel's clock for it ticks at least a hundred times a second
_INDEX_FORMAT = 6
_PREPARED_FILES = ("layout.json", "tokens.bin", "starts.bin", "train_rows.npy", "eval_rows.npy")
_NUM_SHOWN = 2  # changed files of a stream, in a message


def prepare_data(
    request: PrepareRequest, *, python: str = sys.executable, on_progress: Callable[[str], None]
) -> DataProfile:
    """The profile of the prepared data; raises the ShardwiseError of the worker.

    On an interrupt the worker has GRACE_S seconds to clean up.
    """
    listed = list_files(request)
    profile = find_prepared(listed) if _changes_are_seen(listed) else None
    if profile is None:
        from shardwise.launch.worker import ask  # not loaded by a plan of prepared data

        started_ns = time.time_ns()
        profile = ask(
            "shardwise.trainer.runtime.data.prepare",
            listed,
            DataProfile,
            subject="the data preparation",
            environment=_environment(listed),
            on_line=on_progress,
            grace_s=GRACE_S,
            python=python,
        )
        write_index(listed, profile, started_ns)
    if profile.is_stream:
        assert profile.cache_dir is not None
        codec.write(Path(profile.cache_dir, LISTING_NAME), listed)  # where its files are now, for later windows
    return profile


def _environment(listed: PrepareRequest) -> dict[str, str]:
    """A stream downloads files of the hub while it is read, unless the user's own environment forbids it."""
    offline = "1" if listed.window_bytes is None else os.environ.get("HF_HUB_OFFLINE", "0")
    return {"TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": offline}


def _changes_are_seen(listed: PrepareRequest) -> bool:
    """True if the time of the last change of every file can be relied on, or is not compared, as of a stream."""
    from shardwise.launch.probe.disks import keeps_change_times  # not loaded by a plan

    paths = (file.path for file in (*listed.files, *listed.eval_files) if file.ctime_ns is not None)
    return keeps_change_times({Path(os.path.realpath(path)).parent for path in paths})


class PreparedIndex(Value, frozen=True, kw_only=True):
    """Location of the prepared form of unchanged files."""

    fingerprint: str


def find_prepared(listed: PrepareRequest) -> DataProfile | None:
    """The profile of data prepared earlier from the listed files as they are now, or None; reads no source."""
    root = Path(listed.cache_root, "data")
    tokenizer_files = _tokenizer_files(listed)
    if not (root / "index").is_dir():
        return None
    index_path = _index_path(listed, tokenizer_files)
    try:
        index = codec.read(index_path, PreparedIndex)
        folder = root / index.fingerprint
        profile = codec.read(folder / "profile.json", DataProfile)
        if codec.is_foreign(index_path) or codec.is_foreign(folder):
            return None  # preparing them reports why
    except InputError:  # never prepared, or removed since, or of another version
        return None
    is_whole = all((folder / name).is_file() for name in _PREPARED_FILES)
    return msgspec.structs.replace(profile, cache_dir=str(folder)) if is_whole else None


def _index_path(listed: PrepareRequest, tokenizer_files: Sequence[Path]) -> Path:
    from hashlib import blake2b  # loads OpenSSL

    request = msgspec.json.encode(msgspec.structs.replace(listed, cache_root="", sources=(), eval_source=None))
    key = blake2b(f"{_INDEX_FORMAT}\n".encode() + request, digest_size=16)
    for path in tokenizer_files:
        status = path.stat()
        key.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\n".encode())
    return Path(listed.cache_root, "data", "index", f"{key.hexdigest()}.json")


def _tokenizer_files(listed: PrepareRequest) -> list[Path]:
    """Files that determine token ids, with a chat template's file; raises InputError if there is no folder."""
    template = [] if listed.chat_template is None else [Path(listed.chat_template)]
    template = [path for path in template if path.is_file()]
    if listed.tokenizer is None:
        return template
    folder = Path(listed.tokenizer)
    if not folder.is_dir():
        raise InputError(f"model.tokenizer: {folder} is not a folder")
    return template + sorted(path for path in folder.iterdir() if path.is_file())


def write_index(listed: PrepareRequest, profile: DataProfile, started_ns: int) -> None:
    """Stores the fingerprint, unless a file is so new that a second change could have the same time."""
    files = (*listed.files, *listed.eval_files)
    is_racy = any(
        file.mtime_ns > started_ns - RACY_NS or (file.ctime_ns or 0) > started_ns - RACY_CHANGE_NS for file in files
    )
    if is_racy:
        return
    path = _index_path(listed, _tokenizer_files(listed))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        codec.write(path, PreparedIndex(fingerprint=profile.fingerprint))
    except OSError:  # the data is prepared; the next start reads the files again
        return


def refuse_other_stream(run_dir: Path, data: DataProfile, earlier: DataProfile) -> None:
    """Raises InputError with the files that changed since the run in `run_dir` read its stream."""
    retained = run_dir / "stream" / LISTING_NAME
    if not (data.is_stream and earlier.is_stream) or data.fingerprint == earlier.fingerprint or not retained.is_file():
        return
    assert data.cache_dir is not None
    now = codec.read(Path(data.cache_dir, LISTING_NAME), PrepareRequest).files
    changes = list(_changes(codec.read(retained, PrepareRequest).files, now))
    if changes:
        more = f"; and {len(changes) - _NUM_SHOWN} more" if len(changes) > _NUM_SHOWN else ""
        raise InputError(
            f"--resume: the stream of {run_dir} changed: {'; '.join(changes[:_NUM_SHOWN])}{more};\n"
            "put the files back as they were, or start a new run without --resume"
        )


def _changes(then: Sequence[SourceFile], now: Sequence[SourceFile]) -> Iterator[str]:
    for before, after in zip_longest(then, now):
        if before is None or after is None:
            yield f"{(before or after).path} {'is new' if before is None else 'is missing'}"
        elif _description(before) != _description(after):
            yield f"{_description(before)} then, {_description(after)} now"


def _description(file: SourceFile) -> str:
    if file.hub is not None:
        return f"{file.hub} of {file.size_bytes} bytes"
    time = datetime.fromtimestamp(file.mtime_ns / 1e9, tz=UTC).isoformat(timespec="milliseconds")
    return f"{Path(file.path).name} of {file.size_bytes} bytes, written {time}"
