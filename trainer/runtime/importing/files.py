"""Files of a stranger's checkpoint: plain ones inside its folder, of a size that is worth reading.

A name in an index may not lead out of the folder, and neither may a link. The one exception is the hub's cache, whose
snapshots are folders of links into the `blobs` beside them.
"""

import json
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.spec.errors import InputError
from trainer.spec.units import MIB, format_bytes

CONFIG_BYTES = 16 * MIB
INDEX_BYTES = 128 * MIB  # 100 bytes a tensor
TOKENIZER_BYTES = 512 * MIB  # the largest known are of 35 MB
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def checked_file(folder: Path, name: str, *, most_bytes: int | None = None) -> Path:
    """The path of a file that lies in `folder`; InputError where it is missing, a link out of it, or too large."""
    if Path(name).name != name or name in ("", ".", ".."):
        raise InputError(f"{folder}: names the file {_short(name)}, which does not lie beside it; nothing was read")
    path = folder / name
    try:
        is_regular = stat.S_ISREG(path.stat().st_mode)
        leads_out = path.is_symlink() and path.resolve().parent not in (folder.resolve(), _blobs_of(folder))
        size_bytes = path.stat().st_size
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if leads_out:
        raise InputError(f"{path}: is a link out of the checkpoint's folder; put the file itself there")
    if not is_regular:
        raise InputError(f"{path}: is no file")
    if most_bytes is not None and size_bytes > most_bytes:
        raise InputError(f"{path}: is {format_bytes(size_bytes)}; {format_bytes(most_bytes)} is the most that is read")
    return path


def has_file(folder: Path, name: str) -> bool:
    """Whether there is something of that name, whatever it is: `checked_file` says what is wrong with it."""
    return (folder / name).is_symlink() or (folder / name).exists()


def checked_folder(folder: Path, name: str) -> Path:
    """The path of a folder inside of `folder`; InputError where it is none, or a link."""
    path = folder / name
    if Path(name).name != name or name in ("", ".", "..") or path.is_symlink() or not path.is_dir():
        raise InputError(f"{folder}: names the folder {_short(name)}, which is not one inside of it")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; InputError for anything else."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON: {_short(str(error))}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: is not a JSON object")
    return content


def read_weight_map(folder: Path, name: str) -> dict[str, str]:
    """Which file an index says each tensor is in; the files are looked at when they are opened."""
    path = checked_file(folder, name, most_bytes=INDEX_BYTES)
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise InputError(f"{path}: is damaged: it holds no weight_map")
    return weight_map


def copy_tokenizer(folders: Iterable[Path], out: Path) -> Path | None:
    """Copies the tokenizer of the first folder that has one; that folder, None where none has."""
    for folder in folders:
        if any(has_file(folder, name) for name in _VOCABULARIES):
            for name in _TOKENIZER_FILES:
                copy_file(folder, name, out, most_bytes=TOKENIZER_BYTES)
            return folder
    return None


def copy_file(folder: Path, name: str, out: Path, *, most_bytes: int) -> None:
    """Copies a file, if there is one."""
    if has_file(folder, name):
        shutil.copyfile(checked_file(folder, name, most_bytes=most_bytes), out / name)


def numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """Files whose name has the whole form of `pattern`, by the number that its one group holds."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = re.fullmatch(pattern, path.name)
        if match is not None:
            if int(match[1]) in found:
                raise InputError(f"{folder}: {found[int(match[1])].name} and {path.name} are of one rank; keep one")
            found[int(match[1])] = checked_file(folder, path.name)
    return dict(sorted(found.items()))


def printable(text: str) -> str:
    """At most three lines, without what a terminal would act on: names in a checkpoint are a stranger's."""
    lines = text.strip("\n").split("\n")[:3]
    return "\n".join("".join(each if each.isprintable() else "?" for each in line) for line in lines)


def _blobs_of(folder: Path) -> Path | None:
    """The files behind a snapshot of the hub's cache."""
    if folder.parent.name != "snapshots" or not folder.parents[1].name.startswith("models--"):
        return None
    return (folder.parents[1] / "blobs").resolve()


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")
