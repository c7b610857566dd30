"""Files of an untrusted checkpoint: which trainer wrote it, which files are its weights, and checked access to them.

Only plain files inside the folder are opened, and those that are read whole up to a bounded size. A name in an index
may not lead out of the folder, and neither may a link; the exception is the hub's cache, whose snapshots are folders of
links into the `blobs` next to them.

A folder may hold the weights in several forms: a Trainer's folder under DeepSpeed has 16-bit safetensors and, further
down, the fp32 masters. The first form in `_FORMS_OF` is imported, and the others are reported.
"""

import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.messages.worker_requests import ImportKind
from shardwise.trainer.spec.units import KIB, MIB, format_bytes

CONFIG_BYTES = 16 * MIB
INDEX_BYTES = 128 * MIB  # 100 bytes a tensor
TOKENIZER_BYTES = 512 * MIB  # the largest known are of 35 MB
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
ADAPTER_CONFIG = "adapter_config.json"
NAMES = {
    ImportKind.HUGGINGFACE: "a Hugging Face model folder",
    ImportKind.TRAINER: "a checkpoint of transformers' Trainer",
    ImportKind.ACCELERATE: "a state that Accelerate saved",
    ImportKind.DEEPSPEED: "a DeepSpeed checkpoint",
    ImportKind.DCP: "a torch distributed checkpoint",
    ImportKind.PEFT: "a PEFT adapter",
}
_PICKLED_STATE = (
    r"(optimizer|scheduler|training_args|scaler|rng_state.*|random_states_.*|optimizer_\d+|dl_state_dict.*)"
)
_NOT_READ = re.compile(rf"{_PICKLED_STATE}\.(pt|pth|bin|pkl)")


def checked_file(folder: Path, name: str, *, most_bytes: int | None = None) -> Path:
    """The path of a file that lies in `folder`; InputError where it is missing, a link out of it, or too large."""
    if Path(name).name != name or name in ("", ".", ".."):
        raise InputError(f"{folder}: names the file {_short(name)}, which is not in this folder; nothing was read")
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
    """True if an entry of that name exists, of any type; `checked_file` reports its defects."""
    return (folder / name).is_symlink() or (folder / name).exists()


def checked_folder(folder: Path, name: str) -> Path:
    """The path of a folder inside of `folder`; InputError where it is none, or a link."""
    path = folder / name
    if Path(name).name != name or name in ("", ".", "..") or path.is_symlink() or not path.is_dir():
        raise InputError(f"{folder}: names the folder {_short(name)}, which is not one inside of it")
    return path


def read_weight_map(folder: Path, name: str) -> dict[str, str]:
    """The file of each tensor by an index; the files are checked when they are opened."""
    path = checked_file(folder, name, most_bytes=INDEX_BYTES)
    weight_map = codec.read_object(path).get("weight_map")
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
    """At most three lines without control characters: names in a checkpoint are untrusted."""
    lines = text.strip("\n").split("\n")[:3]
    return "\n".join("".join(each if each.isprintable() else "?" for each in line) for line in lines)


def _blobs_of(folder: Path) -> Path | None:
    """The files behind a snapshot of the hub's cache."""
    if folder.parent.name != "snapshots" or not folder.parents[1].name.startswith("models--"):
        return None
    return (folder.parents[1] / "blobs").resolve()


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


class Form(Enum):
    """How weights lie in files."""

    SAFETENSORS = "safetensors"
    TORCH = "torch.save"
    DCP = "distributed checkpoint"
    ZERO = "DeepSpeed"


class Found(NamedTuple):
    """The weights of a checkpoint."""

    kind: ImportKind
    form: Form
    folder: Path  # that holds them
    name: str  # of the file or the index; of a folder's, its own
    others: tuple[tuple[Form, str], ...] = ()  # other forms of the weights that are there
    not_read: tuple[str, ...] = ()  # pickled files of the training


def find_kind(folder: Path, kind: ImportKind | None) -> Found:
    """Kind of the folder, or its part of the requested kind; InputError if there is none."""
    _refuse_ours(folder)
    chosen = kind or _kind_of(folder)
    if chosen is ImportKind.PEFT:
        name = find_weights(folder, "adapter_model", ".safetensors") or find_weights(folder, "adapter_model", ".bin")
        if name is None or not has_file(folder, ADAPTER_CONFIG):
            raise InputError(f"{folder}: is no PEFT adapter: it lacks {ADAPTER_CONFIG} or adapter_model.safetensors")
        form = Form.SAFETENSORS if ".safetensors" in name else Form.TORCH
        return Found(chosen, form, folder, name, not_read=_not_read(folder))
    found = list(_forms(folder, _FORMS_OF[chosen]))
    if not found:
        hint = "" if kind is None else f"; it looks like {NAMES[_kind_of(folder)]}"
        raise InputError(f"{folder}: holds no weights of {NAMES[chosen]}{hint}")
    form, place, name = found[0]
    others = tuple((other, called) for other, _, called in found[1:])
    return Found(chosen, form, place, name, others, _not_read(folder))


