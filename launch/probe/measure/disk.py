"""Write and read speed of a local disk, as NVMe offload meets it: large blocks, in order, past the page cache.

The file has no name from the moment it is open (it is unlinked at once), so nothing is left behind even by SIGKILL.
O_DIRECT is used where the file system takes it; elsewhere the file is flushed before the clock stops and dropped from
the cache before it is read. One thread and one block in flight: a lower bound of what several reach together.
"""

import contextlib
import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from trainer.spec.hardware import Disk
from trainer.spec.units import GIB, MIB
from trainer.spec.value import Value

BLOCK_BYTES = 8 * MIB  # a multiple of every disk's sector, which O_DIRECT asks for
FILE_BYTES = GIB
BUDGET_S = 2.0  # for writing and for reading, each
_LARGEST_SHARE_OF_FREE = 0.1


class DiskSpeed(Value, frozen=True, kw_only=True):
    """Bytes per second in each direction."""

    write_bytes_per_s: int
    read_bytes_per_s: int


def measure_disks(disks: Sequence[Disk], folders: Sequence[Path]) -> tuple[tuple[Disk, ...], tuple[str, ...]]:
    """The disks with their speeds, and a sentence for each that could not be measured."""
    measured, notes = [], []
    for disk in disks:
        folder = writable_folder(disk, folders)
        speed = measure_folder(folder) if folder is not None else None
        if speed is None:
            notes.append(f"disk {disk.path}: not measured, no folder of it can be written with room to spare")
            measured.append(disk)
            continue
        measured.append(
            msgspec.structs.replace(
                disk, write_bytes_per_s=speed.write_bytes_per_s, read_bytes_per_s=speed.read_bytes_per_s
            )
        )
    return tuple(measured), tuple(notes)


def writable_folder(disk: Disk, folders: Sequence[Path]) -> Path | None:
    """The disk's mount point or, where that is not ours to write, the first of `folders` that lies on the same disk."""
    with contextlib.suppress(OSError):
        device = Path(disk.path).stat().st_dev
        for folder in (Path(disk.path), *folders):
            with contextlib.suppress(OSError):
                if folder.stat().st_dev == device and os.access(folder, os.W_OK | os.X_OK):
                    return folder
    return None


def measure_folder(folder: Path, *, file_bytes: int = FILE_BYTES, budget_s: float = BUDGET_S) -> DiskSpeed | None:
    """Speeds of a temporary file in `folder`; None where it has no room for one or refuses it."""
    try:
        space = os.statvfs(folder)
        num_blocks = min(file_bytes, int(space.f_frsize * space.f_bavail * _LARGEST_SHARE_OF_FREE)) // BLOCK_BYTES
        if not num_blocks:
            return None
        with tempfile.TemporaryFile(dir=folder, prefix=".shardwise-measure-", buffering=0) as file:
            return _measure_file(file.fileno(), num_blocks, budget_s)
    except OSError:
        return None


def _measure_file(descriptor: int, num_blocks: int, budget_s: float) -> DiskSpeed:
    block = mmap.mmap(-1, BLOCK_BYTES)  # page-aligned, as O_DIRECT asks
    block.write(os.urandom(BLOCK_BYTES))  # a disk that compresses must not shine
    _bypass_page_cache(descriptor)
    written, write_s = _timed(lambda number: os.pwrite(descriptor, block, number * BLOCK_BYTES), num_blocks, budget_s)
    started = time.perf_counter()
    os.fsync(descriptor)
    write_s += time.perf_counter() - started
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    blocks_written = written // BLOCK_BYTES
    read, read_s = _timed(lambda number: os.preadv(descriptor, [block], number * BLOCK_BYTES), blocks_written, budget_s)
    return DiskSpeed(write_bytes_per_s=round(written / write_s), read_bytes_per_s=round(read / read_s))


def _bypass_page_cache(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # tmpfs and some network file systems refuse it
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)


def _timed(transfer: Callable[[int], int], num_blocks: int, budget_s: float) -> tuple[int, float]:
    """Bytes moved and seconds taken by whole blocks until all are done or the time is up."""
    moved = 0
    started = time.perf_counter()
    for number in range(num_blocks):
        moved += transfer(number)
        if time.perf_counter() - started > budget_s:
            break
    return moved, time.perf_counter() - started
