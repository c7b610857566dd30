"""One folder per prepared data set, made once: safe against two processes that want it and against one that is killed.

A folder is built under a name of its own and takes its final one by a rename, so that what is there is whole. Whoever
builds holds a lock (flock, which the kernel lets go of when the process dies); who comes second waits and finds it
made.
A partial folder whose lock is free was left by a killed process and is removed.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.runtime.data.token_rows import TokenRows
from trainer.spec import codec
from trainer.spec.data.profile import DataProfile
from trainer.spec.errors import EnvironmentFaultError, ShardwiseError

_PARTIAL = ".partial-"


def prepared_once(
    root: Path, fingerprint: str, build: Callable[[Path], DataProfile], report: Callable[[str], None]
) -> DataProfile:
    """The profile of `root/fingerprint`, which `build` fills if it is not there yet."""
    final = root / fingerprint
    if (ready := _ready_profile(final)) is not None:
        return ready
    _make_folders(root)
    with _locked(root, fingerprint, report):
        if (ready := _ready_profile(final)) is not None:
            return ready
        _remove_abandoned(root, fingerprint)
        shutil.rmtree(final, ignore_errors=True)  # there, and not whole
        partial = root / f"{_PARTIAL}{fingerprint}"
        try:
            partial.mkdir()
            codec.write(partial / "profile.json", build(partial))
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return codec.read(final / "profile.json", DataProfile)


def _ready_profile(final: Path) -> DataProfile | None:
    """The profile of a folder that is whole, or None."""
    if not (final / "profile.json").is_file():
        return None
    try:
        TokenRows.open(final, "train")
        TokenRows.open(final, "eval")
        return codec.read(final / "profile.json", DataProfile)
    except ShardwiseError:  # damaged: it is built anew
        return None


def _make_folders(root: Path) -> None:
    try:
        (root / "locks").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFaultError(f"{root}: cannot be made: {error.strerror}; name another cache folder") from error


@contextmanager
def _locked(root: Path, fingerprint: str, report: Callable[[str], None]) -> Iterator[None]:
    descriptor = _open_lock(root, fingerprint)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that prepares the same data")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _open_lock(root: Path, fingerprint: str) -> int:
    path = root / "locks" / fingerprint
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise EnvironmentFaultError(f"{path}: cannot be opened: {error.strerror}") from error


def _remove_abandoned(root: Path, fingerprint: str) -> None:
    """Removes partial folders that nobody builds any more; the caller holds the lock of `fingerprint`."""
    for partial in root.glob(f"{_PARTIAL}*"):
        name = partial.name.removeprefix(_PARTIAL)
        if name == fingerprint:
            shutil.rmtree(partial, ignore_errors=True)
            continue
        descriptor = _open_lock(root, name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(partial, ignore_errors=True)
        except BlockingIOError:
            continue  # somebody is at it
        finally:
            os.close(descriptor)