def _kind_of(folder: Path) -> ImportKind:
    if has_file(folder, ADAPTER_CONFIG):
        return ImportKind.PEFT
    if has_file(folder, "trainer_state.json"):
        return ImportKind.TRAINER
    names = [path.name for path in folder.iterdir()]
    if any(re.fullmatch(r"random_states_\d+\.pkl|pytorch_model_fsdp(_\d+|\.bin)", name) for name in names):
        return ImportKind.ACCELERATE
    if has_file(folder, ".metadata"):
        return ImportKind.DCP
    if find_states(folder) is not None:
        return ImportKind.DEEPSPEED
    if next(_forms(folder, (Form.SAFETENSORS, Form.TORCH)), None) is not None:
        return ImportKind.HUGGINGFACE
    raise InputError(
        f"{folder}: is no checkpoint that is known here: it has no model.safetensors, no pytorch_model.bin,\n"
        "no .metadata, no DeepSpeed states and no adapter; name the folder that has them"
    )


def _refuse_ours(folder: Path) -> None:
    if has_file(folder, "MANIFEST.json"):
        raise InputError(
            f"{folder}: is a checkpoint of shardwise; write it as a folder with\n"
            f"shardwise export {folder.parents[1]} OUT --checkpoint {re.sub('-0*', '-', folder.name, count=1)}"
        )
    if has_file(folder, "plan.json") and has_file(folder, "checkpoints"):
        raise InputError(f"{folder}: is a run of shardwise; write what it trained with\nshardwise export {folder} OUT")


def _forms(folder: Path, forms: tuple[Form, ...]) -> Iterator[tuple[Form, Path, str]]:
    """The weights in a folder, the form that is preferred first."""
    for form in forms:
        found = _find(folder, form)
        if found is not None:
            yield form, *found


def _find(folder: Path, form: Form) -> tuple[Path, str] | None:
    """The folder and the name of the weights in one form."""
    match form:
        case Form.SAFETENSORS | Form.TORCH:
            stem, ending = ("model", ".safetensors") if form is Form.SAFETENSORS else ("pytorch_model", ".bin")
            if has_file(folder, f"{stem}_1{ending}"):
                raise InputError(f"{folder}: holds several models ({stem}_1{ending}); give each its own folder")
            name = find_weights(folder, stem, ending)
            if name is None and form is Form.TORCH:
                name = find_weights(folder, "pytorch_model_fsdp", ".bin")
            return None if name is None else (folder, name)
        case Form.DCP:
            if has_file(folder, ".metadata"):
                return folder, folder.name
            nested = "pytorch_model_fsdp_0"
            return (checked_folder(folder, nested), nested) if has_file(folder, nested) else None
        case Form.ZERO:
            states = find_states(folder)
            return None if states is None else (states, states.name)


_FORMS_OF = {
    ImportKind.HUGGINGFACE: (Form.SAFETENSORS, Form.TORCH),
    ImportKind.TRAINER: tuple(Form),
    ImportKind.ACCELERATE: tuple(Form),
    ImportKind.DEEPSPEED: (Form.ZERO,),
    ImportKind.DCP: (Form.DCP,),
}


def find_states(folder: Path) -> Path | None:
    """The folder with the states that `latest` names, or the only one, or this one; None where there are none."""
    if _has_states(folder):
        return folder
    if has_file(folder, "latest"):
        name = checked_file(folder, "latest", most_bytes=KIB).read_text(encoding="utf-8", errors="replace").strip()
        is_closed = Path(name).name == name and not has_file(folder, name)  # removed for room; 16-bit weights remain
        return None if is_closed else checked_folder(folder, name)
    found = [path for path in sorted(folder.iterdir()) if not path.is_symlink() and path.is_dir() and _has_states(path)]
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:3])
        raise InputError(f"{folder}: holds several DeepSpeed checkpoints ({names}) and no `latest`; name one of them")
    return found[0] if found else None


def _has_states(folder: Path) -> bool:
    return any(path.name.endswith("_model_states.pt") for path in folder.iterdir())


def find_weights(folder: Path, stem: str, ending: str) -> str | None:
    """The file of weights in a folder, or its index; None where there is neither."""
    names = (f"{stem}{ending}", f"{stem}{ending}.index.json")
    return next((name for name in names if has_file(folder, name)), None)


def _not_read(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir() if _NOT_READ.fullmatch(path.name)))
