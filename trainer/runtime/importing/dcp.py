"""A folder of torch's distributed checkpoints (DCP), as torch, torchtitan and Accelerate under FSDP2 write it.

`.metadata` says of each tensor into which boxes it was cut, and for each box the file and the bytes there, which are a
file of `torch.save` with that box alone (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html). The boxes
of a tensor are put together when it is read; no more than that and one box is in memory.
"""

from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.runtime.importing.files import checked_file
from trainer.runtime.importing.pickles import METADATA_BYTES, StandIn, load_metadata, load_pickled_bytes
from trainer.runtime.importing.tensors import SAFETENSORS_TYPES, Stored, checked_tensor
from trainer.spec.errors import InputError
from trainer.spec.units import MIB

METADATA = ".metadata"
_OVERHEAD_BYTES = MIB  # of a box's zip beside its numbers; measured: 1.5 KB


class _Box(NamedTuple):
    """A part of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


def read_dcp(folder: Path) -> dict[str, Stored]:
    """The tensors of a DCP folder by their names there, which begin with what the state dict put them under."""
    origin = checked_file(folder, METADATA, most_bytes=METADATA_BYTES)
    metadata = _fields(load_metadata(origin), origin)
    tensors, places = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(tensors, dict) or not isinstance(places, dict):
        raise _damaged(origin, "no list of tensors")
    lies_at = {_index(index, origin): _fields(place, origin) for index, place in places.items()}
    found: dict[str, Stored] = {}
    for name, described in tensors.items():
        if isinstance(name, str) and type(described).__name__ == "TensorStorageMetadata":
            found[name] = _stored(folder, name, _fields(described, origin), lies_at)
    return found


def _stored(
    folder: Path,
    name: str,
    described: Mapping[str, Any],
    lies_at: Mapping[tuple[str, tuple[int, ...] | None], Mapping[str, Any]],
) -> Stored:
    origin = folder / METADATA
    shape, dtype = _dims(described.get("size"), origin), _type(described.get("properties"), origin, name)
    chunks = described.get("chunks")
    if not isinstance(chunks, list):
        raise _damaged(origin, f"no parts of {name}")
    boxes = []
    for chunk in chunks:
        box = _fields(chunk, origin)
        offsets, sizes = _dims(box.get("offsets"), origin), _dims(box.get("sizes"), origin)
        place = lies_at.get((name, offsets)) or lies_at.get((name, None))
        if place is None:
            raise _damaged(origin, f"no place of a part of {name}")
        if place.get("transform_descriptors"):
            raise InputError(f"{folder}: its files are compressed or encrypted; save it without extensions")
        start, num_bytes = _dims((place.get("offset"), place.get("length")), origin)
        boxes.append(_Box(offsets, sizes, str(place.get("relative_path")), start, num_bytes))
    if sum(prod(box.sizes) for box in boxes) != prod(shape):
        raise _damaged(origin, f"parts of {name} that are more or less than the whole")
    return Stored(shape, dtype, partial(_assemble, folder, name, shape, dtype, tuple(boxes)))


def _assemble(folder: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, boxes: tuple[_Box, ...]) -> Tensor:
    if len(boxes) == 1 and boxes[0].sizes == shape:
        return _read_box(folder, name, boxes[0], dtype)
    whole = torch.empty(shape, dtype=dtype)
    is_filled = torch.zeros(shape, dtype=torch.bool)
    for box in boxes:
        where = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
        if whole[where].shape != box.sizes or is_filled[where].any():
            raise _damaged(folder / METADATA, f"parts of {name} that overlap or lie outside of it")
        whole[where] = _read_box(folder, name, box, dtype)
        is_filled[where] = True
    return whole


def _read_box(folder: Path, name: str, box: _Box, dtype: torch.dtype) -> Tensor:
    path = checked_file(folder, box.file)
    least_bytes = prod(box.sizes) * dtype.itemsize
    if not least_bytes <= box.num_bytes <= least_bytes + _OVERHEAD_BYTES:
        raise _damaged(folder / METADATA, f"{box.num_bytes} bytes for {least_bytes} of {name}")
    with path.open("rb") as stream:
        stream.seek(box.start)
        content = stream.read(box.num_bytes)
    if len(content) < box.num_bytes:
        raise InputError(f"{path}: is truncated: it ends within {name}; copy it again")
    tensor = checked_tensor(load_pickled_bytes(content, path), path, name)
    if tuple(tensor.shape) != box.sizes or tensor.dtype is not dtype:
        raise InputError(f"{path}: what it holds of {name} is not what {METADATA} says")
    return tensor


def _fields(record: object, origin: Path) -> Mapping[str, Any]:
    """The fields of a dataclass's stand-in."""
    if not isinstance(record, StandIn) or not isinstance(record.state, dict):
        raise _damaged(origin, "a value where a record belongs")
    return record.state


def _index(record: object, origin: Path) -> tuple[str, tuple[int, ...] | None]:
    fields = _fields(record, origin)
    offset = fields.get("offset")
    return str(fields.get("fqn")), None if offset is None else _dims(offset, origin)


def _dims(values: object, origin: Path) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(value) is int and value >= 0 for value in values):
        raise _damaged(origin, "sizes that are no whole numbers")
    return values


def _type(properties: object, origin: Path, name: str) -> torch.dtype:
    """TensorProperties keep their fields as a tuple, the type first."""
    state = properties.state if isinstance(properties, StandIn) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype) or dtype not in SAFETENSORS_TYPES:
        raise _damaged(origin, f"no type of {name}")
    return dtype


def _damaged(origin: Path, what: str) -> InputError:
    return InputError(f"{origin}: is damaged: it has {what}")
