"""Safetensors weights of a folder: read by the names of a model, and compared with a model after they were written.

Files are read tensor by tensor, or only the rows that are needed. Which tensor of a file is which of the model, and how
tensors are put together (transformers stacks the experts of a block into one), is transformers' own table, applied as
its `from_pretrained` applies it; so every value has the bits that `from_pretrained` gives it. A tensor that is merely
renamed is read by slices of its file, so are experts that are merely stacked; others are put together whole, one at a
time. Files are mapped: the kernel drops their pages.

Written files are compared with the weights in memory: names, shapes, types and every byte. They are read back in
slices, so no second model is in memory, and from the disk: a file is flushed first, and its pages are dropped from the
cache. So a disk or a file system that loses bytes is noticed while the model is still there.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import _get_resolved_checkpoint_files

from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.units import MIB


class WeightReader:
    """Reader of a model's tensors in the safetensors files of a folder; the model may be without memory.

    `types` are those of the model, by its names; tensors are put together in them. InputError where a file is damaged
    or has a tensor of another shape.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: str,
        *,
        types: Mapping[str, torch.dtype],
        key_mapping: dict[str, str] | None = None,
    ) -> None:
        self._model, self._folder, self._types = model, folder, types
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
        self._slices = dict(self._open())
        self._conversions = get_model_conversion_mapping(model, key_mapping)
        self._sources = self._match()
        self._made_along: dict[str, Tensor] = {}  # with another tensor, by one conversion
        self._check_shapes()

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters and persistent buffers that the folder has."""
        return tuple(self._sources)

    def keep_conversions(self) -> None:
        """Stores the conversions with the model, so that transformers saves it as it was read."""
        seam: Any = self._model
        seam._weight_conversions = [each for each in self._conversions if each.was_used()]

    def read(self, name: str) -> Tensor:
        """A tensor as a whole, to be copied: one that is merely renamed has the type and the memory of its file."""
        if name in self._made_along:
            return self._made_along.pop(name)
        source = self._sources[name]
        made = self._make(source, {pattern: [self._slices[key] for key in keys] for pattern, keys in source.keys})
        value = made.pop(name)
        self._made_along |= {other: further for other, further in made.items() if other in self._sources}
        return self._checked(name, value)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of the first dimension, alone where the files allow that; to be copied."""
        source = self._sources[name]
        if source.is_renamed:
            rows = self._slice_of(name)[start:stop]
            assert isinstance(rows, Tensor)
            return rows
        if source.reference_rows and all(len(keys) == self._shapes[name][0] for _, keys in source.keys):
            some = {pattern: [self._slices[key] for key in keys[start:stop]] for pattern, keys in source.keys}
            return self._make(source, some)[name]
        return self.read(name)[start:stop]

    def _open(self) -> Iterator[tuple[str, Any]]:
        """Every tensor of the folder's files by its name there, not read yet."""
        files, _ = _get_resolved_checkpoint_files(
            self._folder,
            variant=None,
            gguf_file=None,
            use_safetensors=True,
            user_agent=None,
            is_remote_code=False,
            download_kwargs={"local_files_only": True},
        )
        for file in files or ():
            try:
                opened: Any = safe_open(file, framework="pt", device="cpu")
            except SafetensorError as error:
                raise InputError(f"{self._folder}: its safetensors weights are damaged: {error}") from error
            yield from ((key, opened.get_slice(key)) for key in opened.keys())  # noqa: SIM118  # not a mapping

    def _match(self) -> dict[str, "_Source"]:
        """Sources of each tensor of the model, as `convert_and_load_state_dict_in_model` finds them."""
        renamings = [each for each in self._conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in self._conversions if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        known: dict[str, Any] = self._shapes
        collected: dict[str, dict[str, list[str]]] = {}
        chosen: dict[str, WeightConverter | None] = {}
        for key in sorted(self._slices, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, self._model.base_model_prefix, known)
            if name not in known and key in known:
                name, pattern = rename_source_key(key, [], [], self._model.base_model_prefix, known)
            if name in known:
                chosen.setdefault(name, None if pattern is None else by_pattern[pattern])
                collected.setdefault(name, {}).setdefault(pattern or key, []).append(key)
        sources: dict[str, _Source] = {}
        for name, patterns in collected.items():
            source = _Source(name, tuple((pattern, tuple(keys)) for pattern, keys in patterns.items()), chosen[name])
            sources |= dict.fromkeys(source.targets, source)
        return sources

    def _make(self, source: "_Source", parts: Mapping[str, list[Any]]) -> dict[str, Tensor]:
        """Tensors that a conversion makes from slices of the files, by the model's names."""
        dtype = self._types[source.name]
        if source.converter is None:
            ((part,),) = parts.values()
            return {source.name: part[...]}
        converter: Any = deepcopy(source.converter)  # it is emptied by its work
        for pattern, found in parts.items():
            converter.collected_tensors[pattern] = [partial(_read, part, dtype) for part in found]
        made = converter.convert(source.name, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def _slice_of(self, name: str) -> Any:  # noqa: ANN401  # safetensors' slice, untyped
        """The slice of a tensor that is in a file as it is."""
        ((_, (key,)),) = self._sources[name].keys
        return self._slices[key]

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) != self._shapes[name]:
            raise self._wrong_shape(name, tuple(tensor.shape))
        return tensor

    def _check_shapes(self) -> None:
        for name, source in self._sources.items():
            if source.is_renamed and (shape := tuple(self._slice_of(name).get_shape())) != self._shapes[name]:
                raise self._wrong_shape(name, shape)

    def _wrong_shape(self, name: str, shape: tuple[int, ...]) -> InputError:
        return InputError(
            f"{self._folder}: its {name} has shape {shape}, that of config.json {self._shapes[name]}; "
            "the two are of different models"
        )


class _Source(NamedTuple):
    """Source of one or several tensors of the model."""

    name: str  # of the model's tensor that the conversion goes by
    keys: tuple[tuple[str, tuple[str, ...]], ...]  # names in the files, in order, by the conversion's pattern
    converter: WeightConverter | None

    @property
    def is_renamed(self) -> bool:
        """True if the tensor is in a file unchanged, under some name."""
        return self.converter is None

    @property
    def reference_rows(self) -> bool:
        """True if each row of the one tensor that is made comes from one tensor of each pattern."""
        if self.converter is None or len(self.targets) > 1:
            return False
        first, *others = self.converter.operations
        joins_columns = all(isinstance(each, Concatenate) and each.dim > 0 for each in others)
        return isinstance(first, MergeModulelist) and first.dim == 0 and joins_columns

    @property
    def targets(self) -> tuple[str, ...]:
        """The model's names of everything that the conversion makes."""
        if self.converter is None or len(self.converter.target_patterns) == 1:
            return (self.name,)
        patterns = self.converter.target_patterns
        prefix, _, suffix = next(self.name.partition(pattern) for pattern in patterns if pattern in self.name)
        return tuple(f"{prefix}{pattern}{suffix}" for pattern in patterns)


def _read(part: Any, dtype: torch.dtype) -> Tensor:  # noqa: ANN401  # safetensors' slice, untyped
    tensor = part[...]
    assert isinstance(tensor, Tensor)
    return tensor.to(dtype)


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
        "nothing was exported: check the disk and its file system, then run shardwise export"
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
    """Flushes a file to the disk and frees the memory that holds its content, so that it is read from the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _difference(file: Any, name: str, expected: Tensor | None) -> str | None:  # noqa: ANN401  # safetensors', untyped
    """Text of the difference of a tensor in an open file; None if there is none."""
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
    """True if all bits are equal, also those of NaN."""
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))
