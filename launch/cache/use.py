"""Whether an entry of the cache is in use, how large it is, and when it was used last.

In use is what a process of this machine has open or mapped, and what a lock is held for: whoever builds an entry holds
an advisory lock (flock), which the kernel lets go of when the process dies. Last used is the latest time of a read or
of a write that its file system keeps; one mounted with `noatime` keeps no reads.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.probe.disks import mount_of
from launch.probe.host import parse_mountinfo, read_text
from trainer.spec.value import Value

_SHARED = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "cifs", "smb3", "fuse.sshfs"}
)


class Extent(Value, frozen=True, kw_only=True):
    """What a file or a folder comes to."""

    num_bytes: int
    num_files: int
    last_written_s: float  # of the epoch
    last_used_s: float  # written or read


class Storage(Value, frozen=True, kw_only=True):
    """The file system below a folder."""

    is_shared: bool  # other machines may use what lies there
    keeps_reads: bool


def read_extent(path: Path) -> Extent:
    """Sizes and times of everything below a path; links are not followed, and a file with two names counts once."""
    seen: set[tuple[int, int]] = set()
    num_bytes, written, used = 0, 0.0, 0.0
    for status in _statuses(path):
        key = (status.st_dev, status.st_ino)
        if key not in seen:
            seen.add(key)
            num_bytes += status.st_size
            written = max(written, status.st_mtime)
            used = max(used, status.st_mtime, status.st_atime)
    empty_s = 0.0 if seen else _changed_s(path)
    return Extent(
        num_bytes=num_bytes, num_files=len(seen), last_written_s=written or empty_s, last_used_s=used or empty_s
    )


def _statuses(path: Path) -> Iterator[os.stat_result]:
    if path.is_symlink() or not path.is_dir():
        yield path.lstat()
        return
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                yield Path(folder, name).lstat()
            except OSError:  # gone meanwhile
                continue


def _changed_s(path: Path) -> float:
    """Of a folder without files."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def read_storage(folder: Path, *, root: Path = Path("/")) -> Storage:
    """Of the mount that a folder, which need not exist, lies in."""
    mount = mount_of(folder.absolute(), parse_mountinfo(read_text(root / "proc/self/mountinfo")))
    if mount is None:
        return Storage(is_shared=False, keeps_reads=True)
    return Storage(is_shared=mount.filesystem in _SHARED, keeps_reads="noatime" not in mount.options)


def used_paths(*, processes: Path = Path("/proc")) -> frozenset[str]:
    """Paths that processes of this machine have open, mapped or stand in; those of others where we may look."""
    return frozenset(_used(processes))


def _used(processes: Path) -> Iterator[str]:
    for process in processes.glob("[0-9]*"):
        try:
            links = [process / "cwd", *(process / "fd").iterdir()]
            mapped = (process / "maps").read_text(errors="replace")
        except OSError:  # ended meanwhile, or another user's
            continue
        for link in links:
            try:
                yield str(link.readlink())
            except OSError:
                continue
        yield from (line[line.index("/") :] for line in mapped.splitlines() if "/" in line)


def is_used(path: Path, used: frozenset[str]) -> bool:
    """Whether one of the used paths is this one, or below it."""
    whole = str(path.resolve())
    return any(each == whole or each.startswith(f"{whole}/") for each in used)


@contextmanager
def held_lock(path: Path) -> Iterator[bool]:
    """Whether the lock was free; while the block runs it is ours then. A lock that nobody ever took is free."""
    if not path.is_file():
        yield True
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def is_lock_free(path: Path) -> bool:
    """Asked for a moment; a lock that may not be opened counts as held."""
    try:
        with held_lock(path) as is_free:
            return is_free
    except OSError:
        return False
