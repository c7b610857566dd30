"""Files of a data set: those of one split, and those of the Hugging Face hub, from the local cache or downloaded.

`ORG/NAME` is the newest revision that was downloaded, `ORG/NAME@REVISION` a branch, a tag or a commit. Only the files
of the requested split are downloaded, and only files of text or rows, by suffix: never a script, never a pickle.

Cached data needs no network. huggingface_hub keeps the list of all files of a commit with their sizes, written before
the first download, so that an interrupted download is detected and continued. If a program without that list filled the
cache, only numbered files (`-00000-of-00004`) show what is missing.

Splits are found by names alone, as on the hub, so that a data set means here what it means there. The front matter of
its README.md may list subsets (`configs`) with their files by split, as patterns. Otherwise names decide, as in the
library datasets: a file `train-00000-of-00004.parquet`, a folder `test/`, a word of the name (`dev.jsonl`,
`my_train_v2.csv`), each of them alone; if no name has a split, everything is train.

`Dataset.save_to_disk` and `DatasetDict.save_to_disk` write a `state.json` next to `dataset_info.json`, which lists the
Arrow files of one data set, and a `dataset_dict.json`, which names the splits, each a folder of that kind.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec

from shardwise.launch.inputs.hub import (
    REPLY_TIMEOUT_S,
    hub_errors_explained,
    is_hub_id,
    repository_folder,
    without_progress_bars,
)
from shardwise.launch.job.yaml_text import read_yaml
from shardwise.trainer.spec.data.profile import ROW_SUFFIXES, content_suffix
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError

README = "README.md"
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md"})
_REVISION = r"[A-Za-z0-9][A-Za-z0-9._/-]*"
_NUMBERED = r"(.*)-[0-9]{5}-of-([0-9]{5})(.*)"
SETTINGS_FILES = frozenset({
    "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json",
})  # fmt: skip
_NUM_SHOWN = 12
_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SEPARATORS = r"-._ 0-9"
_SHARD_OF_SPLIT = r"(?P<split>\w+(?:\.\w+)*)-[0-9]{5}-of-[0-9]{5}[^/]*"
_CONVERTED = r"(?P<subset>[^/]+)/(?P<split>[^/]+)/[0-9]{4,}\.parquet"
_FRONT_MATTER = r"(?ms)\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$"
T = TypeVar("T")


class Part(msgspec.Struct, frozen=True):
    """The part of a data set that a source names."""

    subset: str | None
    split: str | None  # None: train


class HubFiles(msgspec.Struct, frozen=True):
    """The files of one part of a data set, on this machine."""

    reference: str  # ORG/NAME@COMMIT
    paths: tuple[Path, ...]


class ListedFile(msgspec.Struct, frozen=True):
    """A file of a data set that may not be on this machine."""

    address: str  # hf://datasets/ORG/NAME@COMMIT/FILE
    size_bytes: int
    path: Path  # of the file, once downloaded


class ListedFiles(msgspec.Struct, frozen=True):
    """The files of one part of a data set, by name and size."""

    reference: str  # ORG/NAME@COMMIT
    files: tuple[ListedFile, ...]


def is_dataset_id(source: str) -> bool:
    """True if the source may name a data set of the hub."""
    repository, at, revision = source.partition("@")
    is_revision = re.fullmatch(_REVISION, revision) is not None and ".." not in revision
    return is_hub_id(repository) and (not at or is_revision)


def dataset_files(source: str, part: Part, *, cache: Path, setting: str) -> HubFiles:
    """The part's files, downloaded if they are not in `cache`; a cached revision needs no network.

    Raises InputError if the data set, its revision or the part does not exist, or needs a token; EnvironmentFaultError
    if the hub cannot be reached. Both name the next step.
    """
    wanted = _Wanted(source, part, cache, setting)
    found = _find(wanted)
    if found is None or not all((found.snapshot / name).is_file() for name in found.sizes):
        found = _request(wanted)
        with wanted.hub_errors_explained():
            _fetch(wanted, found.snapshot.name, list(found.sizes))
    paths = tuple(found.snapshot / name for name in found.sizes)
    return HubFiles(f"{wanted.repository}@{found.snapshot.name}", paths)


def list_dataset(source: str, part: Part, *, cache: Path, setting: str) -> ListedFiles:
    """The part's files without downloading them; a revision that was listed or downloaded needs no network.

    Raises the errors of `dataset_files`.
    """
    wanted = _Wanted(source, part, cache, setting)
    found = _find(wanted) or _request(wanted)
    reference = f"{wanted.repository}@{found.snapshot.name}"
    files = (
        ListedFile(f"hf://datasets/{reference}/{name}", size, found.snapshot / name)
        for name, size in found.sizes.items()
        if size
    )
    return ListedFiles(reference, tuple(files))


def read_readme(folder: Path) -> str | None:
    """Text of README.md; None if there is none."""
    try:
        return (folder / README).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


class _Wanted(msgspec.Struct, frozen=True):
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

    def files_among(self, names: Sequence[str], snapshot: Path) -> tuple[str, ...]:
        """The files of the part among the names of a commit; raises InputError if there are none."""
        data = _data_files(names)
        if not data:
            raise InputError(_nothing_to_read(self.repository, names, setting=self.setting))
        return files_of_part(data, read_readme(snapshot), self.part, origin=f"{self.setting}: {self.source}")

    def hub_errors_explained(self) -> AbstractContextManager[None]:
        return hub_errors_explained(
            self.repository,
            revision=self.revision,
            cache=self.cache,
            setting=self.setting,
            what="a data set",
            pages="datasets/",
        )


class _Found(msgspec.Struct, frozen=True):
    """The files of the part in one commit."""

    snapshot: Path  # the folder of the commit's files, named after it
    sizes: dict[str, int]  # bytes, by name


def _find(wanted: _Wanted) -> _Found | None:
    """The part as the cache lists it, downloaded or not; None if the cache does not have the list, or may not."""
    if not wanted.folder.is_dir():
        return None
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, RevisionResolutionError

    place: Any = {"repo_type": "dataset", "revision": wanted.revision, "cache_dir": wanted.cache}
    try:
        commit = HfApi().resolve_revision(wanted.repository, local_files_only=True, **place).resolved
    except RevisionResolutionError:
        return None
    snapshot = wanted.folder / "snapshots" / commit
    try:
        listed = get_cached_repo_tree(wanted.repository, **place | {"revision": commit})
    except CachedRepoTreeNotFoundError:
        return _whole_part(wanted, snapshot)
    sizes = {file.path: file.size for file in listed}
    if README in sizes and not (snapshot / README).is_file():
        return None
    return _Found(snapshot, {name: sizes[name] for name in wanted.files_among(list(sizes), snapshot)})


def _whole_part(wanted: _Wanted, snapshot: Path) -> _Found | None:
    """The part among the files that are there, where nothing lists the others; None if some are, or may be, missing."""
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*")]
    try:
        chosen = wanted.files_among(names, snapshot)
    except InputError:
        return None
    if not _has_all_shards(chosen) or not all((snapshot / name).is_file() for name in chosen):  # a link to nothing
        return None
    return _Found(snapshot, {name: (snapshot / name).stat().st_size for name in chosen})


def _request(wanted: _Wanted) -> _Found:
    """The part as the hub lists it now; stores the list and README.md in the cache."""
    from huggingface_hub import HfApi, logging

    with wanted.hub_errors_explained(), without_progress_bars():
        HfApi().dataset_info(wanted.repository, revision=wanted.revision, timeout=REPLY_TIMEOUT_S)
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # it warns if there is no README.md
        try:
            _fetch(wanted, wanted.revision, [README])
        finally:
            logging.set_verbosity(verbosity)
        found = _find(wanted)
    if found is None:
        raise EnvironmentFaultError(
            f"{wanted.setting}: the list of files of {wanted.repository} is not in {wanted.cache} although the hub "
            "responds; check that this folder can be written, then try again"
        )
    return found


def _fetch(wanted: _Wanted, revision: str | None, names: Sequence[str]) -> None:
    from glob import escape

    from huggingface_hub import snapshot_download

    patterns = [escape(name) for name in names]
    snapshot_download(
        wanted.repository, repo_type="dataset", revision=revision, cache_dir=wanted.cache, allow_patterns=patterns
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
        if shard := re.fullmatch(_NUMBERED, name):
            key = (shard[1], shard[2], shard[3])
            counts[key] = counts.get(key, 0) + 1
    return all(count == int(total) for (_, total, _), count in counts.items())


def _nothing_to_read(repository: str, names: Sequence[str], *, setting: str) -> str:
    script = next((name for name in names if name.endswith(".py")), None)
    if script is not None:
        return (
            f"{setting}: {repository} is made by its program {script}, which is never run; the hub may hold it as "
            f"Parquet:\n{setting}={repository}@refs/convert/parquet"
        )
    suffixes = sorted({content_suffix(name) for name in names} - {""})
    return f"{setting}: {repository} holds no rows and no text, only {', '.join(suffixes) or 'nothing'}"


def files_of_part(names: Sequence[str], readme: str | None, part: Part, *, origin: str) -> tuple[str, ...]:
    """The files among `names` (relative, with slashes) of the part, sorted; raises InputError if there are none."""
    configs = _converted(names) or ([] if readme is None else _configs(readme, origin=origin))
    splits = _splits_of_config(names, _config(configs, part, origin=origin)) if configs else _splits(names, part)
    if part.subset is not None and not configs and not splits:
        folders = {name.partition("/")[0] for name in names if "/" in name}
        raise InputError(f"{origin} has no subset {part.subset}; {_listed(folders, 'it has', 'it has none')}")
    wanted = part.split or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    found = splits.get(wanted)
    if found == []:
        raise InputError(f"{origin}: README.md lists files of the split {wanted}, but none of them is there")
    if found is None:
        raise InputError(f"{origin} has no split {wanted}; {_listed(splits, 'it has', 'none of its files is data')}")
    return tuple(sorted(_of_one_kind(found)))


def _listed(names: Iterable[str], before: str, instead: str) -> str:
    known = sorted(names)
    more = f" and {len(known) - _NUM_SHOWN} more" if len(known) > _NUM_SHOWN else ""
    return f"{before} {', '.join(known[:_NUM_SHOWN])}{more}" if known else instead


def _of_one_kind(names: Sequence[str]) -> Sequence[str]:
    """The files of the commonest kind, rows before text: a data set often has the same rows in two formats."""
    rows = [name for name in names if content_suffix(name) in ROW_SUFFIXES]
    if not rows:
        return names
    counts: dict[str, int] = {}
    for name in rows:
        counts[content_suffix(name)] = counts.get(content_suffix(name), 0) + 1
    commonest = max(counts, key=lambda suffix: (counts[suffix], suffix == ".parquet", suffix))
    return [name for name in rows if content_suffix(name) == commonest]


def _configs(readme: str, *, origin: str) -> list[dict[str, Any]]:
    """The subsets that the front matter lists."""
    front_matter = re.match(_FRONT_MATTER, readme)
    if front_matter is None:
        return []
    settings = read_yaml(front_matter.group(1), origin=f"{origin}: README.md")
    configs = settings.get("configs") if isinstance(settings, Mapping) else None
    if not isinstance(configs, list):
        return []
    return [
        config for config in configs if isinstance(config, dict) and ("data_files" in config or "data_dir" in config)
    ]


def _converted(names: Sequence[str]) -> list[dict[str, Any]]:
    """The subsets of the hub's own Parquet form of a data set, `SUBSET/SPLIT/0000.parquet`; empty for any other."""
    found = [re.fullmatch(_CONVERTED, name) for name in names]
    folders = {(match["subset"], match["split"]) for match in found if match}
    if not folders or not all(found):
        return []
    by_subset: dict[str, dict[str, str]] = {}
    for subset, split in sorted(folders):
        by_subset.setdefault(subset, {})[split.removeprefix("partial-")] = f"{subset}/{split}/*"
    return [{"config_name": subset, "data_files": splits} for subset, splits in by_subset.items()]


