"""A data set's files from the Hugging Face hub: those already in the local cache, and a download of the rest.

`ORG/NAME` is the newest revision that was downloaded, `ORG/NAME@REVISION` a branch, a tag or a commit. Only the files
of the requested split are downloaded, and only files of text or rows, by suffix: never a script, never a pickle.

The cache is read by its layout (`datasets--ORG--NAME/refs/REVISION` holds a commit, `snapshots/COMMIT/` its files), so
that cached data needs neither the network nor a library. `listings/COMMIT.json` next to it holds the names of all files
of that commit, written before the first download, so that an interrupted download is detected and continued. If another
program filled the cache, only numbered files (`-00000-of-00004`) show what is missing.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from glob import escape
from pathlib import Path
from typing import NamedTuple

from shardwise.launch.inputs.dataset_splits import SETTINGS_FILES, Part, files_of_part
from shardwise.launch.inputs.hub import HUB_ID, REPLY_TIMEOUT_S, cached_commit, hub_errors_explained, repository_folder
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.data.profile import ROW_SUFFIXES, content_suffix
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.value import Value

README = "README.md"
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md"})
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_SHARD = re.compile(r"(.*)-[0-9]{5}-of-([0-9]{5})(.*)")


class HubFiles(NamedTuple):
    """The files of one part of a data set, on this machine."""

    reference: str  # ORG/NAME@COMMIT
    paths: tuple[Path, ...]


class ListedFile(NamedTuple):
    """A file of a data set that may not be on this machine."""

    address: str  # hf://datasets/ORG/NAME@COMMIT/FILE
    size_bytes: int
    path: Path  # of the file, once downloaded


class ListedFiles(NamedTuple):
    """The files of one part of a data set, by name and size."""

    reference: str  # ORG/NAME@COMMIT
    files: tuple[ListedFile, ...]


class Listing(Value, frozen=True, kw_only=True):
    """Every file of one commit of a repository."""

    names: tuple[str, ...]
    sizes: tuple[int, ...] = ()  # of each, if they were requested


def is_dataset_id(source: str) -> bool:
    """True if the source may name a data set of the hub."""
    repository, at, revision = source.partition("@")
    is_revision = _REVISION.fullmatch(revision) is not None and ".." not in revision
    return HUB_ID.fullmatch(repository) is not None and (not at or is_revision)


def dataset_files(source: str, part: Part, *, cache: Path, setting: str) -> HubFiles:
    """The part's files, downloaded if they are not in `cache`; a cached revision needs no network.

    Raises InputError if the data set, its revision or the part does not exist, or needs a token; EnvironmentFaultError
    if the hub cannot be reached. Both name the next step.
    """
    wanted = _Wanted(source, part, cache, setting)
    found = _find(wanted)
    if found is not None:
        return found
    with wanted.hub_errors_explained():
        commit, listing = _request_listing(wanted, with_sizes=False)
        chosen = wanted.files_among(listing.names, commit)
        _fetch(wanted, commit, chosen)
    snapshot = wanted.snapshot(commit)
    return HubFiles(f"{wanted.repository}@{commit}", tuple(snapshot / name for name in chosen))


def list_dataset(source: str, part: Part, *, cache: Path, setting: str) -> ListedFiles:
    """The part's files without downloading them; a revision that was listed or downloaded needs no network.

    Raises the errors of `dataset_files`.
    """
    wanted = _Wanted(source, part, cache, setting)
    found = _find(wanted)
    if found is not None:
        commit = found.reference.rpartition("@")[2]
        snapshot = wanted.snapshot(commit)
        sizes = {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in found.paths}
    else:
        commit = wanted.cached_commit
        listing = _stored_listing(wanted, commit)
        if listing is None or len(listing.sizes) < len(listing.names):
            with wanted.hub_errors_explained():
                commit, listing = _request_listing(wanted, with_sizes=True)
        snapshot, all_sizes = wanted.snapshot(commit), dict(zip(listing.names, listing.sizes, strict=True))
        sizes = {name: all_sizes[name] for name in wanted.files_among(listing.names, commit)}
    reference = f"{wanted.repository}@{commit}"
    files = (
        ListedFile(f"hf://datasets/{reference}/{name}", size, snapshot / name) for name, size in sizes.items() if size
    )
    return ListedFiles(reference, tuple(files))


def read_readme(folder: Path) -> str | None:
    """Text of README.md; None if there is none."""
    try:
        return (folder / README).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


class _Wanted(NamedTuple):
    """A part of a data set, the cache, and the setting that names it in messages."""

    source: str
    part: Part
    cache: Path
    setting: str

    @property
    def repository(self) -> str:
        return self.source.partition("@")[0]

    @property
    def revision(self) -> str | None:
        return self.source.partition("@")[2] or None

    @property
    def folder(self) -> Path:
        return repository_folder(self.cache, self.repository, kind="datasets")

    @property
    def cached_commit(self) -> str:
        return cached_commit(self.folder, self.revision)

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def files_among(self, names: Sequence[str], commit: str) -> tuple[str, ...]:
        """The files of the part among the names of a commit; raises InputError if there are none."""
        data = _data_files(names)
        if not data:
            raise InputError(_nothing_to_read(self.repository, names, setting=self.setting))
        readme = read_readme(self.snapshot(commit))
        return files_of_part(data, readme, self.part, origin=f"{self.setting}: {self.source}")

    def hub_errors_explained(self) -> AbstractContextManager[None]:
        return hub_errors_explained(
            self.repository,
            revision=self.revision,
            cache=self.cache,
            setting=self.setting,
            what="a data set",
            pages="datasets/",
        )


def _find(wanted: _Wanted) -> HubFiles | None:
    """The part in the cache; None if some of it is missing, or may be."""
    commit = wanted.cached_commit
    snapshot = wanted.snapshot(commit)
    if not snapshot.is_dir():
        return None
    listing = _stored_listing(wanted, commit)
    if listing is None:
        names = tuple(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*"))
    else:
        names = listing.names
    try:
        chosen = wanted.files_among(names, commit)
    except InputError:
        if listing is not None:  # of the whole repository, so no download would help
            raise
        return None
    is_whole = all((snapshot / name).is_file() for name in chosen)
    lacks_readme = README in names and not (snapshot / README).is_file()
    if not is_whole or lacks_readme or (listing is None and not _has_all_shards(chosen)):
        return None
    return HubFiles(f"{wanted.repository}@{commit}", tuple(snapshot / name for name in chosen))


def _request_listing(wanted: _Wanted, *, with_sizes: bool) -> tuple[str, Listing]:
    """Requests the commit and its files from the hub; stores the listing and README.md in the cache."""
    from huggingface_hub import HfApi

    described = HfApi().dataset_info(
        wanted.repository, revision=wanted.revision, timeout=REPLY_TIMEOUT_S, files_metadata=with_sizes
    )
    siblings, commit = described.siblings or (), described.sha
    assert commit is not None, "the hub returns a commit"
    names = tuple(sibling.rfilename for sibling in siblings)
    listing = Listing(names=names, sizes=tuple(sibling.size or 0 for sibling in siblings) if with_sizes else ())
    _store_listing(wanted, commit, listing)
    if README in names:
        _fetch(wanted, commit, [README])
    return commit, listing


def _fetch(wanted: _Wanted, commit: str, names: Sequence[str]) -> None:
    from huggingface_hub import snapshot_download

    patterns = [escape(name) for name in names]
    snapshot_download(
        wanted.repository, repo_type="dataset", revision=commit, cache_dir=wanted.cache, allow_patterns=patterns
    )


def _data_files(names: Sequence[str]) -> tuple[str, ...]:
    """The readable files: rows, or text if there are none."""
    visible = [
        name
        for name in names
        if not any(not part or part.startswith((".", "__")) for part in name.split("/"))
        and name.rpartition("/")[2] not in SETTINGS_FILES
    ]
    rows = tuple(name for name in visible if content_suffix(name) in ROW_SUFFIXES)
    texts = tuple(name for name in visible if content_suffix(name) in TEXT_SUFFIXES and name != README)
    return rows or texts


def _has_all_shards(names: Sequence[str]) -> bool:
    """True if numbered files are as many as their names state."""
    counts: dict[tuple[str, str, str], int] = {}
    for name in names:
        if shard := _SHARD.fullmatch(name):
            key = (shard[1], shard[2], shard[3])
            counts[key] = counts.get(key, 0) + 1
    return all(count == int(total) for (_, total, _), count in counts.items())


def _listing_path(wanted: _Wanted, commit: str) -> Path:
    return wanted.folder / "listings" / f"{commit}.json"


def _stored_listing(wanted: _Wanted, commit: str) -> Listing | None:
    try:
        return codec.read(_listing_path(wanted, commit), Listing)
    except InputError:  # filled by another program, or never requested
        return None


def _store_listing(wanted: _Wanted, commit: str, listing: Listing) -> None:
    """Stores the names, and the commit of the branch or tag where huggingface_hub would write it."""
    path = _listing_path(wanted, commit)
    path.parent.mkdir(parents=True, exist_ok=True)
    codec.write(path, listing)
    reference = wanted.folder / "refs" / (wanted.revision or "main")
    if reference.name != commit:
        reference.parent.mkdir(parents=True, exist_ok=True)
        codec.write_bytes(reference, commit.encode())


def _nothing_to_read(repository: str, names: Sequence[str], *, setting: str) -> str:
    script = next((name for name in names if name.endswith(".py")), None)
    if script is not None:
        return (
            f"{setting}: {repository} is made by its program {script}, which is never run; the hub may hold it as "
            f"Parquet:\n{setting}={repository}@refs/convert/parquet"
        )
    suffixes = sorted({content_suffix(name) for name in names} - {""})
    return f"{setting}: {repository} holds no rows and no text, only {', '.join(suffixes) or 'nothing'}"
