"""Folders that `Dataset.save_to_disk` and `DatasetDict.save_to_disk` of the library datasets make.

`state.json` beside `dataset_info.json` lists the Arrow files of one data set; `dataset_dict.json` names the splits,
each a folder of that kind.
"""

from pathlib import Path
from typing import TypeVar

import msgspec

from launch.inputs.dataset_splits import Part
from trainer.spec.errors import InputError

T = TypeVar("T")


class _DataFile(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    files: list[_DataFile] = msgspec.field(name="_data_files")


class _Splits(msgspec.Struct):
    splits: list[str]


def saved_files(folder: Path, part: Part, *, setting: str) -> tuple[Path, ...] | None:
    """The Arrow files of the split, None where the folder is none of that kind; InputError where it has none such."""
    if (folder / "dataset_dict.json").is_file():
        splits = _read(folder / "dataset_dict.json", _Splits, setting=setting).splits
        wanted = part.split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
        if wanted not in splits:
            raise InputError(f"{setting}: {folder} has no split {wanted}; it has {', '.join(sorted(splits))}")
        _refuse_subset(folder, part, setting=setting)
        return _listed(folder / wanted, setting=setting)
    if not (folder / "state.json").is_file() or not (folder / "dataset_info.json").is_file():
        return None
    _refuse_subset(folder, part, setting=setting)
    if part.split is not None:
        raise InputError(f"{setting}: {folder} has no split {part.split}; it is one data set that was saved alone")
    return _listed(folder, setting=setting)


def _listed(folder: Path, *, setting: str) -> tuple[Path, ...]:
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
