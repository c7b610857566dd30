"""The weights of a folder by the names a model has for them, read tensor by tensor, or only the rows that are wanted.

Which tensor of a file is which of the model, and how tensors are put together (transformers stacks the experts of a
block into one), is transformers' own table, applied as its `from_pretrained` applies it; so every value has the bits
that `from_pretrained` gives it. A tensor that is merely renamed is read by slices of its file, so are experts that are
merely stacked; others are put together whole, one at a time. Files are mapped: their pages are the kernel's to drop.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
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
)
from transformers.modeling_utils import _get_resolved_checkpoint_files

from trainer.spec.errors import InputError


class WeightReader:
    """What the safetensors files of a folder hold of a model, which may be without memory.

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
        """Leaves the conversions with the model, so that transformers saves it as it was read."""
        seam: Any = self._model
        seam._weight_conversions = [each for each in self._conversions if each.was_used()]

    def read(self, name: str) -> Tensor:
        """A tensor as a whole, to be copied: one that is merely renamed has the type and the memory of its file."""
        if name in self._made_along:
            return self._made_along.pop(name)
        source = self._sources[name]
        made = self._make(source, {pattern: [self._slices[key] for key in keys] for pattern, keys in source.keys})
        answer = made.pop(name)
        self._made_along |= {other: value for other, value in made.items() if other in self._sources}
        return self._checked(name, answer)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of the first dimension, alone where the files allow that; to be copied."""
        source = self._sources[name]
        if source.is_renamed:
            rows = self._slice_of(name)[start:stop]
            assert isinstance(rows, Tensor)
            return rows
        if source.stacks_rows and all(len(keys) == self._shapes[name][0] for _, keys in source.keys):
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
        """What each tensor of the model is made of, as `convert_and_load_state_dict_in_model` finds it."""
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
        """What a conversion makes of slices of the files, by the model's names."""
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
    """What one or several tensors of the model are made of."""

    name: str  # of the model's tensor that the conversion goes by
    keys: tuple[tuple[str, tuple[str, ...]], ...]  # names in the files, in order, by the conversion's pattern
    converter: WeightConverter | None

    @property
    def is_renamed(self) -> bool:
        """Whether the tensor is in a file as it is, under some name."""
        return self.converter is None

    @property
    def stacks_rows(self) -> bool:
        """Whether each row of the one tensor that is made comes from one tensor of each pattern."""
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
