"""Names of tensors: prefixes of wrappers and state dicts removed, each compared with the model; adapters merged.

The model is built without weights from its config. The mapping from names in a file to those of the model is
transformers' own table, as when it loads a folder (`weight_files`), so that it finds the imported tensors.

A PEFT adapter is merged into its base while that is copied, tensor by tensor (`export.folder` has the formulas). An
embedding becomes E' = E + s (B A)^T, A [rank, vocabulary], B [width, rank].

Sums are computed in fp32 and rounded once, to the type of the base. Weights that the adapter has whole
(`modules_to_save`) replace the base's. Any other kind of adapter is refused.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from msgspec.structs import replace
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwise.trainer.runtime.export.folder import sum_of_lora
from shardwise.trainer.runtime.importing.tensors import Stored, Tensors
from shardwise.trainer.runtime.models.configs import config_of
from shardwise.trainer.runtime.models.weight_files import IN_FRONT, WeightReader, without_wrappers
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.model.stored import Treatment, refuse_format, weight_format

_SHOWN = 3
_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.weight)?"
)
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initial values that are subtracted from the base
_UNKNOWN = (
    "use_qalora", "layer_replication", "megatron_config", "trainable_token_indices", "lora_bias",
    "alora_invocation_tokens",
)  # fmt: skip
_REFUSALS = (
    ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError, AssertionError, ArithmeticError,
)  # fmt: skip


class Placed(NamedTuple):
    """Tensors that are all of a model, each under a name that transformers finds it by."""

    tensors: dict[str, Stored]
    model_names: dict[str, str]  # of those that are in the model as they are
    notes: tuple[str, ...]


def build_empty(config: Mapping[str, Any], origin: str, *, most_layers: int) -> PreTrainedModel:
    """The model of a config without weights; InputError where transformers has none.

    `most_layers`: as many as there are tensors, since even a layer without weights needs memory.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InputError(f"{origin}: names no model_type; is it the config.json of a transformers model?")
    for setting in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if isinstance(config.get(setting), int) and config[setting] > most_layers:
            raise InputError(f"{origin}: has {setting} {config[setting]}, and there are {most_layers} tensors")
    try:
        made = config_of(config)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="eager")
    except (*_REFUSALS, StrictDataclassError) as error:
        first = " ".join(str(error).split())[:200]
        raise InputError(f"{origin}: is no causal language model that transformers can build: {first}") from error
    assert isinstance(model, PreTrainedModel)
    weights = weight_format(config)
    if weights is not None:  # nothing is decoded here
        refuse_format(replace(weights, treatment=Treatment.REFUSED), origin=origin, method=None, source=None)
    return model


def place_tensors(
    model: PreTrainedModel, tensors: Tensors, origin: str, *, config_origin: str, is_nested: bool
) -> Placed:
    """The tensors by their plain names; InputError where one is missing, has no place or another shape.

    `is_nested`: the names begin with the key of the model in a state dict that holds other things as well.
    """
    known = model.state_dict(keep_vars=True)
    plain, excluded = _without_nest(_unwrapped(tensors, origin), known, origin) if is_nested else (tensors, ())
    plain = _unwrapped(plain, origin)
    notes = [f"omitted, as it is not of the model: {_some(excluded)}"] if excluded else []
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    ignored = {name for name in plain if name not in known and any(re.search(each, name) for each in patterns)}
    plain = {name: stored for name, stored in plain.items() if name not in ignored}  # buffers of earlier versions
    matched = _match(model, plain, origin)
    _check_complete(model, matched, origin, config_origin)
    copies = _copies(model, matched, origin)
    retained = {name: stored for name, stored in plain.items() if name not in copies}
    if copies:
        notes.append(f"tied weights, stored once: {_some(sorted(copies))}")
    return Placed(retained, {name: of for name, of in matched.renamed.items() if name in retained}, tuple(notes))


class _Matcher(WeightReader):
    """Maps tensors to weights of the model, as `WeightReader` does for a folder; checks shapes."""

    def __init__(self, model: PreTrainedModel, tensors: Tensors, origin: str) -> None:
        self._tensors = tensors
        types = {name: tensor.dtype for name, tensor in model.state_dict(keep_vars=True).items()}
        super().__init__(model, origin, types=types)
        for name, source in self._sources.items():
            if not source.is_renamed:
                self.read(name)  # one at a time, to check that an assembled tensor has the model's shape

    def _open(self) -> Iterator[tuple[str, Any]]:
        return ((name, _Slice(stored)) for name, stored in self._tensors.items())

    @property
    def renamed(self) -> dict[str, str]:
        """The model's names of tensors that are in it as they are."""
        return {source.keys[0][1][0]: name for name, source in self._sources.items() if source.is_renamed}

    @property
    def unexpected(self) -> list[str]:
        """Tensors that the model has no place for."""
        used = {key for source in self._sources.values() for _, keys in source.keys for key in keys}
        return sorted({*self._tensors} - used)

    def equal(self, name: str, other: str) -> bool:
        """True if two tensors of the model are equal."""
        return torch.equal(self.read(name), self.read(other))


