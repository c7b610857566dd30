"""Finds data that was prepared before, without reading a source.

What was prepared is found again through an index: a key over the paths, sizes and times of all files and over the
settings, pointing to the fingerprint of the content. So an unchanged source is not read, and a touched one is only
read, not tokenised. The index is a cache of a cache: without it everything works, slower.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from trainer.spec import codec
from trainer.spec.data.profile import DataProfile
from trainer.spec.data.request import PrepareRequest
from trainer.spec.errors import InputError
from trainer.spec.value import Value

RACY_NS = 2 * 10**9
_INDEX_FORMAT = 4
_FILES = ("layout.json", "tokens.bin", "starts.bin", "train_rows.npy", "eval_rows.npy")


class PreparedIndex(Value, frozen=True, kw_only=True):
    """Where the prepared form of unchanged files is."""

    fingerprint: str


def find_prepared(listed: PrepareRequest) -> DataProfile | None:
    """The profile of data that was prepared before and whose listed files are unchanged since; reads no source."""
    root = Path(listed.cache_root, "data")
    tokenizer_files = _tokenizer_files(listed)
    if not (root / "index").is_dir():
        return None
    index_path = _index_path(listed, tokenizer_files)
    try:
        index = codec.read(index_path, PreparedIndex)
        folder = root / index.fingerprint
        profile = codec.read(folder / "profile.json", DataProfile)
    except InputError:  # never prepared, or removed since, or of another version
        return None
    is_whole = all((folder / name).is_file() for name in _FILES)
    return msgspec.structs.replace(profile, cache_dir=str(folder)) if is_whole else None


def _index_path(listed: PrepareRequest, tokenizer_files: Sequence[Path]) -> Path:
    from hashlib import blake2b  # with it comes OpenSSL: three milliseconds that a start without an index saves

    request = msgspec.json.encode(msgspec.structs.replace(listed, cache_root="", sources=(), eval_source=None))
    key = blake2b(f"{_INDEX_FORMAT}\n".encode() + request, digest_size=16)
    for path in tokenizer_files:
        status = path.stat()
        key.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return Path(listed.cache_root, "data", "index", f"{key.hexdigest()}.json")


def _tokenizer_files(listed: PrepareRequest) -> list[Path]:
    """Those that decide how text becomes ids, a chat template's file with them; InputError where there is no folder."""
    template = [] if listed.chat_template is None else [Path(listed.chat_template)]
    template = [path for path in template if path.is_file()]
    if listed.tokenizer is None:
        return template
    folder = Path(listed.tokenizer)
    if not folder.is_dir():
        raise InputError(f"model.tokenizer: {folder} is not a folder")
    return template + sorted(path for path in folder.iterdir() if path.is_file())


def write_index(listed: PrepareRequest, profile: DataProfile, started_ns: int) -> None:
    """Remembers the fingerprint, unless a file is so young that a second change could hide behind the same time."""
    youngest_ns = max(file.mtime_ns for file in (*listed.files, *listed.eval_files))
    if youngest_ns > started_ns - RACY_NS:
        return
    path = _index_path(listed, _tokenizer_files(listed))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        codec.write(path, PreparedIndex(fingerprint=profile.fingerprint))
    except OSError:  # the data is prepared; the next start reads the files again
        return
