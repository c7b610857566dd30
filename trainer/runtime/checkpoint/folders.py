"""The folders of checkpoints on the disk: found and verified, staged, committed by one rename, pruned.

    .tmp-step-00000030-NONCE/   every rank writes and hashes its own file there and waits until it is on the disk
    vote                        one rank that failed fails all; the folder is removed, older checkpoints are untouched
    MANIFEST.json               by rank 0, on the disk before the next line
    rename to step-00000030     the commit: before it there is nothing, after it there is everything
    prune                       an old one is renamed to .tmp-trash-* first: half of it never looks like a checkpoint

Exactly one rank, rank 0, renames: on a shared disk several would lose folders. Remains of a crash are called `.tmp-*`
and are removed at the next save. A lock that ends with its process keeps a second writer out.

There is no pointer file, which could be stale. A name `step-N` alone is not trusted either: the manifest must parse,
and every file must have the size, hash and chunks of the manifest. Neither safetensors nor torch detects a flipped bit.
"""

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from shardwise.trainer.runtime.checkpoint.manifest import (
    FOLDER_PATTERN,
    MANIFEST_MAX_BYTES,
    MANIFEST_NAME,
    CheckpointFacts,
    CheckpointFolder,
    Manifest,
    check_manifest,
    folder_name,
)
from shardwise.trainer.runtime.checkpoint.ranks import Ranks, on_first, together
from shardwise.trainer.runtime.checkpoint.shards import check_shards, own_cores
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.units import format_bytes
from shardwise.trainer.spec.value import Value


def find_checkpoint(
    root: Path, *, on_skip: Callable[[str], None], ranks: Ranks | None = None
) -> CheckpointFolder | None:
    """The newest checkpoint whose manifest and every checksum verify; None if `root` holds none at all.

    A damaged one is reported through `on_skip` (one line, on rank 0) and the next older used. EnvironmentFaultError if
    all are damaged: to start over silently would lose the run. Collective: rank 0 reads and hashes for all.
    """
    ranks = ranks or Ranks.alone()
    doing = f"{root}: the newest checkpoint cannot be read"
    chosen = on_first(ranks, lambda: _newest_verified(root, on_skip).encode(), doing=doing).decode()
    return together(ranks, lambda: open_checkpoint(root / chosen), doing=doing) if chosen else None


def steps_in(root: Path) -> list[int]:
    """The steps that have a folder, complete or not, oldest first."""
    if not root.is_dir():
        return []
    matches = (FOLDER_PATTERN.fullmatch(path.name) for path in root.iterdir())
    return sorted(int(match[1]) for match in matches if match is not None and match[0] == folder_name(int(match[1])))


def open_checkpoint(folder: Path) -> CheckpointFolder:
    """The checkpoint in a folder, its manifest checked and its files there with their sizes; nothing is hashed."""
    if not stat.S_ISDIR(_lstat(folder).st_mode):
        raise InputError(f"{folder}: is a link or a file, not the folder of a checkpoint")
    path = folder / MANIFEST_NAME
    size_bytes = _regular_file_bytes(path)
    if size_bytes > MANIFEST_MAX_BYTES:
        raise InputError(f"{path}: has {size_bytes} bytes; a manifest has at most {MANIFEST_MAX_BYTES}")
    manifest = codec.read(path, Manifest)
    if folder_name(manifest.facts.step) != folder.name:
        raise InputError(f"{path}: is of step {manifest.facts.step}, the folder is {folder.name}")
    check_manifest(manifest, origin=str(path))
    for name, entry in manifest.files.items():
        size_bytes = _regular_file_bytes(folder / name)
        if size_bytes != entry.size_bytes:
            raise InputError(f"{folder / name}: has {size_bytes} bytes; the manifest has {entry.size_bytes}")
    return CheckpointFolder(path=folder, manifest=manifest)


def is_complete(folder: Path) -> bool:
    """True if names and sizes in the folder are those of a checkpoint."""
    try:
        open_checkpoint(folder)
    except (InputError, OSError):
        return False
    return True


def verified(folder: Path) -> CheckpointFolder:
    """The checkpoint in a folder, every byte of it hashed; InputError if anything differs from the manifest."""
    checkpoint = open_checkpoint(folder)
    check_hashes(checkpoint)
    check_shards(folder, checkpoint.manifest)
    return checkpoint


def check_hashes(
    checkpoint: CheckpointFolder, *, only: Collection[str] | None = None, known: Mapping[str, str] = {}
) -> None:
    """InputError for the first file, of all or of `only`, whose hash is not that of the manifest.

    Files are read side by side, except those whose hash is `known`.
    """
    folder, files = checkpoint.path, checkpoint.manifest.files
    names = list(files if only is None else only)
    with ThreadPoolExecutor(max_workers=min(len(names), own_cores()) or 1) as hashers:
        found = hashers.map(lambda name: known.get(name) or _sha256(folder / name), names)
        for name, sha256 in zip(names, found, strict=True):
            if sha256 != (expected := files[name].sha256):
                raise InputError(f"{folder / name}: hashes to {sha256[:12]}; the manifest has {expected[:12]}")