class _Slice:
    """A tensor as safetensors' slices are."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    @property
    def dtype(self) -> torch.dtype:
        return self._stored.dtype

    def get_shape(self) -> list[int]:
        return [*self._stored.shape]

    def __getitem__(self, part: Any) -> Tensor:  # noqa: ANN401  # any index of a tensor
        return self._stored.read()[part]


def _match(model: PreTrainedModel, tensors: Tensors, origin: str) -> _Matcher:
    try:
        return _Matcher(model, tensors, origin)
    except (ValueError, IndexError, RuntimeError) as error:  # of transformers' conversions, at tensors they are not for
        first = " ".join(str(error).split())[:200]
        raise InputError(f"{origin}: cannot be matched with {type(model).__name__}: {first}") from error


def _unwrapped(tensors: Tensors, origin: str) -> dict[str, Stored]:
    """Without the names of wrappers."""
    plain: dict[str, Stored] = {}
    for name, stored in tensors.items():
        short = without_wrappers(name)
        if short in plain:
            raise InputError(f"{origin}: holds {short} twice, under names of several wrappers; import one of them")
        plain[short] = stored
    return plain


def _without_nest(
    tensors: Mapping[str, Stored], known: Mapping[str, Tensor], origin: str
) -> tuple[dict[str, Stored], tuple[str, ...]]:
    """The tensors below the part of a state dict that holds the model, and what else there is."""
    counts: dict[str, int] = {}
    for name in tensors:
        for start in (0, *(match.end() for match in re.finditer(r"\.", name))):
            if IN_FRONT.sub("", name[start:]) in known:
                counts[name[:start]] = counts.get(name[:start], 0) + 1
                break
    if not counts:
        return dict(tensors), ()
    best = max(counts.values())
    fullest = sorted(nest for nest, count in counts.items() if count == best)
    if len(fullest) > 1:
        raise InputError(
            f"{origin}: holds the model several times, below {' and '.join(nest or 'nothing' for nest in fullest)}"
        )
    nest = fullest[0]
    inside = {name.removeprefix(nest): stored for name, stored in tensors.items() if name.startswith(nest)}
    return inside, tuple(sorted({name.split(".")[0] for name in tensors if not name.startswith(nest)}))


def _check_complete(model: PreTrainedModel, matched: _Matcher, origin: str, config_origin: str) -> None:
    there = {*matched.names}
    tensors = model.state_dict(keep_vars=True)
    found = {id(tensor) for name, tensor in tensors.items() if name in there}
    missing = sorted(name for name, tensor in tensors.items() if id(tensor) not in found)
    unexpected = matched.unexpected
    if missing or unexpected:
        lines = [
            f"{origin}: is not of the {type(model).__name__} that {config_origin} describes; --config names another"
        ]
        lines += [f"missing: {_some(missing)}"] if missing else []
        lines += [f"unexpected: {_some(unexpected)}"] if unexpected else []
        raise InputError("\n".join(lines))


def _copies(model: PreTrainedModel, matched: _Matcher, origin: str) -> set[str]:
    """Names of tensors that the model ties to another one, which is there as well and the same."""
    first: dict[int, str] = {}
    copies: set[str] = set()
    tensors = model.state_dict(keep_vars=True)
    keys = {name: key for key, name in matched.renamed.items()}
    tied: Any = model.all_tied_weights_keys
    for name in sorted(keys, key=lambda each: each in tied):  # a tied one after the one that it is tied to
        other = first.setdefault(id(tensors[name]), name)
        if other == name:
            continue
        if not matched.equal(name, other):
            raise InputError(
                f"{origin}: {keys[name]} and {keys[other]} differ, and the config ties them;\n"
                "name one with tie_word_embeddings: false by --config"
            )
        copies.add(keys[name])
    return copies


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


class _Lora(NamedTuple):
    """Matrices of the adapter of one weight."""

    a: Stored
    b: Stored
    magnitudes: Stored | None
    scaling: float
    is_embedding: bool
    is_transposed: bool  # the base stores its weight as [in, out]


def merged(
    base: Tensors, model_names: Mapping[str, str], adapter: Tensors, config: Mapping[str, Any], origin: Path
) -> dict[str, Stored]:
    """The base's tensors with the adapter in them, merged when they are read.

    `model_names`: the model's names of the base's tensors. InputError where a part of the adapter has no place.
    """
    _check_config(config, origin)
    parts, whole = _parts(adapter, origin)
    by_model_name = {model_name: name for name, model_name in model_names.items()}
    tensors = dict(base)
    for name, stored in whole.items():
        place = by_model_name.get(name)
        if place is None or base[place].shape != stored.shape:
            raise InputError(
                f"{origin}: its {name} {stored.shape} has no place of that shape in the base; is it the adapter's base?"
            )
        tensors[place] = stored
    for module, found in parts.items():
        place = by_model_name.get(f"{module}.weight")
        if place is None:
            raise InputError(f"{origin}: adapts {module}, which the base does not have as one weight")
        lora = _lora(module, found, config, origin)
        _check_shapes(lora, tensors[place], module, origin)
        tensors[place] = tensors[place]._replace(read=partial(_merge, tensors[place], lora))
    return tensors


def base_name(config: Mapping[str, Any]) -> str:
    """The adapter's name of its base model, for messages."""
    return str(config.get("base_model_name_or_path") or "its base")[:200]


