"""Weights that are cut into parts: torch's distributed checkpoints and DeepSpeed's, put together tensor by tensor.

`.metadata` of a distributed checkpoint (DCP; torch, torchtitan, Accelerate under FSDP2) lists for each tensor the boxes
into which it was cut, and for each box the file and the bytes there, which are a file of `torch.save` with that box
alone (https://docs.pytorch.org/docs/stable/distributed.checkpoint.html). One tensor and one box are in memory.

Of a DeepSpeed checkpoint the fp32 masters of ZeRO 1, 2 and 3 are read:

    latest                                        the name of the folder that is meant
    global_stepN/mp_rank_00_model_states.pt       names and shapes of the parameters; 16-bit weights (stages 1 and 2)
    global_stepN/zero_pp_rank_R_mp_rank_00_...    one per rank under stage 3, whose 16-bit weights are placeholders
    global_stepN/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    the masters that rank R updates, flat

Under stages 1 and 2 a group's parameters are concatenated and cut into as many parts as there are ranks. Under stage 3
each parameter is cut by itself into ceil(elements / ranks), and a rank's parts are concatenated (source: DeepSpeed's
zero_to_fp32.py, 0.19.8, which unpickles untrusted files and holds the model in memory; here files are mapped and one
parameter is in memory).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.trainer.runtime.importing.files import checked_file, numbered
from shardwise.trainer.runtime.importing.tensors import (
    METADATA_BYTES,
    SAFETENSORS_TYPES,
    STAND_INS,
    StandIn,
    Stored,
    checked_tensor,
    in_memory,
    load_metadata,
    load_pickled,
    load_pickled_part,
)
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.units import MIB

METADATA = ".metadata"
_OVERHEAD_BYTES = MIB  # of a box's zip in addition to its numbers; measured: 1.5 KB
_RANKS_STATE = r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt"
_RANKS_MASTERS = r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt"
_ONE_STATE = "mp_rank_00_model_states.pt"
_OTHER_PARALLELISM = r"(?:.*mp_rank_(?!00_).*|layer_.*|expp_rank_.*|.*_expert_.*)_(?:model|optim)_states\.pt"
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"


class _Box(NamedTuple):
    """A part of a tensor, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


def read_dcp(folder: Path) -> dict[str, Stored]:
    """The tensors of a DCP folder by their names there, which begin with the key of the model in the state dict."""
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
    if path.stat().st_size < box.start + box.num_bytes:
        raise InputError(f"{path}: is truncated: it ends within {name}; copy it again")
    tensor = checked_tensor(load_pickled_part(path, box.start, box.num_bytes), path, name)
    if tuple(tensor.shape) != box.sizes or tensor.dtype is not dtype:
        raise InputError(f"{path}: {name} in it is not as {METADATA} describes it")
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
        raise _damaged(origin, "a size that is no list of whole numbers")
    return values


def _type(properties: object, origin: Path, name: str) -> torch.dtype:
    """TensorProperties pickle their fields as a tuple, the type first."""
    state = properties.state if isinstance(properties, StandIn) else None
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype) or dtype not in SAFETENSORS_TYPES:
        raise _damaged(origin, f"no type of {name}")
    return dtype


def _damaged(origin: Path, what: str) -> InputError:
    return InputError(f"{origin}: is damaged: it has {what}")


class ZeroCheckpoint(NamedTuple):
    """The tensors of a DeepSpeed checkpoint, and its description."""

    tensors: dict[str, Stored]
    described: str


class _Part(NamedTuple):
    """Elements [start, stop) of a flat tensor."""

    flat: Tensor
    start: int
    stop: int


