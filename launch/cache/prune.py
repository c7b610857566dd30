"""Frees stale entries of the cache, one at a time, each while its lock is held, and looked at once more before.

A folder first takes a name that nobody looks for, so that no reader ever meets half of it; what a kill leaves under
such a name is a leftover of the next time.
"""

import shutil
from contextlib import ExitStack
from pathlib import Path

from launch.cache.entries import Entry, Kind, last_used_s
from launch.cache.use import held_lock, is_used, used_paths

_GOING = ".partial-"  # of data: what `data_cache` and the next prune take for abandoned


def prune(entries: tuple[Entry, ...]) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """What was freed of these stale entries, and why something could not be."""
    freed, problems, used = [], [], used_paths()
    for entry in entries:
        try:
            if not is_used(Path(entry.path), used) and _remove(entry):
                freed.append(entry)
        except OSError as error:
            problems.append(f"{entry.path}: {error.strerror}")
    return tuple(freed), tuple(problems)


def _remove(entry: Entry) -> bool:
    """False where somebody has taken the lock, or the entry, meanwhile."""
    path = Path(entry.path)
    with ExitStack() as held:
        if entry.lock is not None and not held.enter_context(held_lock(Path(entry.lock))):
            return False
        if not (path.exists() or path.is_symlink()) or last_used_s(entry.kind, path) > entry.last_used_s:
            return False
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(_out_of_sight(entry, path))
        else:
            path.unlink()
        if entry.lock is not None and Path(entry.lock).parent.name == "locks":
            Path(entry.lock).unlink(missing_ok=True)
    return True


def _out_of_sight(entry: Entry, path: Path) -> Path:
    """The folder under the name that it goes by from now on."""
    if entry.kind is not Kind.DATA:
        return path
    going = path.with_name(f"{_GOING}{path.name}")
    shutil.rmtree(going, ignore_errors=True)
    return path.rename(going)
