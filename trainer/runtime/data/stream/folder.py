"""Folders of the cache that belong to living processes: what a killed one leaves behind is removed at the next start.

A folder is held by a lock (flock, which the kernel lets go of when the last process that has it open dies) of the same
name in `locks/`, taken before the folder is made. So a folder whose lock is free is nobody's.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.spec.errors import EnvironmentFaultError

_LOCKS = "locks"


def hold_folder(folder: Path) -> int:
    """Makes the folder, empty, and removes those that nobody holds; the descriptor of the lock that holds it."""
    root = folder.parent
    try:
        (root / _LOCKS).mkdir(parents=True, exist_ok=True)
        _remove_abandoned(root)
        descriptor = _try_lock(root, folder.name)
        if descriptor is None:
            raise EnvironmentFaultError(f"{folder}: is held by another process; end it, and start again")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    except OSError as error:
        raise EnvironmentFaultError(f"{root}: cannot be made: {error.strerror}; name another cache folder") from error
    return descriptor


def remove_held(folder: Path) -> None:
    """Removes a folder that this process holds, and its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder.parent / _LOCKS / folder.name).unlink(missing_ok=True)


@contextmanager
def scratch_folder(root: Path, name: str) -> Iterator[Path]:
    """A folder of this process, removed at the end."""
    folder = root / f"{name}-{os.getpid()}-{os.urandom(4).hex()}"
    descriptor = hold_folder(folder)
    try:
        yield folder
    finally:
        remove_held(folder)
        os.close(descriptor)


def _try_lock(root: Path, name: str) -> int | None:
    descriptor = os.open(root / _LOCKS / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(root: Path) -> None:
    for folder in root.iterdir():
        if folder.name == _LOCKS or (descriptor := _try_lock(root, folder.name)) is None:
            continue
        remove_held(folder)
        os.close(descriptor)