def _config(configs: Sequence[dict[str, Any]], part: Part, *, origin: str) -> dict[str, Any]:
    by_name = {str(config.get("config_name", "default")): config for config in configs}
    if part.subset is not None:
        if part.subset not in by_name:
            raise InputError(f"{origin} has no subset {part.subset}; {_listed(by_name, 'it has', '')}")
        return by_name[part.subset]
    marked = next((config for config in configs if config.get("default") is True), by_name.get("default"))
    if len(by_name) == 1 or marked is not None:
        return marked if marked is not None else configs[0]
    some = sorted(by_name)[0]
    raise InputError(
        f"{origin} has several subsets: {_listed(by_name, '', '').strip()};\nname one: {{source: ..., subset: {some}}}"
    )


def _splits_of_config(names: Sequence[str], config: Mapping[str, Any]) -> dict[str, list[str]]:
    folder = str(config.get("data_dir") or "").strip("/")
    inside = [name for name in names if not folder or name.startswith(f"{folder}/")]
    written = config.get("data_files")
    if written is None:
        return _splits_by_name(inside)
    prefix = f"{folder}/" if folder else ""
    return {
        split: [name for name in inside if any(_pattern(prefix + path).fullmatch(name) for path in paths)]
        for split, paths in _patterns_by_split(written).items()
    }


