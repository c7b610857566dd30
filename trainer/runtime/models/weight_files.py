"""Safetensors weights of a folder: read by the names of a model, and compared with a model after they were written.

Files are read tensor by tensor, or only the rows that are needed. Which tensor of a file is which of the model, and how
tensors are put together (transformers stacks the experts of a block into one) or decoded, is transformers' own table,
applied as its `from_pretrained` applies it; so every value has the bits that `from_pretrained` gives it. A tensor that
is merely renamed is read by slices of its file, so are experts that are stacked or decoded; others are put together
whole, one at a time. Files are mapped: the kernel drops their pages.

The text part of a model with other parts is found by names: it has one prefix in the files.

Written files are compared with the weights in memory: names, shapes, types and every byte. They are read back in
slices, so no second model is in memory, and from the disk: a file is flushed first, and its pages are dropped from the
cache. So a disk or a file system that loses bytes is noticed while the model is still there.
"""

import math
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
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
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer

from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.units import MIB

_ANYWHERE = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
IN_FRONT = re.compile(r"^(module\.|base_model\.model\.)+")


def without_wrappers(name: str) -> str:
    """A tensor's name without those of wrappers: DDP's and DeepSpeed's, FSDP1's, torch.compile's, PEFT's."""
    return IN_FRONT.sub("", _ANYWHERE.sub("", name))


