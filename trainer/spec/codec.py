"""The one codec of every value that is written to a file: JSON, strict, versioned, replaced atomically.

A file of another format, a truncated one or one with unknown fields is an InputError that names the file.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.secrets import redact
from shardwise.trainer.spec.value import Value

_PIECE_BYTES = 1 << 20
MAX_FILE_BYTES = 256 << 20  # of a file that is read whole
_AGAIN = "save it as UTF-8 without a byte order mark, or download it again"

V = TypeVar("V", bound=Value)


def encode(value: Value) -> bytes:
    """Indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def decode(content: bytes, kind: type[V], *, origin: str) -> V:
    """The value in `content`; `origin` names it in the error."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{origin}: is not a shardwise {kind.__name__.lower()} of this version: {error}") from error


def read(path: Path, kind: type[V]) -> V:
    """The value in the file `path`."""
    try:
        content = read_file(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    return decode(content, kind, origin=str(path))


def open_file(path: Path, *, follows_link: bool = True) -> BinaryIO:
    """A regular file, for reading. OSError for others: a FIFO may block for ever, and a device may have no end."""
    opener = _open_at_once if follows_link else _open_no_link
    stream = open(path, "rb", opener=opener)  # noqa: SIM115 # Path.open has no opener; the caller closes it
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return stream


def is_foreign(path: Path) -> bool:
    """True if another user than this one and root owns a file or a folder, or anyone can write to it."""
    status = path.stat()
    return status.st_uid not in (0, os.getuid()) or bool(status.st_mode & stat.S_IWOTH)


def refuse_foreign(path: Path, *, consequence: str) -> None:
    """EnvironmentFaultError for a file or a folder of a cache that is foreign; `consequence` of using it is named."""
    if is_foreign(path):
        raise EnvironmentFaultError(
            f"{path}: another user can write there, and {consequence}; "
            "name a cache of your own: export SHARDWISE_CACHE=~/.cache/shardwise"
        )


def read_file(path: Path) -> bytes:
    """Content of a regular file; OSError if it is larger than MAX_FILE_BYTES."""
    content = bytearray()
    with open_file(path) as stream:
        # Python reserves as many bytes as a read may return.
        while piece := stream.read(min(_PIECE_BYTES, MAX_FILE_BYTES + 1 - len(content))):
            content += piece
    if len(content) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return bytes(content)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def _open_no_link(path: str, flags: int) -> int:
    return _open_at_once(path, flags | os.O_NOFOLLOW)


def write(path: Path, value: Value) -> None:
    """Replaces the file `path` by the value in one rename, so that a reader never sees half of it."""
    write_bytes(path, encode(value))


def write_redacted(path: Path, value: Value) -> None:
    """As `write`, for what quotes messages: no secret of the environment reaches the file."""
    shown = redacted(msgspec.to_builtins(value))
    write_bytes(path, msgspec.json.format(msgspec.json.encode(shown), indent=1) + b"\n")


def redacted(value: Any) -> Any:  # noqa: ANN401 - any JSON tree
    """A tree without the secrets of the environment; in text alone, or a secret of digits made a number unreadable."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redacted(each) for key, each in value.items()}
    return [redacted(each) for each in value] if isinstance(value, list | tuple) else value


def write_bytes(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replaces the file `path` by `content` in one rename; `mode` is reduced by the umask."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of another program, such as config.json."""
    try:
        text = read_file(path).decode("utf-8")
        content = json.loads(text, object_pairs_hook=_one_of_each)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not JSON in UTF-8: {error.reason}; {_AGAIN}") from error
    except (ValueError, RecursionError) as error:
        remedy = f"; {_AGAIN}" if text.startswith("\N{BYTE ORDER MARK}") else ""
        raise InputError(f"{path}: is not JSON: {error}{remedy}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: is not a JSON object")
    return content


def _one_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs; ValueError for a key with two values, of which readers take different ones."""
    content = dict(pairs)
    if len(content) < len(pairs):
        for key, value in pairs:
            if content[key] != value:
                raise ValueError(f"it has {key} twice, with different values; remove one of them")
    return content