def read_zero(folder: Path) -> ZeroCheckpoint:
    """The weights in a folder of DeepSpeed's states: the fp32 masters where there are any."""
    other = [path.name for path in sorted(folder.iterdir()) if re.fullmatch(_OTHER_PARALLELISM, path.name)]
    if other:
        raise InputError(
            f"{folder}: {other[0]} is of a model cut by tensor, pipeline or expert parallelism, which is not put "
            "together here;\nconvert it with the tools of what trained it (DeepSpeed: ds_to_universal.py)"
        )
    states = numbered(folder, _RANKS_STATE)
    paths = list(states.values()) or [checked_file(folder, _ONE_STATE)]
    masters = _in_order(folder, numbered(folder, _RANKS_MASTERS), "optim_states")
    first = _state_of(paths[0])
    if not masters:
        return ZeroCheckpoint(_whole_weights(first, paths[0]), "DeepSpeed's weights without ZeRO")
    loaded = [_masters_of(path) for path in masters]
    stage = _stage_of(loaded[0], masters[0])
    _check_count(loaded[0], masters)
    sharded = stage == 3
    if sharded and len(_in_order(folder, states, "model_states")) != len(masters):
        raise InputError(f"{folder}: has {len(states)} model_states for {len(masters)} optim_states; copy it again")
    others = [_state_of(path) for path in paths[1:]] if sharded else []
    flats = [_flats(masters_of, stage, path) for masters_of, path in zip(loaded, masters, strict=True)]
    if sharded:
        tensors = _buffers(first, paths[0]) | _frozen([first, *others], paths[0])
        tensors |= _cut_by_parameter(flats, _shapes_by_group(first, paths[0]), paths[0])
    else:
        tensors = {name: _widened(stored) for name, stored in _whole_weights(first, paths[0]).items()}  # frozen ones
        tensors |= _cut_by_group(flats, _shapes_by_group(first, paths[0]), loaded[0], paths[0])
    for alias, name in _mapping(first, "shared_params", paths[0]).items():
        if name in tensors:
            tensors[str(alias)] = tensors[name]
    return ZeroCheckpoint(tensors, f"the fp32 masters of ZeRO-{stage} on {len(masters)} ranks")


def _in_order(folder: Path, found: Mapping[int, Path], what: str) -> list[Path]:
    missing = [rank for rank in range(max(found, default=-1) + 1) if rank not in found]
    if missing:
        raise InputError(f"{folder}: lacks the {what} of rank {missing[0]}; copy the checkpoint again")
    return list(found.values())


def _state_of(path: Path) -> Mapping[str, Any]:
    state = load_pickled(path)
    if not isinstance(state, dict) or not isinstance(state.get("module"), dict):
        raise InputError(f"{path}: is no model state of DeepSpeed: it holds no module")
    return state


def _masters_of(path: Path) -> Mapping[str, Any]:
    loaded = load_pickled(path)
    state = loaded.get("optimizer_state_dict") if isinstance(loaded, dict) else None
    if not isinstance(state, dict):
        raise InputError(f"{path}: is no optimizer state of DeepSpeed")
    return state


def _stage_of(masters: Mapping[str, Any], path: Path) -> int:
    stage = masters.get("zero_stage")
    if type(stage) is STAND_INS[_STAGE]:
        stage = stage.arguments[0] if stage.arguments else None
    if type(stage) is not int or stage not in (1, 2, 3):
        raise InputError(f"{path}: is no optimizer state of ZeRO 1, 2 or 3")
    return stage