class WeightReader:
    """Reader of a model's tensors in the safetensors files of a folder; the model may be without memory.

    `types` are those of the model, by its names; tensors are put together in them. `outer` is the config of a model
    with other parts whose files these are: then the model is its text part. `decoder` decodes quantised weights;
    with `reads_packed` those in bitsandbytes' 4 bit are read as they are.
    InputError where a file is damaged, or has a tensor of another shape or in a format that is not read.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: str,
        *,
        types: Mapping[str, torch.dtype],
        outer: PreTrainedConfig | None = None,
        decoder: HfQuantizer | None = None,
        reads_packed: bool = False,
    ) -> None:
        self._reads_packed = reads_packed
        self._model, self._folder, self._types = model, folder, types
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
        self._slices = dict(self._open())
        self._conversions = get_model_conversion_mapping(model, hf_quantizer=decoder)
        self._has_decoder = decoder is not None
        self._is_as_saved = outer is None and decoder is None
        plain = [_Key(key, key) for key in sorted(self._slices, key=dot_natural_key)]
        self._keys = plain if outer is None else self._keys_of_text(_renamed_as(outer, plain))
        self._packed: dict[str, dict[str, str]] = {}  # parts of a 4-bit weight, by the model's name
        self._sources = self._match()
        self._made_along: dict[str, Tensor] = {}  # with another tensor, by one conversion
        self._check_shapes()

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters and persistent buffers that the folder has."""
        return tuple(self._sources)

    @property
    def packed_names(self) -> tuple[str, ...]:
        """Those of the weights that the folder has in bitsandbytes' 4 bit."""
        return tuple(self._packed)

    def missing(self, names: Sequence[str]) -> InputError:
        """The error for tensors of the model that the folder lacks, with what may help."""
        wrapped = next((key for key in self._slices if without_wrappers(key) != key), None)
        remedy = "they would start as random numbers"
        if wrapped is not None:
            command = shlex.join(["shardwise", "import", self._folder, f"{self._folder}-plain"])
            remedy = f"{wrapped} has a wrapper's name:\n{command}"
        elif [*names] == ["lm_head.weight"]:
            remedy = "if the embedding is its head, write tie_word_embeddings true into config.json"
        of_model = f"{len(names)} tensors of {type(self._model).__name__}, the first {min(names)}"
        return InputError(f"{self._folder}: its weights lack {of_model}; {remedy}")

    def keep_conversions(self) -> None:
        """Stores the conversions with the model, so that transformers saves it as it was read.

        A text part and decoded weights are saved as those of a model that was built.
        """
        seam: Any = self._model
        used = [each for each in self._conversions if each.was_used() and not isinstance(each, _PREFIX_CHANGE)]
        seam._weight_conversions = used if self._is_as_saved else None

    def read(self, name: str) -> Tensor:
        """A tensor as a whole, to be copied: one that is merely renamed has the type and the memory of its file."""
        if name in self._made_along:
            return self._made_along.pop(name)
        source, shape = self._sources[name], self._shapes[name]
        if source.has_rows(shape):  # not all of its parts at once
            whole = torch.empty(shape, dtype=self._types[name])
            step = max(1, SLICE_BYTES * shape[0] // max(whole.nbytes, 1))
            for start in range(0, shape[0], step):
                whole[start : start + step] = self.read_rows(name, start, min(start + step, shape[0]))
            return whole
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
        if not source.has_rows(self._shapes[name]):
            return self.read(name)[start:stop]
        if source.stacks:
            some = {pattern: [self._slices[key] for key in keys[start:stop]] for pattern, keys in source.keys}
        else:
            some = {pattern: [_Rows(self._slices[key], start, stop) for key in keys] for pattern, keys in source.keys}
        made = self._make(source, some)[name]
        if made.shape[1:] != self._shapes[name][1:]:
            raise self._wrong_shape(name, (self._shapes[name][0], *made.shape[1:]))
        return made

    def read_packed(self, name: str) -> tuple[Tensor, dict[str, Tensor]]:
        """The packed values of a 4-bit weight, and its scales as bitsandbytes names them."""
        parts = {part: self._slices[key][...] for part, key in self._packed[name].items()}
        return self._slice_of(name)[...], parts

    def check_made(self) -> None:
        """InputError where a conversion would make a tensor of another shape; reads nothing."""
        done: set[str] = set()
        for name, source in self._sources.items():
            if source.is_renamed or name in done:
                continue
            parts = {pattern: [_Unread(self._slices[key]) for key in keys] for pattern, keys in source.keys}
            made = self._make(source, parts)
            for each, tensor in made.items():
                if each in self._sources:
                    self._checked(each, tensor)
            done |= made.keys()

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

    def _renamer(self, conversions: list[Any]) -> "Callable[[_Key], _Key]":
        """Function to a key with the model's name for it, and its converter."""
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        known: dict[str, Any] = self._shapes
        prefix = self._model.base_model_prefix

        def renamed(key: _Key) -> _Key:
            usual = converters if key.converter is None else []
            name, pattern = rename_source_key(key.part, renamings, usual, prefix, known)
            if name not in known and key.part in known:
                name, pattern = rename_source_key(key.part, [], [], prefix, known)
            return key._replace(part=name) if pattern is None else _Key(name, key.stored, by_pattern[pattern], pattern)

        return renamed

    def _keys_of_text(self, keys: "list[_Key]") -> "list[_Key]":
        """The keys of the text part, without the prefix that they have.

        It is the one below which the first block and what is outside of blocks have the most tensors of the model; the
        head may stand below a part of it.
        """
        renamed = self._renamer(deepcopy(self._conversions))  # some of them note what they renamed
        sample = [key for key in keys if set(filter(str.isdigit, key.part.split("."))) <= {"0"}]
        hits = {
            prefix: len({renamed(each).part for key in sample if (each := key.below(prefix))} & self._shapes.keys())
            for prefix in {prefix for key in sample for prefix in _prefixes(key.part)}
        }
        body = max(hits, key=lambda prefix: (hits[prefix], -len(prefix)), default="")
        found = [each for key in keys if (each := key.below(body))]
        for prefix in reversed([*_prefixes(f"{body}weight")][:-1]):
            lacking = self._shapes.keys() - {renamed(each).part for each in found}
            others = [each for key in keys if not key.below(body) and (each := key.below(prefix))]
            found += [each for each in others if renamed(each).part in lacking]
        return found

    def _match(self) -> dict[str, "_Source"]:
        """Sources of each tensor of the model, as `convert_and_load_state_dict_in_model` finds them."""
        renamed = self._renamer(self._conversions)
        collected: dict[str, dict[str, list[str]]] = {}
        chosen: dict[str, WeightConverter | None] = {}
        unread: list[str] = []
        foreign: list[str] = []
        for key in self._keys:
            found = renamed(key)
            if found.part in self._shapes:
                chosen.setdefault(found.part, found.converter)
                collected.setdefault(found.part, {}).setdefault(found.pattern or key.stored, []).append(key.stored)
                continue
            weight, is_packed, scale = key.part.partition(_OF_PACKED)
            name = renamed(_Key(f"{weight}.weight", key.stored)).part
            if is_packed and self._reads_packed and name in self._shapes:
                self._packed.setdefault(name, {})[scale] = key.stored
            else:
                unread.append(key.part)
                foreign.append(found.part)
        sources: dict[str, _Source] = {}
        for name, patterns in collected.items():
            source = _Source(name, tuple((pattern, tuple(keys)) for pattern, keys in patterns.items()), chosen[name])
            keys = [key for _, found in source.keys for key in found]
            if source.decodes and len(keys) == 1:
                source = source._replace(converter=None)  # it is not quantised
            if source.converter is None and len(keys) > 1:
                raise InputError(f"{self._folder}: {keys[0]} and {keys[1]} are both its {name}; remove one of them")
            sources |= dict.fromkeys(source.targets, source)
        self._refuse_unread(unread)
        self._refuse_foreign(foreign)
        return sources

    def _refuse_foreign(self, names: list[str]) -> None:
        """InputError for tensors of the model's own layers that the model of config.json would not use.

        Others are left out, as `from_pretrained` does: other heads, masks, blocks that predict more tokens.
        """
        seam: Any = self._model
        ignored = [re.compile(pattern) for pattern in seam._keys_to_ignore_on_load_unexpected or ()]
        names = [name for name in names if not any(pattern.search(name) for pattern in ignored)]
        modules = dict(self._model.named_modules())
        num_more = getattr(self._model.config, "num_nextn_predict_layers", None) or 0
        for name in names:
            module, _, kind = name.rpartition(".")
            parent = module.rpartition(".")[0]
            in_block = parent in modules and any(map(str.isdigit, parent.split(".")))
            if (kind == "bias" and f"{module}.weight" in self._shapes) or (kind == "weight" and in_block):
                raise InputError(
                    f"{self._folder}: its {name} has no place in the model of config.json, which would be another one "
                    "without it; correct config.json (such as attention_bias), or remove it"
                )
            block = _BLOCK.match(name)
            blocks = modules.get(block[1]) if block is not None else None
            if block is not None and isinstance(blocks, nn.ModuleList) and int(block[2]) >= len(blocks) + num_more:
                raise InputError(
                    f"{self._folder}: its weights have the block {block[1]}.{block[2]}, and the model of config.json "
                    f"has {len(blocks)}; correct config.json (num_hidden_layers), or remove it"
                )

    def _refuse_unread(self, unread: list[str]) -> None:
        """InputError for scales that no decoder reads: their weights would be taken for what they are not."""
        read = {key.part for key in self._keys} - set(unread)
        for part in unread:
            weight = next((part[:end] for end in _ends(part) if part[:end] in read), None)
            if weight is not None:
                raise InputError(
                    f"{self._folder}: its {weight} is quantised, as there is {part}, and config.json names no "
                    "format that reads both (quantization_config); start from the 16-bit ones"
                )

    def _make(self, source: "_Source", parts: Mapping[str, list[Any]]) -> dict[str, Tensor]:
        """Tensors that a conversion makes from slices of the files, by the model's names."""
        dtype = None if source.decodes else self._types[source.name]
        if source.converter is None:
            ((part,),) = parts.values()
            return {source.name: part[...]}
        converter: Any = deepcopy(source.converter)  # it is emptied by its work
        for pattern, found in parts.items():
            converter.collected_tensors[pattern] = [partial(_read, part, dtype) for part in found]
        try:
            made = converter.convert(source.name, model=self._model, config=self._model.config)
        except (ValueError, RuntimeError, AssertionError, KeyError) as error:
            what = " ".join(str(error).split())
            raise InputError(
                f"{self._folder}: its {source.name} cannot be read as config.json has it: {what}"
            ) from error
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
            if name in self._packed:
                self._check_packed(name, tuple(self._slice_of(name).get_shape()))
                continue
            self._check_type(name, source)
            if source.is_renamed and (shape := tuple(self._slice_of(name).get_shape())) != self._shapes[name]:
                raise self._wrong_shape(name, shape)

    def _check_type(self, name: str, source: "_Source") -> None:
        """InputError for values that stand for others: whole numbers, or FP8 without the scales of the format."""
        patterns = {pattern for pattern, _ in source.keys}
        for pattern, keys in source.keys:
            if source.decodes and (not pattern.endswith("weight") or f"{pattern}_scale_inv" in patterns):
                continue
            for key in keys:
                dtype = _type_of(self._slices[key])
                is_coded = dtype.is_floating_point and dtype.itemsize == 1 and self._has_decoder
                if is_coded or (self._types[name].is_floating_point and not dtype.is_floating_point):
                    raise InputError(
                        f"{self._folder}: its {key} is stored in {str(dtype).removeprefix('torch.')} and no scales for "
                        "it were found; download the model again, or start from the 16-bit one"
                    )

    def _check_packed(self, name: str, shape: tuple[int, ...]) -> None:
        """InputError for 4-bit values that are not those of a matrix of the model."""
        layer = self._model.get_submodule(name.removesuffix(".weight"))
        num_values = 2 * _type_of(self._slice_of(name)).itemsize * math.prod(shape)
        if not isinstance(layer, nn.Linear | Conv1D) or not 0 <= num_values - math.prod(self._shapes[name]) < 8:
            raise self._wrong_shape(name, shape)

    def _wrong_shape(self, name: str, shape: tuple[int, ...]) -> InputError:
        return InputError(
            f"{self._folder}: its {name} has shape {shape}, that of config.json {self._shapes[name]}; "
            "the two are of different models"
        )


_PREFIX_CHANGE: Any = getattr(core_model_loading, "PrefixChange", ())  # newer than transformers 5.6
_BLOCK = re.compile(r"([a-z_.]+)\.(\d+)\.")
_OF_PACKED = ".weight."  # before the names of the parts of a 4-bit weight


def _ends(part: str) -> Iterator[int]:
    """Places where the name of a weight may end inside that of what belongs to it, the last first."""
    return (place for place in range(len(part) - 1, 0, -1) if part[place] in "._")


def _type_of(part: Any) -> torch.dtype:  # noqa: ANN401  # safetensors' slice, untyped
    """The type of a tensor in a file, of which no element is read but that of a scalar; of other slices theirs."""
    is_known = isinstance(getattr(part, "dtype", None), torch.dtype)
    found: torch.dtype = (part if is_known else part[0:0] if part.get_shape() else part[...]).dtype
    return found


class _Key(NamedTuple):
    """A tensor of the files."""

    part: str  # what is left of its name to be found in the model
    stored: str
    converter: WeightConverter | None = None
    pattern: str | None = None  # of the converter's sources

    def below(self, prefix: str) -> "_Key | None":
        return self._replace(part=self.part[len(prefix) :]) if self.part.startswith(prefix) else None


def _renamed_as(outer: PreTrainedConfig, keys: list[_Key]) -> list[_Key]:
    """Keys as transformers calls them in a model with other parts."""
    listed: list[Any] = [
        found
        for name in (*(outer.architectures or ())[:1], outer.model_type)
        for found in get_checkpoint_conversion_mapping(name) or ()
    ]
    renamings = [each for each in listed if isinstance(each, WeightRenaming)]
    converters = [each for each in listed if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found = [(key, *rename_source_key(key.part, renamings, converters)) for key in keys]
    return [_Key(name, key.stored, by_pattern.get(pattern or ""), pattern) for key, name, pattern in found]


def _prefixes(key: str) -> Iterator[str]:
    """Beginnings of a key that end with a dot and hold no number, the empty one first."""
    prefix = ""
    for part in key.split(".")[:-1]:
        yield prefix
        if part.isdigit():
            return
        prefix += f"{part}."
    yield prefix


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
    def decodes(self) -> bool:
        """True if the conversion decodes quantised tensors, which it reads as they are stored."""
        return self.converter is not None and hasattr(self.converter.operations[0], "hf_quantizer")

    @property
    def stacks(self) -> bool:
        """True if each row of the one tensor that is made comes from one tensor of each pattern."""
        if self.converter is None or len(self.targets) > 1:
            return False
        first, *others = self.converter.operations[self.decodes :] or (None,)
        joins_columns = all(isinstance(each, Concatenate) and each.dim > 0 for each in others)
        return isinstance(first, MergeModulelist) and first.dim == 0 and joins_columns

    def has_rows(self, shape: tuple[int, ...]) -> bool:
        """True if some rows of the one tensor that is made can be made without the others."""
        if self.converter is None:
            return False
        if self.stacks:
            return all(len(keys) == shape[0] for _, keys in self.keys)
        return len(self.converter.operations) == 1 and getattr(self.converter.operations[0], "keeps_rows", False)

    @property
    def targets(self) -> tuple[str, ...]:
        """The model's names of everything that the conversion makes."""
        if self.converter is None or len(self.converter.target_patterns) == 1:
            return (self.name,)
        patterns = self.converter.target_patterns
        prefix, _, suffix = next(self.name.partition(pattern) for pattern in patterns if pattern in self.name)
        return tuple(f"{prefix}{pattern}{suffix}" for pattern in patterns)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a slice, read when it is indexed as a whole."""

    part: Any
    start: int
    stop: int

    def __getitem__(self, _: Any) -> Any:  # noqa: ANN401  # as safetensors' slice
        return self.part[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class _Unread:
    """A slice of which only shape and type are read."""

    part: Any

    def __getitem__(self, _: Any) -> Tensor:  # noqa: ANN401  # as safetensors' slice
        return torch.empty(self.part.get_shape(), dtype=_type_of(self.part), device="meta")


def _read(part: Any, dtype: torch.dtype | None) -> Tensor:  # noqa: ANN401  # safetensors' slice, untyped
    tensor = part[...]
    assert isinstance(tensor, Tensor)
    return tensor if dtype is None else tensor.to(dtype)


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
