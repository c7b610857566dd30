"""Checks of safetensors weights without loading them: headers against file sizes, the index against the headers.

A safetensors file is 8 bytes of length, a JSON header of that length, and the tensors' bytes. An interrupted
download is a file shorter than its header promises. Every InputError names the file and the remedy.
"""

import json
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.units import format_bytes

_LARGEST_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_AGAIN = "download or save it again"
_ADAPTER = "adapter_config.json"
_PACKED = ".quant_state.bitsandbytes__"  # follows the name of a 4-bit weight
_FOREIGN = re.compile(r".+\.(safetensors|bin|pt|pth|ckpt|gguf|h5|msgpack|npz)")  # weights in other forms
_OF_TRAINING = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|dl_state_dict).*")
_IMPORTED = re.compile(r"pytorch_model(_fsdp)?(-\d+-of-\d+)?\.bin")  # by `shardwise import`


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file, as its header describes it."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * _DTYPE_BITS[self.dtype] // 8


StoredTensors = Mapping[str, StoredTensor]


def check_weights(folder: Path) -> StoredTensors:
    """The tensors of a model folder, by name; raises InputError if they are missing, damaged or pickled."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return read_header(single)
    if index.is_file():
        return _read_sharded(index)
    if (folder / _ADAPTER).is_file():
        command = shlex.join(["shardwise", "import", str(folder), f"{folder}-merged", "--base", _base_of(folder)])
        raise InputError(f"{folder}: holds an adapter, not a model; merge it into its base model first:\n{command}")
    names = _other_weights(folder)
    if any(map(_IMPORTED.fullmatch, names)):
        command = shlex.join(["shardwise", "import", str(folder), f"{folder}-plain"])
        raise InputError(
            f"{folder}: holds only pickled weights, which can run code when they are read; this converts them and runs "
            f"none:\n{command}"
        )
    if names:
        raise InputError(
            f"{folder}: holds {names[0]}, which is not read, and no model.safetensors; download the model in that "
            "form, or save it with save_pretrained of transformers"
        )
    remedy = shlex.join(["model.name=null", f"model.config={folder}"])
    raise InputError(
        f"{folder}: holds no model.safetensors and no model.safetensors.index.json; "
        f"for a new model of this shape write {remedy}"
    )


def holds_weights(folder: Path) -> bool:
    """True if a folder holds any file of weights, whole or not, in whatever form."""
    names = ("model.safetensors", "model.safetensors.index.json", _ADAPTER)
    return any((folder / name).is_file() for name in names) or bool(_other_weights(folder))


def _other_weights(folder: Path) -> list[str]:
    """Names of files that are weights by their ending, and no state of a training."""
    names = sorted(path.name for path in folder.iterdir() if _FOREIGN.fullmatch(path.name))
    return [name for name in names if not _OF_TRAINING.fullmatch(name)]


def _base_of(folder: Path) -> str:
    """The model that an adapter names as its base."""
    try:
        base = json.loads((folder / _ADAPTER).read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        base = None
    return base if isinstance(base, str) and base.isprintable() and base else "MODEL"


def has_weights(folder: Path) -> bool:
    """True if a folder holds every weight file it names; the files are not checked."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return True
    return index.is_file() and all((folder / name).is_file() for name in set(_weight_map(index).values()))


def packed_weights(tensors: StoredTensors) -> int:
    """The weights that bitsandbytes keeps two to a byte."""
    packed = (name.partition(_PACKED) for name in tensors)
    return sum(2 * tensors[weight].num_bytes for weight, mark, _ in packed if mark and weight in tensors)


def read_header(path: Path) -> StoredTensors:
    """The tensors of one file, by name, after checking the header against the file's size."""
    try:
        with path.open("rb") as stream:
            size_bytes = path.stat().st_size
            header_bytes = int.from_bytes(stream.read(8), "little")
            if size_bytes < 8 or header_bytes > min(size_bytes - 8, _LARGEST_HEADER_BYTES):
                raise InputError(f"{path}: is truncated or no safetensors file; {_AGAIN}")
            header = json.loads(stream.read(header_bytes))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: its safetensors header is damaged; {_AGAIN}") from error
    return _check_tensors(path, header, data_bytes=size_bytes - 8 - header_bytes)


def _check_tensors(path: Path, header: object, *, data_bytes: int) -> StoredTensors:
    if not isinstance(header, dict):
        raise InputError(f"{path}: its safetensors header is damaged; {_AGAIN}")
    tensors: dict[str, StoredTensor] = {}
    end_bytes = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        try:
            tensors[name], tensor_end = _check_tensor(tensor)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: its safetensors header is damaged at {name}; {_AGAIN}") from error
        end_bytes = max(end_bytes, tensor_end)
    if end_bytes > data_bytes:
        raise InputError(
            f"{path}: is truncated: its header promises {format_bytes(end_bytes)} of tensors, the file holds "
            f"{format_bytes(data_bytes)}; {_AGAIN}"
        )
    if end_bytes < data_bytes:
        raise InputError(f"{path}: is damaged: {data_bytes - end_bytes} bytes belong to no tensor; {_AGAIN}")
    return tensors


def _check_tensor(tensor: Mapping[str, Any]) -> tuple[StoredTensor, int]:
    """One entry and its end; raises KeyError, TypeError or ValueError if it contradicts itself."""
    shape = tuple(int(size) for size in tensor["shape"])
    begin, end = tensor["data_offsets"]
    if min(shape, default=0) < 0 or not 0 <= begin <= end:
        raise ValueError("negative sizes")
    if (end - begin) * 8 != math.prod(shape) * _DTYPE_BITS[tensor["dtype"]]:
        raise ValueError("shape and offsets differ")
    return StoredTensor(shape, str(tensor["dtype"])), end


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = codec.read_object(index)["weight_map"]
    except (InputError, KeyError) as error:
        raise InputError(f"{index}: is damaged: it holds no weight_map; {_AGAIN}") from error
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    if not weight_map or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise InputError(f"{index}: is damaged: its weight_map does not name files of its folder; {_AGAIN}")
    return dict(weight_map)


def _read_sharded(index: Path) -> StoredTensors:
    weight_map = _weight_map(index)
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(weight_map.values())):
        file = index.parent / name
        if not file.is_file():
            raise InputError(f"{file}: is missing, but {index.name} names it; download the model again")
        inside = read_header(file)
        missing = sorted(tensor for tensor, place in weight_map.items() if place == name and tensor not in inside)
        if missing:
            raise InputError(f"{file}: lacks {missing[0]}, which {index.name} places there; download the model again")
        twice = min(tensors.keys() & inside.keys(), default=None)
        if twice is not None:
            raise InputError(f"{file}: holds {twice}, as another file of {index.name} does; {_AGAIN}")
        tensors |= inside
    return tensors