def _patterns_by_split(written: object) -> dict[str, list[str]]:
    """Patterns of `data_files`, which is a pattern, several, or several with their splits."""
    if isinstance(written, Mapping):
        return {str(split): _paths(paths) for split, paths in written.items()}
    entries = written if isinstance(written, list) else [written]
    by_split: dict[str, list[str]] = {}
    for entry in entries:
        if isinstance(entry, Mapping):
            by_split.setdefault(str(entry.get("split", "train")), []).extend(_paths(entry.get("path")))
        else:
            by_split.setdefault("train", []).extend(_paths(entry))
    return by_split


def _paths(written: object) -> list[str]:
    return [str(path).removeprefix("./") for path in (written if isinstance(written, list) else [written])]


def _pattern(glob: str) -> re.Pattern[str]:
    """`*` stays within a folder, `**` does not, as everywhere."""
    translated = ""
    for token in re.findall(r"\*\*/|\*\*|\*|\?|\[[^]]+\]|.", glob, re.DOTALL):
        match token:
            case "**/":
                translated += r"(?:.*/)?"
            case "**":
                translated += ".*"
            case "*":
                translated += "[^/]*"
            case "?":
                translated += "[^/]"
            case _ if len(token) > 1:
                translated += "[" + token[1:-1].replace("\\", r"\\").replace("[", r"\[").replace("!", "^", 1) + "]"
            case _:
                translated += re.escape(token)
    return re.compile(translated)