def skipped_text(folder: Path, error: InputError | OSError) -> str:
    """The line about a checkpoint that was passed over."""
    what = "cannot be read" if isinstance(error, OSError) else "is damaged"
    return f"{folder.name} {what} and was passed over: {error}"


def none_whole(root: Path, num_checkpoints: int) -> EnvironmentFaultError:
    """The error where there are checkpoints and all are damaged."""
    return EnvironmentFaultError(
        f"{root}: none of its {num_checkpoints} checkpoints is whole; move them away to start from the beginning"
    )


def _newest_verified(root: Path, on_skip: Callable[[str], None]) -> str:
    """The folder's name; empty where there is none to choose from."""
    steps = steps_in(root)
    for step in reversed(steps):
        try:
            return verified(root / folder_name(step)).path.name
        except (InputError, OSError) as error:
            on_skip(skipped_text(root / folder_name(step), error))
    if steps:
        raise none_whole(root, len(steps))
    return ""


def _regular_file_bytes(path: Path) -> int:
    status = _lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path}: is a link or no plain file")
    return status.st_size


def _lstat(path: Path) -> os.stat_result:
    try:
        return path.lstat()
    except FileNotFoundError:
        raise InputError(f"{path}: is missing") from None


def _sha256(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


OnPoint = Callable[[str], None]

_TEMPORARY, _TRASH = ".tmp-", ".tmp-trash-"
_LOCK_NAME = ".lock"
_HEADROOM = 1.1  # of the tensors' bytes: headers, manifest, the file system's own
_NO_LOCKS_HERE = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}  # Lustre without -o flock, some NFS


class Retention(Value, frozen=True, kw_only=True):
    """Which checkpoints stay: the newest `keep`, those of every `keep_every`-th step, and the protected."""

    keep: int
    keep_every: int | None = None
    protect: tuple[int, ...] = ()

    def superseded(self, root: Path, *, newest: int) -> list[int]:
        """Steps of the complete checkpoints that do not stay, oldest first.

        A folder of a later step stays: this run, resumed from before it, has not reached it yet.
        """
        complete = [step for step in steps_in(root) if step <= newest and is_complete(root / folder_name(step))]
        retained = {step for step in complete if self.keep_every is not None and step % self.keep_every == 0}
        return [step for step in complete[: -self.keep] if step not in retained and step not in self.protect]


@contextmanager
def staging_folder(
    root: Path, facts: CheckpointFacts, *, num_bytes: int, retention: Retention, on_point: OnPoint
) -> Iterator[str]:
    """The name of a fresh folder to write in, under the lock; empty where this step is saved already, whole.

    If the disk has too little room, checkpoints that the new one would replace are removed first, if that suffices.
    """
    root.mkdir(exist_ok=True)  # never the run directory: it may have been moved
    with _writer_lock(root):
        for path in root.glob(f"{_TEMPORARY}*"):  # of a crash
            _remove(path)
        if _is_there(root / folder_name(facts.step), facts):
            yield ""
            return
        needed = int(num_bytes * _HEADROOM)
        _make_room(root, facts.step, needed, retention, on_point)
        _check_free_space(root, needed)
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


def prune(root: Path, *, newest: int, retention: Retention, on_point: OnPoint) -> None:
    """Removes the checkpoints that are not retained once `newest` is saved."""
    try:
        _discard(root, retention.superseded(root, newest=newest), on_point)
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


def _remove(path: Path) -> None:
    """Removes a temporary file or folder; the next save tries again if it cannot be removed now."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _is_there(final: Path, facts: CheckpointFacts) -> bool:
    """True if this step is saved already, whole; InputError if that is the checkpoint of another run."""
    try:
        there = verified(final).facts
    except InputError:
        return False  # missing or damaged: the commit replaces it
    ours, theirs = ((f.run_name, f.seed, f.model_config_sha256) for f in (facts, there))
    if ours != theirs:
        raise InputError(f"{final}: belongs to run {there.run_name}; give {facts.run_name} a folder of its own")
    return True


def _make_room(root: Path, step: int, needed: int, retention: Retention, on_point: OnPoint) -> None:
    """Removes what `prune` would remove after the commit, as far as it is needed and if it suffices; one stays."""
    missing = needed - shutil.disk_usage(root).free
    if missing <= 0:
        return
    before_commit = replace(retention, keep=max(1, retention.keep - 1))
    chosen, freed = [], 0
    for old in before_commit.superseded(root, newest=step):
        if freed < missing:
            chosen.append(old)
            freed += sum(file.stat().st_size for file in (root / folder_name(old)).iterdir())
    if freed >= missing:
        _discard(root, chosen, on_point)


def _discard(root: Path, steps: Collection[int], on_point: OnPoint) -> None:
    for step in steps:
        trash = root / f"{_TRASH}{folder_name(step)}-{secrets.token_hex(4)}"
        (root / folder_name(step)).rename(trash)
        on_point("pruning")
        shutil.rmtree(trash)


def _check_free_space(root: Path, needed: int) -> None:
    free = shutil.disk_usage(root).free
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
