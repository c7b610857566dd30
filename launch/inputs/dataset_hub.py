"""A data set's files from the Hugging Face hub: those already in the local cache, and a download of the rest.

`ORG/NAME` is the newest revision that was downloaded, `ORG/NAME@REVISION` a branch, a tag or a commit. Only the files
of the requested split are downloaded, and only files of text or rows, by suffix: never a script, never a pickle.

The cache is read by its layout (`datasets--ORG--NAME/refs/REVISION` holds a commit, `snapshots/COMMIT/` its files), so
that cached data needs neither the network nor a library. `listings/COMMIT.json` beside it holds the names of all files
of that commit, written before the first download, so that an interrupted download is detected and continued. If another
program filled the cache, only numbered files (`-00000-of-00004`) show what is missing.
"""

import re
from collections.abc import Mapping, Sequence
from glob import escape
from pathlib import Path
from typing import NamedTuple

from launch.inputs.dataset_splits import SETTINGS_FILES, Part, files_of_part
from launch.inputs.hub import ANSWER_TIMEOUT_S, HUB_ID, hub_errors_explained
from trainer.spec import codec
from trainer.spec.data.request import ROW_SUFFIXES, content_suffix
from trainer.spec.errors import InputError
from trainer.spec.value import Value

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
    found = _find(source, part, cache=cache, setting=setting)
    return found if found is not None else _download(source, part, cache=cache, setting=setting)


def list_dataset(source: str, part: Part, *, cache: Path, setting: str) -> ListedFiles:
    """The part's files without downloading them; a revision that was listed or downloaded needs no network.

    Raises the errors of `dataset_files`.
    """
    repository, _ = _parsed(source)
    found = _find(source, part, cache=cache, setting=setting)
    if found is not None:
        snapshot = _root(cache, repository) / "snapshots" / found.reference.rpartition("@")[2]
        sizes = {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in found.paths}
        return _listed(found.reference, sizes, snapshot)
    commit, listing = _listing_with_sizes(source, cache=cache, setting=setting)
    snapshot, data = _root(cache, repository) / "snapshots" / commit, _data_files(listing.names)
    if not data:
        raise InputError(_nothing_to_read(repository, listing.names, setting=setting))
    chosen = files_of_part(data, read_readme(snapshot), part, origin=f"{setting}: {source}")
    sizes = dict(zip(listing.names, listing.sizes, strict=True))
    return _listed(f"{repository}@{commit}", {name: sizes[name] for name in chosen}, snapshot)


def _listed(reference: str, sizes: Mapping[str, int], snapshot: Path) -> ListedFiles:
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


def _find(source: str, part: Part, *, cache: Path, setting: str) -> HubFiles | None:
    """The part in the cache; None if some of it is missing, or may be."""
    repository, revision = _parsed(source)
    root = _root(cache, repository)
    commit = _commit(root, revision)
    snapshot = root / "snapshots" / commit
    if not snapshot.is_dir():
        return None
    listing = _read_listing(root, commit)
    names = listing or tuple(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*"))
    try:
        chosen = files_of_part(_data_files(names), read_readme(snapshot), part, origin=f"{setting}: {source}")
    except InputError:
        if listing:  # of the whole repository, so no download would help
            raise
        return None
    is_whole = all((snapshot / name).is_file() for name in chosen) and (bool(listing) or _has_all_shards(chosen))
    lacks_readme = README in names and not (snapshot / README).is_file()
    if not is_whole or lacks_readme:
        return None
    return HubFiles(f"{repository}@{commit}", tuple(snapshot / name for name in chosen))


def _download(source: str, part: Part, *, cache: Path, setting: str) -> HubFiles:
    repository, revision = _parsed(source)
    with hub_errors_explained(
        repository, revision=revision, cache=cache, setting=setting, what="a data set", pages="datasets/"
    ):
        commit, names = _request_listing(source, cache=cache, with_sizes=False)
        snapshot = _root(cache, repository) / "snapshots" / commit
        data = _data_files(names)
        if not data:
            raise InputError(_nothing_to_read(repository, names, setting=setting))
        chosen = files_of_part(data, read_readme(snapshot), part, origin=f"{setting}: {source}")
        _fetch(repository, commit, chosen, cache=cache)
    return HubFiles(f"{repository}@{commit}", tuple(snapshot / name for name in chosen))


def _listing_with_sizes(source: str, *, cache: Path, setting: str) -> tuple[str, Listing]:
    """The commit of the source and its files, from the cache if they were requested before."""
    repository, revision = _parsed(source)
    root = _root(cache, repository)
    commit = _commit(root, revision)
    listing = _stored_listing(root, commit)
    if listing is None or len(listing.sizes) < len(listing.names):
        with hub_errors_explained(
            repository, revision=revision, cache=cache, setting=setting, what="a data set", pages="datasets/"
        ):
            commit, _ = _request_listing(source, cache=cache, with_sizes=True)
        listing = _stored_listing(root, commit)
    assert listing is not None, "it was just written"
    return commit, listing


def _request_listing(source: str, *, cache: Path, with_sizes: bool) -> tuple[str, tuple[str, ...]]:
    """Requests the commit and the names of its files from the hub; stores them and README.md in the cache."""
    from huggingface_hub import HfApi

    repository, revision = _parsed(source)
    described = HfApi().dataset_info(repository, revision=revision, timeout=ANSWER_TIMEOUT_S, files_metadata=with_sizes)
    siblings, commit = described.siblings or (), described.sha
    assert commit is not None, "the hub answers with a commit"
    names = tuple(sibling.rfilename for sibling in siblings)
    sizes = tuple(sibling.size or 0 for sibling in siblings) if with_sizes else ()
    _write_listing(_root(cache, repository), commit, revision, Listing(names=names, sizes=sizes))
    if README in names:
        _fetch(repository, commit, [README], cache=cache)
    return commit, names


def _fetch(repository: str, commit: str, names: Sequence[str], *, cache: Path) -> None:
    from huggingface_hub import snapshot_download

    patterns = [escape(name) for name in names]
    snapshot_download(repository, repo_type="dataset", revision=commit, cache_dir=cache, allow_patterns=patterns)


def _parsed(source: str) -> tuple[str, str | None]:
    repository, _, revision = source.partition("@")
    return repository, revision or None


def _root(cache: Path, repository: str) -> Path:
    return cache / f"datasets--{repository.replace('/', '--')}"


def _commit(root: Path, revision: str | None) -> str:
    """The commit of a branch or a tag when it was last requested; a commit is itself."""
    name = revision or "main"
    try:
        return (root / "refs" / name).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return name


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


def _listing_path(root: Path, commit: str) -> Path:
    return root / "listings" / f"{commit}.json"


def _read_listing(root: Path, commit: str) -> tuple[str, ...]:
    listing = _stored_listing(root, commit)
    return () if listing is None else listing.names


def _stored_listing(root: Path, commit: str) -> Listing | None:
    try:
        return codec.read(_listing_path(root, commit), Listing)
    except InputError:  # filled by another program, or never requested
        return None


def _write_listing(root: Path, commit: str, revision: str | None, listing: Listing) -> None:
    """Stores the names, and the commit of the branch or tag where huggingface_hub would write it."""
    _listing_path(root, commit).parent.mkdir(parents=True, exist_ok=True)
    codec.write(_listing_path(root, commit), listing)
    reference = root / "refs" / (revision or "main")
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
