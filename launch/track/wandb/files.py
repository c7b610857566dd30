"""What a run directory keeps of wandb: `wandb.json`, which run it is there, and the folders that wandb writes.

    RUN/wandb.json                            the run's id, where it is seen, what was sent later
    RUN/wandb/offline-run-TIME-ID/run-ID.wandb    one for each supervisor that wrote offline
    RUN/wandb/run-TIME-ID/run-ID.wandb            the same while it was online

Every supervisor goes on with the same id. A `.wandb` file is wandb's log of records: after a header of 7 bytes, blocks
of 32 KiB that hold pieces of records, each piece with checksum, length and place (whole, first, middle, last), as
LevelDB writes its log. A file whose end is missing is read as far as it goes.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from trainer.spec import codec
from trainer.spec.errors import InputError
from trainer.spec.value import Value

FILE_NAME = "wandb.json"
_HEADER = b":W&B"
_HEADER_BYTES = 7
_BLOCK_BYTES = 32 * 1024
_PIECE = struct.Struct("<IHB")  # checksum, length, place
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_IDENTITY_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_IDENTITY_LENGTH = 8  # as wandb's own


class WandbRun(Value, frozen=True, kw_only=True):
    """Which run of wandb this is."""

    id: str
    project: str
    url: str | None = None  # None before it was online
    sent_lines: int = 0  # of metrics.jsonl, that wandb's server has for certain
    synced: tuple[str, ...] = ()  # offline folders whose lines wandb's server has
    writing: str | None = None  # the folder that is being written to, or was when its process was killed


def read_wandb_run(run_dir: Path) -> WandbRun | None:
    """What is kept, None where wandb was never told of this run; InputError where the file is damaged."""
    path = run_dir / FILE_NAME
    return codec.read(path, WandbRun) if path.is_file() else None


def write_wandb_run(run_dir: Path, run: WandbRun) -> None:
    """Keeps it."""
    codec.write(run_dir / FILE_NAME, run)


def new_identity() -> str:
    """An id that no other run has."""
    from secrets import choice

    return "".join(choice(_IDENTITY_LETTERS) for _ in range(_IDENTITY_LENGTH))


def offline_folders(run_dir: Path) -> list[Path]:
    """The folders that were written offline, oldest first."""
    return sorted(path for path in run_dir.glob("wandb/offline-run-*") if path.is_dir())


def unsynced_folders(run_dir: Path) -> list[Path]:
    """Offline folders that wandb's server does not have yet, oldest first."""
    try:
        kept = read_wandb_run(run_dir)
    except InputError:
        kept = None
    done = () if kept is None else kept.synced
    return [path for path in offline_folders(run_dir) if path.name not in done]


def offline_logs(run_dir: Path) -> list[Path]:
    """The logs of records in those folders."""
    return [path for folder in offline_folders(run_dir) for path in sorted(folder.glob("run-*.wandb"))]


def read_records(path: Path) -> Iterator[bytes]:
    """The records of a log, as serialised; up to the first piece that is damaged or cut off."""
    content = path.read_bytes()
    if content[: len(_HEADER)] != _HEADER:
        return
    place, record = _HEADER_BYTES, b""
    while place + _PIECE.size <= len(content):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _PIECE.size:
            place += left
            continue
        checksum, length, kind = _PIECE.unpack_from(content, place)
        piece = content[place + _PIECE.size : place + _PIECE.size + length]
        if not _is_sound(piece, checksum=checksum, length=length, kind=kind):
            return
        record = piece if kind in (_WHOLE, _FIRST) else record + piece
        if kind in (_WHOLE, _LAST):
            yield record
        place += _PIECE.size + length


def _is_sound(piece: bytes, *, checksum: int, length: int, kind: int) -> bool:
    if len(piece) < length or not _WHOLE <= kind <= _LAST:
        return False
    return checksum == zlib.crc32(piece, zlib.crc32(bytes([kind])))