def _splits(names: Sequence[str], part: Part) -> dict[str, list[str]]:
    """Files by split; without a README that lists subsets, a subset is a folder at the top."""
    if part.subset is None:
        return _splits_by_name(names)
    return _splits_by_name([name for name in names if name.startswith(f"{part.subset}/")])


def _splits_by_name(names: Sequence[str]) -> dict[str, list[str]]:
    """Files by split, by the first rule that finds any; files without a split are then excluded."""
    for rule in _RULES:
        splits: dict[str, list[str]] = {}
        for name in names:
            split = rule(PurePosixPath(name))
            if split is not None:
                splits.setdefault(split, []).append(name)
        if splits:
            return splits
    return {"train": list(names)} if names else {}


def _split_of_word(word: str) -> str | None:
    for split, keywords in _KEYWORDS.items():
        if re.search(rf"(?:^|[{_SEPARATORS}])(?:{'|'.join(keywords)})(?:$|[{_SEPARATORS}])", word):
            return split
    return None


_RULES: tuple[Callable[[PurePosixPath], str | None], ...] = (
    lambda path: found["split"] if (found := re.fullmatch(_SHARD_OF_SPLIT, path.name)) else None,
    lambda path: next((split for folder in path.parts[:-1] if (split := _split_of_word(folder))), None),
    lambda path: _split_of_word(path.name),
)


class _DataFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    files: list[_DataFile] = msgspec.field(name="_data_files")


class _Splits(msgspec.Struct):
    splits: list[str]


def saved_files(folder: Path, part: Part, *, setting: str) -> tuple[Path, ...] | None:
    """The Arrow files of the split; None if `save_to_disk` did not write the folder. Raises InputError."""
    if (folder / "dataset_dict.json").is_file():
        splits = _read(folder / "dataset_dict.json", _Splits, setting=setting).splits
        wanted = part.split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
        if wanted not in splits:
            raise InputError(f"{setting}: {folder} has no split {wanted}; it has {', '.join(sorted(splits))}")
        _refuse_subset(folder, part, setting=setting)
        return _saved_list(folder / wanted, setting=setting)
    if not (folder / "state.json").is_file() or not (folder / "dataset_info.json").is_file():
        return None
    _refuse_subset(folder, part, setting=setting)
    if part.split is not None:
        raise InputError(f"{setting}: {folder} has no split {part.split}; it is one data set that was saved alone")
    return _saved_list(folder, setting=setting)


def _saved_list(folder: Path, *, setting: str) -> tuple[Path, ...]:
    names = [Path(file.filename).name for file in _read(folder / "state.json", _State, setting=setting).files]
    return tuple(folder / name for name in names)


def _refuse_subset(folder: Path, part: Part, *, setting: str) -> None:
    if part.subset is not None:
        raise InputError(f"{setting}: {folder} has no subset {part.subset}; it is a data set that was saved")


def _read(path: Path, kind: type[T], *, setting: str) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{setting}: {path} is damaged: {error}") from error
