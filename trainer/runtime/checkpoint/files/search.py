"""Finding the newest checkpoint that is whole.

There is no pointer file that could be stale: the folders themselves say what there is. A name `step-N` alone is not
believed either. The manifest must parse, every file must have its size and hash, every chunk must be where the manifest
says. Neither safetensors nor torch would notice a flipped bit; the hashes do.
"""

import hashlib
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.runtime.checkpoint.agreement import on_first, together
from trainer.runtime.checkpoint.files.manifest import (
    FOLDER_PATTERN,
    MANIFEST_MAX_BYTES,
    MANIFEST_NAME,
    CheckpointFolder,
    Manifest,
    check_manifest,
    folder_name,
)
from trainer.runtime.checkpoint.files.shards import check_shards, own_cores
from trainer.runtime.checkpoint.ranks import Ranks
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, InputError

_READ_BYTES = 4 << 20


def find_checkpoint(
    root: Path, *, on_skip: Callable[[str], None], ranks: Ranks | None = None
) -> CheckpointFolder | None:
    """The newest checkpoint whose manifest and every checksum verify; None where `root` holds none at all.

    A damaged one is reported through `on_skip` (one line, on rank 0) and the next older taken; where all are damaged
    an EnvironmentFaultError says so: to start over silently would lose the run. Collective where `ranks` are several:
    rank 0 reads and hashes, the others take its choice.
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
            raise InputError(f"{folder / name}: has {size_bytes} bytes; the manifest says {entry.size_bytes}")
    return CheckpointFolder(path=folder, manifest=manifest)


def is_complete(folder: Path) -> bool:
    """Whether the folder is a checkpoint as far as names and sizes tell."""
    try:
        open_checkpoint(folder)
    except (InputError, OSError):
        return False
    return True


def verified(folder: Path) -> CheckpointFolder:
    """The checkpoint in a folder, every byte of it hashed; InputError where anything is not as the manifest says."""
    checkpoint = open_checkpoint(folder)
    check_hashes(checkpoint)
    check_shards(folder, checkpoint.manifest)
    return checkpoint


def check_hashes(
    checkpoint: CheckpointFolder, *, only: Collection[str] | None = None, known: Mapping[str, str] = {}
) -> None:
    """InputError for the first file, of all or of `only`, that does not hash to what the manifest says.

    Files are read side by side, but for those whose hash is `known`.
    """
    folder, files = checkpoint.path, checkpoint.manifest.files
    names = list(files if only is None else only)
    with ThreadPoolExecutor(max_workers=min(len(names), own_cores()) or 1) as hashers:
        found = hashers.map(lambda name: known.get(name) or _sha256(folder / name), names)
        for name, sha256 in zip(names, found, strict=True):
            if sha256 != files[name].sha256:
                said = files[name].sha256
                raise InputError(f"{folder / name}: hashes to {sha256[:12]}; the manifest says {said[:12]}")


def skipped_words(folder: Path, error: InputError | OSError) -> str:
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
            on_skip(skipped_words(root / folder_name(step), error))
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
    digest = hashlib.sha256()
    for block in _file_blocks(path):
        digest.update(block)
    return digest.hexdigest()


def _file_blocks(path: Path) -> Iterator[memoryview]:
    buffer = bytearray(_READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield view[:count]
