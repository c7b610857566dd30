"""Safetensors files written tensor by tensor, so that no more than one tensor is in memory.

The format (https://github.com/huggingface/safetensors#format): the header's length in 8 little-endian bytes, a JSON
header, then the tensors' bytes without gaps. Files are of at most 5 GB, as transformers writes them, but for a single
tensor that is larger; several have an index.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from trainer.runtime.importing.tensors import SAFETENSORS_TYPES, Stored, Tensors
from trainer.spec.errors import InputError

FILE_BYTES = 5 * 10**9
_BLOCK_ELEMENTS = 1 << 24  # looked at for NaN at a time


def write_tensors(tensors: Tensors, folder: Path, *, dtype: torch.dtype | None, origin: str) -> None:
    """Writes model.safetensors, or several files and their index; floating-point numbers in `dtype`, if given.

    InputError where a number is not finite, or is not in `dtype`.
    """
    planned = {name: _typed(stored, dtype) for name, stored in tensors.items()}
    files = _files(planned)
    for file, names in files.items():
        with (folder / file).open("wb") as stream:
            stream.write(_header({name: planned[name] for name in names}))
            for name in names:
                _write_tensor(stream, name, planned[name], origin)
            stream.flush()
            os.fsync(stream.fileno())
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(stored.num_bytes for stored in planned.values())},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def check_finite(name: str, tensor: Tensor, origin: str, *, stored: Tensor | None = None) -> None:
    """InputError where a number is NaN or infinite; `stored` is what it was rounded from."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:  # not of 8 bit, of which torch cannot say
        return
    for block in tensor.reshape(-1).split(_BLOCK_ELEMENTS):
        if not bool(torch.isfinite(block).all()):
            if stored is not None and stored.dtype is not tensor.dtype:
                check_finite(name, stored, origin)
                raise InputError(
                    f"{origin}: {name} has numbers too large for {tensor.dtype}; take --dtype bf16 or fp32"
                )
            raise InputError(f"{origin}: {name} holds NaN or infinity; import an earlier checkpoint")


def most_common_type(tensors: Tensors, dtype: torch.dtype | None) -> torch.dtype:
    """The floating-point type of most elements."""
    counts: dict[torch.dtype, int] = {}
    for stored in tensors.values():
        kind = _typed(stored, dtype).dtype
        if kind.is_floating_point:
            counts[kind] = counts.get(kind, 0) + torch.Size(stored.shape).numel()
    return max(counts, key=lambda each: counts[each]) if counts else torch.float32


def num_bytes(tensors: Tensors, dtype: torch.dtype | None) -> int:
    """What the tensors take on the disk."""
    return sum(_typed(stored, dtype).num_bytes for stored in tensors.values())


def _typed(stored: Stored, dtype: torch.dtype | None) -> Stored:
    return stored if dtype is None or not stored.dtype.is_floating_point else stored._replace(dtype=dtype)


def _files(tensors: Mapping[str, Stored]) -> dict[str, list[str]]:
    """Which tensors each file has, in their order."""
    groups: list[list[str]] = [[]]
    size_bytes = 0
    for name, stored in tensors.items():
        if groups[-1] and size_bytes + stored.num_bytes > FILE_BYTES:
            groups.append([])
            size_bytes = 0
        groups[-1].append(name)
        size_bytes += stored.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors": group for number, group in enumerate(groups)}


def _header(tensors: Mapping[str, Stored]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, stored in tensors.items():
        entries[name] = {
            "dtype": SAFETENSORS_TYPES[stored.dtype],
            "shape": [*stored.shape],
            "data_offsets": [offset, offset + stored.num_bytes],
        }
        offset += stored.num_bytes
    content = json.dumps(entries, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def _write_tensor(stream: BinaryIO, name: str, stored: Stored, origin: str) -> None:
    found = stored.read()
    tensor = found.to(stored.dtype).contiguous()
    if tuple(tensor.shape) != stored.shape:
        raise InputError(f"{origin}: {name} is {tuple(tensor.shape)} and was said to be {stored.shape}")
    check_finite(name, tensor, origin, stored=found)
    stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
