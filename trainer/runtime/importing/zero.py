"""A DeepSpeed checkpoint: the fp32 masters of ZeRO 1, 2 and 3, put together parameter by parameter.

    latest                                        the name of the folder that is meant
    global_stepN/mp_rank_00_model_states.pt       names and shapes of the parameters; 16-bit weights (stages 1 and 2)
    global_stepN/zero_pp_rank_R_mp_rank_00_...    one per rank under stage 3, whose 16-bit weights are placeholders
    global_stepN/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    the masters that rank R updates, flat

Under stages 1 and 2 a group's parameters lie one behind the other, cut into as many parts as there are ranks. Under
stage 3 each parameter is cut by itself into ceil(elements / ranks), and a rank's parts lie one behind the other. This
is what DeepSpeed's own zero_to_fp32.py goes by (deepspeed 0.19.8), which unpickles whatever the files name and holds
the model in memory; here the files are mapped and one parameter is held.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.runtime.importing.files import checked_file, checked_folder, has_file, numbered
from trainer.runtime.importing.pickles import STAND_INS, load_pickled
from trainer.runtime.importing.tensors import Stored, checked_tensor, held
from trainer.spec.errors import InputError
from trainer.spec.units import KIB

_RANKS_STATE = r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt"
_RANKS_MASTERS = r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt"
_ONE_STATE = "mp_rank_00_model_states.pt"
_OTHER_PARALLELISM = r"(?:.*mp_rank_(?!00_).*|layer_.*|expp_rank_.*|.*_expert_.*)_(?:model|optim)_states\.pt"
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"


class ZeroCheckpoint(NamedTuple):
    """The tensors of a DeepSpeed checkpoint, and what it was in words."""

    tensors: dict[str, Stored]
    described: str


class _Part(NamedTuple):
    """Elements [start, stop) of a flat tensor."""

    flat: Tensor
    start: int
    stop: int


def find_states(folder: Path) -> Path | None:
    """The folder with the states that `latest` names, or the only one, or this one; None where there are none."""
    if _has_states(folder):
        return folder
    if has_file(folder, "latest"):
        name = checked_file(folder, "latest", most_bytes=KIB).read_text(encoding="utf-8", errors="replace").strip()
        is_gone = Path(name).name == name and not has_file(folder, name)  # to save room; the 16-bit weights are left
        return None if is_gone else checked_folder(folder, name)
    found = [path for path in sorted(folder.iterdir()) if not path.is_symlink() and path.is_dir() and _has_states(path)]
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:3])
        raise InputError(f"{folder}: holds several DeepSpeed checkpoints ({names}) and no `latest`; name one of them")
    return found[0] if found else None


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
        tensors = {name: _widened(stored) for name, stored in _whole_weights(first, paths[0]).items()}  # of frozen ones
        tensors |= _cut_by_group(flats, _shapes_by_group(first, paths[0]), loaded[0], paths[0])
    for alias, name in _mapping(first, "shared_params", paths[0]).items():
        if name in tensors:
            tensors[str(alias)] = tensors[name]
    return ZeroCheckpoint(tensors, f"the fp32 masters of ZeRO-{stage} on {len(masters)} ranks")


def _has_states(folder: Path) -> bool:
    return any(path.name.endswith("_model_states.pt") for path in folder.iterdir())


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
        shape = _shape(size, path)
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
    return {name: held(checked_tensor(each, path, name)) for name, each in weights.items()}


def _widened(stored: Stored) -> Stored:
    """In fp32, as the masters beside it are; whole numbers as they are."""
    if not stored.dtype.is_floating_point:
        return stored
    return stored._replace(dtype=torch.float32, read=lambda: stored.read().float())


def _shapes_by_group(state: Mapping[str, Any], path: Path) -> list[dict[str, tuple[int, ...]]]:
    groups = state.get("param_shapes")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise InputError(f"{path}: says nothing of the parameters' shapes")
    return [{str(name): _shape(size, path) for name, size in group.items()} for group in groups]


def _shape(size: object, path: Path) -> tuple[int, ...]:
    if not isinstance(size, tuple) or not all(type(dim) is int and dim >= 0 for dim in size):
        raise InputError(f"{path}: has a shape that is none")
    return tuple(size)


def _mapping(state: Mapping[str, Any], name: str, path: Path) -> Mapping[Any, Any]:
    found = state.get(name) or {}
    if not isinstance(found, dict):
        raise InputError(f"{path}: its {name} are not by name")
    return found


def _inconsistent(path: Path, what: str) -> InputError:
    return InputError(
        f"{path}: the {what} in it are not those of the optim_states beside it; copy the checkpoint again"
    )
