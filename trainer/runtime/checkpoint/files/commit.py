"""The folders of checkpoints on the disk: staged, committed by one rename, and only then older ones removed.

    .tmp-step-00000030-NONCE/   every rank writes and hashes its own file there and waits until it is on the disk
    vote                        one rank that failed fails all; the folder goes, older checkpoints are untouched
    MANIFEST.json               by rank 0, on the disk before the next line
    rename to step-00000030     the commit: before it there is nothing, after it there is everything
    prune                       an old one is renamed to .tmp-trash-* first: half of it never looks like a checkpoint

Exactly one rank renames (on a shared disk every rank of another trainer did, and folders were lost). What a crash left
behind is called `.tmp-*` and goes at the next save. A lock that dies with its process keeps a second writer out.
Everything here runs on rank 0.
"""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.runtime.checkpoint.files.manifest import (
    MANIFEST_NAME,
    CheckpointFacts,
    Manifest,
    check_manifest,
    folder_name,
)
from trainer.runtime.checkpoint.files.search import is_complete, steps_in, verified
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.units import format_bytes

OnPoint = Callable[[str], None]

_TEMPORARY, _TRASH = ".tmp-", ".tmp-trash-"
_LOCK_NAME = ".lock"
_HEADROOM = 1.1  # of the tensors' bytes: headers, manifest, the file system's own
_NO_LOCKS_HERE = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}  # Lustre without -o flock, some NFS


@contextmanager
def staging_folder(root: Path, facts: CheckpointFacts, *, num_bytes: int) -> Iterator[str]:
    """The name of a fresh folder to write in, under the lock; empty where this step is saved already, whole."""
    root.mkdir(parents=True, exist_ok=True)
    with _writer_lock(root):
        _remove_leftovers(root)
        if _is_there(root / folder_name(facts.step), facts):
            yield ""
            return
        _check_free_space(root, num_bytes)
        staged = root / f"{_TEMPORARY}{folder_name(facts.step)}-{secrets.token_hex(4)}"
        staged.mkdir()
        try:
            yield staged.name
        finally:
            shutil.rmtree(staged, ignore_errors=True)  # after the commit it has another name


def commit(staged: Path, manifest: Manifest, *, final: Path, on_point: OnPoint) -> None:
    """Writes the manifest and renames the folder; on return it is there, also after a loss of power."""
    content = codec.encode(manifest)
    check_manifest(codec.decode(content, Manifest, origin=MANIFEST_NAME), origin=MANIFEST_NAME)
    with (staged / MANIFEST_NAME).open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(staged)
    on_point("manifest-written")
    damaged = final.with_name(f"{_TRASH}{final.name}-{secrets.token_hex(4)}")
    if os.path.lexists(final):  # staging_folder hashed it
        final.rename(damaged)
        on_point("damaged-moved")
    staged.rename(final)
    on_point("committed")
    _sync_folder(final.parent)
    on_point("synced")
    _remove(damaged)


def prune(
    root: Path, *, newest: int, keep: int, keep_every: int | None, protect: tuple[int, ...], on_point: OnPoint
) -> None:
    """Removes complete checkpoints but the newest `keep` up to the one just committed, those of every `keep_every`-th
    step, and those protected.

    A folder of a later step is left: it is of a future that this run, resumed from before it, has not reached.
    """
    complete = [step for step in steps_in(root) if step <= newest and is_complete(root / folder_name(step))]
    try:
        for step in complete[:-keep]:
            is_kept = keep_every is not None and step % keep_every == 0
            if not is_kept and step not in protect:
                trash = root / f"{_TRASH}{folder_name(step)}-{secrets.token_hex(4)}"
                (root / folder_name(step)).rename(trash)
                on_point("pruning")
                shutil.rmtree(trash)
    except OSError as error:
        raise EnvironmentFaultError(
            f"{root}: step {newest} is saved, but an older checkpoint could not be removed: {error.strerror}"
        ) from error
    on_point("pruned")


@contextmanager
def _writer_lock(root: Path) -> Iterator[None]:
    """Keeps a second writer out while this one saves; the kernel drops the lock with the process that holds it."""
    descriptor = os.open(root / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EnvironmentFaultError(f"{root}: another process is saving here; give each run its folder") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:  # without locks the rename alone still keeps every checkpoint whole
                raise
        yield
    finally:
        os.close(descriptor)


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(f"{_TEMPORARY}*"):
        _remove(path)


def _remove(path: Path) -> None:
    """Removes what no checkpoint is; what cannot go now is tried again at the next save."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _is_there(final: Path, facts: CheckpointFacts) -> bool:
    """Whether this step is saved already, whole; InputError where it is another run's."""
    try:
        there = verified(final).facts
    except InputError:
        return False  # missing or damaged: the commit replaces it
    ours, theirs = ((f.run_name, f.seed, f.model_config_sha256) for f in (facts, there))
    if ours != theirs:
        raise InputError(f"{final}: belongs to run {there.run_name}; give {facts.run_name} a folder of its own")
    return True


def _check_free_space(root: Path, num_bytes: int) -> None:
    needed, free = int(num_bytes * _HEADROOM), shutil.disk_usage(root).free
    if free < needed:
        raise EnvironmentFaultError(
            f"{root}: a checkpoint needs {format_bytes(needed)} and {format_bytes(free)} are free;"
            " make room or lower checkpoint.keep"
        )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
