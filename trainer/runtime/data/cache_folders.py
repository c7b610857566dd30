"""Folders of the cache that one process fills or uses: prepared data sets, and scratch folders of running processes.

Each folder has a lock file (flock) of the same name in `locks/`. The kernel releases a lock when the last process that
has it open ends. A partial or scratch folder whose lock is free belonged to a killed process, and the next start
removes it. A prepared data set is built under another name and renamed when it is complete: the first process that
needs it locks and builds it, the others wait.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.trainer.runtime.data.token_rows import TokenRows
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.errors import EnvironmentFaultError, ShardwiseError

_PARTIAL = ".partial-"
_LOCKS = "locks"


def prepared_once(
    root: Path, fingerprint: str, build: Callable[[Path], DataProfile], report: Callable[[str], None]
) -> DataProfile:
    """The profile of `root/fingerprint`, which `build` fills if it does not exist yet."""
    final = root / fingerprint
    if (ready := _ready_profile(final)) is not None:
        return ready
    _make_lock_folder(root)
    with _locked(root, fingerprint, report):
        if (ready := _ready_profile(final)) is not None:
            return ready
        partial = root / f"{_PARTIAL}{fingerprint}"
        shutil.rmtree(partial, ignore_errors=True)
        _remove_abandoned(root, _PARTIAL)
        shutil.rmtree(final, ignore_errors=True)  # it exists, but is incomplete
        try:
            partial.mkdir()
            codec.write(partial / "profile.json", build(partial))
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return codec.read(final / "profile.json", DataProfile)


def lock_folder(folder: Path) -> int:
    """Creates an empty folder, removes abandoned ones next to it, and returns the descriptor of its lock."""
    root = folder.parent
    _make_lock_folder(root)
    try:
        _remove_abandoned(root)
        descriptor = _try_lock(root, folder.name)
        if descriptor is None:
            raise EnvironmentFaultError(f"{folder}: is in use by another process; end it, and start again")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    except OSError as error:
        raise _cannot_be_made(root, error) from error
    return descriptor


def remove_locked(folder: Path) -> None:
    """Removes a folder that this process has locked, and its lock."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder.parent / _LOCKS / folder.name).unlink(missing_ok=True)


@contextmanager
def scratch_folder(root: Path, name: str) -> Iterator[Path]:
    """A folder of this process, removed at the end."""
    folder = root / f"{name}-{os.getpid()}-{os.urandom(4).hex()}"
    descriptor = lock_folder(folder)
    try:
        yield folder
    finally:
        remove_locked(folder)
        os.close(descriptor)


def _ready_profile(final: Path) -> DataProfile | None:
    """The profile of a complete folder, else None."""
    if not (final / "profile.json").is_file():
        return None
    try:
        TokenRows.open(final, "train")
        TokenRows.open(final, "eval")
        return codec.read(final / "profile.json", DataProfile)
    except ShardwiseError:  # damaged: it is built again
        return None


@contextmanager
def _locked(root: Path, fingerprint: str, report: Callable[[str], None]) -> Iterator[None]:
    descriptor = _try_lock(root, fingerprint)
    if descriptor is None:
        report("waiting for another process that prepares the same data")
        descriptor = _open_lock(root, fingerprint)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def _try_lock(root: Path, name: str) -> int | None:
    """The descriptor of a lock that was free; None if another process holds it."""
    descriptor = _open_lock(root, name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _open_lock(root: Path, name: str) -> int:
    path = root / _LOCKS / name
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise EnvironmentFaultError(f"{path}: cannot be opened: {error.strerror}") from error


def _remove_abandoned(root: Path, prefix: str = "") -> None:
    """Removes the folders whose lock is free, with their locks; the prefix is not part of a lock's name."""
    for folder in root.glob(f"{prefix}*"):
        name = folder.name.removeprefix(prefix)
        if name == _LOCKS or (descriptor := _try_lock(root, name)) is None:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        if not prefix:
            (root / _LOCKS / name).unlink(missing_ok=True)
        os.close(descriptor)


def _make_lock_folder(root: Path) -> None:
    try:
        (root / _LOCKS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_be_made(root, error) from error


def _cannot_be_made(root: Path, error: OSError) -> EnvironmentFaultError:
    return EnvironmentFaultError(f"{root}: cannot be created: {error.strerror}; name another cache folder")
