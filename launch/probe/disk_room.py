"""How much a user may still write below a folder: what the file system has free, and what quotas leave of it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from launch.probe.disk_quota import read_quotas
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.units import format_bytes


class DiskRoom(NamedTuple):
    """Bytes and files, each with what bounds it."""

    free_bytes: int
    free_files: int | None  # None: the file system counts none
    bytes_words: str  # `are free`, `are left of your user's quota`
    files_words: str


def read_room(folder: Path, environment: Mapping[str, str] = os.environ, *, root: Path = Path("/")) -> DiskRoom:
    """The room below a folder, which need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    system = os.statvfs(there)
    num_bytes = [(system.f_bavail * system.f_frsize, "are free")]
    files = [(system.f_favail, "are free")] if system.f_files > 0 else []
    for quota in read_quotas(there, environment, root=root):
        words = f"are left of {quota.whose}"
        num_bytes += [(quota.free_bytes, words)] if quota.free_bytes is not None else []
        files += [(quota.free_files, words)] if quota.free_files is not None else []
    least_bytes, least_files = min(num_bytes), min(files, default=(None, "are free"))
    return DiskRoom(least_bytes[0], least_files[0], least_bytes[1], least_files[1])


def check_room(
    folder: Path,
    *,
    num_bytes: int,
    num_files: int = 0,
    what: str,
    mend: str,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> None:
    """EnvironmentFaultError with both numbers where `what` needs more bytes or inodes than there are."""
    room = read_room(folder, environment, root=root)
    if room.free_bytes < num_bytes:
        raise EnvironmentFaultError(
            f"{folder}: {what} {format_bytes(num_bytes)}, {format_bytes(room.free_bytes)} {room.bytes_words}; {mend}"
        )
    if room.free_files is not None and room.free_files < num_files:
        raise EnvironmentFaultError(
            f"{folder}: {what} {num_files} inodes, {room.free_files} {room.files_words}; {mend}"
        )