def _check_count(masters: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """A checkpoint of eight ranks, of which seven files are here, is none."""
    counts = masters.get("partition_count")
    num_ranks = max(counts, default=None) if isinstance(counts, list) else counts
    if num_ranks != len(paths):
        raise InputError(f"{paths[0].parent}: is of {num_ranks} ranks and has optim_states of {len(paths)}")


def _flats(masters: Mapping[str, Any], stage: int, path: Path) -> list[Tensor]:
    """The flat fp32 tensors that one rank updates, by group."""
    flats = masters.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(flats, list):
        raise InputError(f"{path}: holds no fp32 masters")
    return [checked_tensor(flat, path, "a group of fp32 masters").reshape(-1) for flat in flats]


def _cut_by_group(
    flats: list[list[Tensor]], groups: list[dict[str, tuple[int, ...]]], masters: Mapping[str, Any], path: Path
) -> dict[str, Stored]:
    """Stages 1 and 2: a group is one tensor, the ranks' parts one behind the other."""
    paddings = masters.get("param_alignment_paddings") or [[0] * len(group) for group in groups]
    if any(len(rank) != len(groups) for rank in flats) or len(paddings) != len(groups):
        raise _inconsistent(path, "groups")
    tensors: dict[str, Stored] = {}
    for number, group in enumerate(groups):
        parts, offset = [rank[number] for rank in flats], 0
        for (name, shape), padding in zip(group.items(), paddings[number], strict=True):
            pieces = list(_pieces(parts, offset, offset + prod(shape)))
            tensors[name] = _joined(pieces, shape, path, name)
            offset += prod(shape) + padding
    return tensors


def _cut_by_parameter(
    flats: list[list[Tensor]], groups: list[dict[str, tuple[int, ...]]], path: Path
) -> dict[str, Stored]:
    """Stage 3: every rank has its part of every parameter, the last one padded."""
    tensors: dict[str, Stored] = {}
    offset = 0
    for group in groups:
        for name, shape in group.items():
            share = -(-prod(shape) // len(flats))
            pieces = [piece for rank in flats for piece in _pieces(rank, offset, offset + share)]
            tensors[name] = _joined(pieces, shape, path, name, padded_to=share * len(flats))
            offset += share
    return tensors


def _pieces(parts: Sequence[Tensor], start: int, stop: int) -> Iterator[_Part]:
    """Elements [start, stop) of tensors that lie one behind the other."""
    begin = 0
    for part in parts:
        end = begin + part.numel()
        if max(start, begin) < min(stop, end):
            yield _Part(part, max(start, begin) - begin, min(stop, end) - begin)
        begin = end


def _joined(
    pieces: Sequence[_Part], shape: tuple[int, ...], path: Path, name: str, *, padded_to: int | None = None
) -> Stored:
    num_elements = sum(piece.stop - piece.start for piece in pieces)
    if num_elements != (prod(shape) if padded_to is None else padded_to):
        raise _inconsistent(path, f"elements of {name}")

    def read() -> Tensor:
        whole = torch.cat([piece.flat[piece.start : piece.stop] for piece in pieces]) if pieces else torch.empty(0)
        return whole[: prod(shape)].view(shape).float()  # frozen ones are of 16 bit, masters of 32

    return Stored(shape, torch.float32, read)


def _frozen(states: Sequence[Mapping[str, Any]], path: Path) -> dict[str, Stored]:
    """Parameters that are not trained have no masters; under stage 3 every rank has a part of each."""
    tensors: dict[str, Stored] = {}
    for name, size in _mapping(states[0], "frozen_param_shapes", path).items():
        shape = _dims(size, path)
        fragments = [_mapping(state, "frozen_param_fragments", path).get(name) for state in states]
        parts = [checked_tensor(fragment, path, str(name)).reshape(-1) for fragment in fragments]
        pieces = [_Part(part, 0, part.numel()) for part in parts]
        padded_to = -(-prod(shape) // len(states)) * len(states)
        tensors[str(name)] = _joined(pieces, shape, path, str(name), padded_to=padded_to)
    return tensors


def _buffers(state: Mapping[str, Any], path: Path) -> dict[str, Stored]:
    names = state.get("buffer_names") or []
    whole = _whole_weights(state, path)
    return {name: _widened(whole[name]) for name in names if name in whole}


def _whole_weights(state: Mapping[str, Any], path: Path) -> dict[str, Stored]:
    """The weights as the model holds them, mostly in 16 bit."""
    weights = {str(name): each for name, each in state["module"].items() if isinstance(each, Tensor)}
    return {name: in_memory(checked_tensor(each, path, name)) for name, each in weights.items()}


def _widened(stored: Stored) -> Stored:
    """In fp32, as the masters are; integers unchanged."""
    if not stored.dtype.is_floating_point:
        return stored
    return stored._replace(dtype=torch.float32, read=lambda: stored.read().float())


def _shapes_by_group(state: Mapping[str, Any], path: Path) -> list[dict[str, tuple[int, ...]]]:
    groups = state.get("param_shapes")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise InputError(f"{path}: has no shapes of the parameters")
    return [{str(name): _dims(size, path) for name, size in group.items()} for group in groups]


def _mapping(state: Mapping[str, Any], name: str, path: Path) -> Mapping[Any, Any]:
    found = state.get(name) or {}
    if not isinstance(found, dict):
        raise InputError(f"{path}: its {name} are not by name")
    return found


def _inconsistent(path: Path, what: str) -> InputError:
    return InputError(
        f"{path}: the {what} in it are not those of the optim_states next to it; copy the checkpoint again"
    )