def _check_config(config: Mapping[str, Any], origin: Path) -> None:
    if config.get("peft_type") != "LORA":
        raise InputError(f"{origin}: is a {config.get('peft_type')} adapter; LoRA and DoRA are merged here")
    initial = str(config.get("init_lora_weights")).lower()
    if initial.startswith(_CHANGE_THE_BASE):
        raise InputError(
            f"{origin}: was initialised by {initial}, which changes the base as well;\n"
            "merge it by PEFT where it was trained"
        )
    found = [name for name in _UNKNOWN if config.get(name)]
    if found:
        raise InputError(f"{origin}: has {found[0]}, which is not merged here; merge it by PEFT: merge_and_unload()")


def _parts(adapter: Tensors, origin: Path) -> tuple[dict[str, dict[str, Stored]], dict[str, Stored]]:
    """The adapter's tensors by module and part, and those that are whole weights."""
    parts: dict[str, dict[str, Stored]] = {}
    whole: dict[str, Stored] = {}
    for key, stored in adapter.items():
        name = key.removeprefix(_PREFIX).replace(".base_layer.weight", ".weight")  # an adapted embedding, saved whole
        match = _PART.fullmatch(name)
        if match is not None:
            parts.setdefault(match["module"], {})[match["part"]] = stored
        elif "lora_" in name or not key.startswith(_PREFIX):
            raise InputError(f"{origin}: {key[:80]} is no tensor of a LoRA adapter")
        else:
            whole[name] = stored
    return parts, whole


def _lora(module: str, found: Mapping[str, Stored], config: Mapping[str, Any], origin: Path) -> _Lora:
    is_embedding = "lora_embedding_A" in found
    names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    if not {*names} <= {*found}:
        raise InputError(f"{origin}: lacks A or B of {module}; save the adapter again")
    a, b = (found[name] for name in names)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise InputError(f"{origin}: A {a.shape} and B {b.shape} of {module} do not make a product")
    alpha = _of_pattern(config.get("alpha_pattern") or {}, module, config.get("lora_alpha"))
    if not isinstance(alpha, int | float):
        raise InputError(f"{origin}: has no lora_alpha of {module}")
    scaling = alpha / (math.sqrt(a.shape[0]) if config.get("use_rslora") else a.shape[0])
    is_transposed = bool(config.get("fan_in_fan_out")) and not is_embedding
    return _Lora(a, b, found.get("lora_magnitude_vector"), scaling, is_embedding, is_transposed)


def _of_pattern(patterns: Mapping[str, Any], module: str, default: object) -> object:
    """As PEFT's `get_pattern_key`: the first pattern that the end of a module's name has."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _check_shapes(lora: _Lora, weight: Stored, module: str, origin: Path) -> None:
    out_features, in_features = lora.b.shape[0], lora.a.shape[1]
    is_turned = lora.is_transposed or lora.is_embedding
    expected = (in_features, out_features) if is_turned else (out_features, in_features)
    if weight.shape != expected:
        raise InputError(f"{origin}: is of a {module} {expected}, that of the base is {weight.shape}")
    if lora.magnitudes is not None and (lora.is_embedding or torch.Size(lora.magnitudes.shape).numel() != out_features):
        raise InputError(f"{origin}: its magnitudes of {module} are not one for each of {out_features} rows")


def _merge(weight: Stored, lora: _Lora) -> Tensor:
    """The weight in its own type, laid out as it was."""
    is_turned = lora.is_transposed or lora.is_embedding
    base, a, b = weight.read(), lora.a.read(), lora.b.read()
    magnitudes = None if lora.magnitudes is None else lora.magnitudes.read().reshape(-1)
    total = sum_of_lora(base.t() if is_turned else base, a, b, scaling=lora.scaling, magnitudes=magnitudes)
    return (total.t() if is_turned else total).to(weight.dtype).contiguous()
