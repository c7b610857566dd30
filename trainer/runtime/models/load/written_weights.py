"""Holds the weights in a folder's safetensors files against those in memory: names, shapes, types and every byte.

They are read back in slices, so no second model is in memory, and from the disk: a file is flushed first, and what the
system holds of it in memory is let go. So a disk or a file system that loses bytes shows while the model is still
there.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.units import MIB

SLICE_BYTES = 64 * MIB


def check_model_written(folder: Path, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """As `check_written`, for `weights` of a model under the names that transformers writes them by.

    Those differ from the model's own where it holds experts in one tensor. A tied weight is written once.
    """
    ignored = model._keys_to_ignore_on_save or ()
    expected = {name: weight for name, weight in weights.items() if name not in ignored}
    tied = model.all_tied_weights_keys.keys()
    if expected.keys() - tied != _names_in(folder) - tied:
        expected = revert_weight_conversion(model, expected)
    check_written(folder, expected, may_lack=tied)


def check_written(folder: Path, expected: Mapping[str, Tensor], *, may_lack: Collection[str] = ()) -> None:
    """EnvironmentFaultError where the files of a folder do not hold exactly these weights, to the bit."""
    names: set[str] = set()
    for path in _files_of(folder):
        _let_go(path)
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # no mapping
                    difference = _difference(file, name, expected.get(name))
                    if difference is not None:
                        raise _fault(path, f"{name} {difference}")
                    names.add(name)
        except (SafetensorError, OSError) as error:
            raise _fault(path, f"it cannot be read: {error}") from error
    lost = [name for name in expected if name not in names and name not in may_lack]
    if lost:
        raise _fault(folder, f"{len(lost)} tensors are missing, the first {lost[0]}")


def _fault(path: Path, what: str) -> EnvironmentFaultError:
    return EnvironmentFaultError(
        f"{path.name}: what was written is not what the disk gives back: {what};\n"
        "nothing was exported: check the disk and its file system, then take shardwise export"
    )


def _files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _names_in(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in _files_of(folder):
        try:
            with safe_open(path, framework="pt") as file:
                names.update(file.keys())
        except (SafetensorError, OSError) as error:
            raise _fault(path, f"it cannot be read: {error}") from error
    return names


def _let_go(path: Path) -> None:
    """Flushes a file to the disk and frees the memory that holds its content, so that reading it asks the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _difference(file: Any, name: str, expected: Tensor | None) -> str | None:  # noqa: ANN401  # safetensors', untyped
    """What is wrong with a tensor of an open file; None where nothing is."""
    if expected is None:
        return "is no weight of the model"
    shape = tuple(file.get_slice(name).get_shape())
    if shape != tuple(expected.shape):
        return f"has the shape {shape}, it was {tuple(expected.shape)}"
    for found, held in _pieces(file, name, expected.detach()):
        if found.dtype != held.dtype:
            return f"is {found.dtype}, it was {held.dtype}"
        if not _same_bits(found, held):
            return "has other values"
    return None


def _pieces(file: Any, name: str, expected: Tensor) -> Iterator[tuple[Tensor, Tensor]]:  # noqa: ANN401  # as above
    """The tensor of the file and the one in memory, slice by slice of the first dimension."""
    if expected.nbytes <= SLICE_BYTES or expected.ndim == 0:
        yield file.get_tensor(name), expected.cpu()
        return
    rows = max(1, SLICE_BYTES * len(expected) // expected.nbytes)
    written = file.get_slice(name)
    for start in range(0, len(expected), rows):
        yield written[start : start + rows], expected[start : start + rows].cpu()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Also where both hold the same NaN."""
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))
