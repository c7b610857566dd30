"""Files of one split of a data set: names in, names out; only folders of `save_to_disk` are read.

As on the Hugging Face hub, so that a data set means here what it means there. The front matter of its README.md may
list subsets (`configs`) with their files by split, as patterns. Otherwise names decide, as in the library datasets: a
file `train-00000-of-00004.parquet`, a folder `test/`, a word of the name (`dev.jsonl`, `my_train_v2.csv`), each of them
alone; if no name has a split, everything is train.

`Dataset.save_to_disk` and `DatasetDict.save_to_disk` write a `state.json` next to `dataset_info.json`, which lists the
Arrow files of one data set, and a `dataset_dict.json`, which names the splits, each a folder of that kind.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import msgspec

from shardwise.launch.job.yaml_text import read_yaml
from shardwise.trainer.spec.data.profile import ROW_SUFFIXES, content_suffix
from shardwise.trainer.spec.errors import InputError

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
_SHARD = re.compile(r"(?P<split>\w+(?:\.\w+)*)-[0-9]{5}-of-[0-9]{5}[^/]*")
_CONVERTED = re.compile(r"(?P<subset>[^/]+)/(?P<split>[^/]+)/[0-9]{4,}\.parquet")
_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
T = TypeVar("T")


class Part(NamedTuple):
    """The part of a data set that a source names."""

    subset: str | None
    split: str | None  # None: train


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
    front_matter = _FRONT_MATTER.match(readme)
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
    found = [_CONVERTED.fullmatch(name) for name in names]
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
    lambda path: found["split"] if (found := _SHARD.fullmatch(path.name)) else None,
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
