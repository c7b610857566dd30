"""Who wrote a checkpoint, told by the files in it, and which of its files are the weights.

A folder may hold the weights in several forms: a Trainer's folder under DeepSpeed has 16-bit safetensors and, further
down, the fp32 masters. The first of `_FORMS` that is there is taken, and the others are named.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from trainer.runtime.importing.files import checked_folder, has_file
from trainer.runtime.importing.tensors import find_weights
from trainer.runtime.importing.zero import find_states
from trainer.spec.errors import InputError
from trainer.spec.messages.import_request import ImportKind

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
    """What the folder is, or holds of the kind that was asked for; InputError where that is nothing."""
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
        raise InputError(f"{folder}: holds no weights of {NAMES[chosen]}{_hint(folder, chosen)}")
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
        found = _FINDERS[form](folder)
        if found is not None:
            yield form, *found


def _find_safetensors(folder: Path) -> tuple[Path, str] | None:
    if has_file(folder, "model_1.safetensors"):
        raise InputError(f"{folder}: holds several models (model_1.safetensors); give each its own folder")
    name = find_weights(folder, "model", ".safetensors")
    return None if name is None else (folder, name)


def _find_torch(folder: Path) -> tuple[Path, str] | None:
    if has_file(folder, "pytorch_model_1.bin"):
        raise InputError(f"{folder}: holds several models (pytorch_model_1.bin); give each its own folder")
    name = find_weights(folder, "pytorch_model", ".bin") or find_weights(folder, "pytorch_model_fsdp", ".bin")
    return None if name is None else (folder, name)


def _find_dcp(folder: Path) -> tuple[Path, str] | None:
    if has_file(folder, ".metadata"):
        return folder, folder.name
    if has_file(folder, "pytorch_model_fsdp_0"):
        return checked_folder(folder, "pytorch_model_fsdp_0"), "pytorch_model_fsdp_0"
    return None


def _find_zero(folder: Path) -> tuple[Path, str] | None:
    states = find_states(folder)
    return None if states is None else (states, states.name)


_FINDERS: Mapping[Form, Callable[[Path], tuple[Path, str] | None]] = {
    Form.SAFETENSORS: _find_safetensors,
    Form.TORCH: _find_torch,
    Form.DCP: _find_dcp,
    Form.ZERO: _find_zero,
}
_ALL = (Form.SAFETENSORS, Form.TORCH, Form.DCP, Form.ZERO)
_FORMS_OF = {
    ImportKind.HUGGINGFACE: (Form.SAFETENSORS, Form.TORCH),
    ImportKind.TRAINER: _ALL,
    ImportKind.ACCELERATE: _ALL,
    ImportKind.DEEPSPEED: (Form.ZERO,),
    ImportKind.DCP: (Form.DCP,),
}


def _not_read(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(path.name for path in folder.iterdir() if _NOT_READ.fullmatch(path.name)))


def _hint(folder: Path, kind: ImportKind) -> str:
    found = [name for other, name in NAMES.items() if other is not kind and _is(folder, other)]
    return f"; it looks like {found[0]}" if found else ""


def _is(folder: Path, kind: ImportKind) -> bool:
    return has_file(folder, ADAPTER_CONFIG) if kind is ImportKind.PEFT else bool([*_forms(folder, _FORMS_OF[kind])])
