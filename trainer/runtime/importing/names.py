"""Names of tensors: what wrappers and state dicts have put before them taken off, and each held against the model.

The model is built without weights from its config. Which name of a file is which of the model is transformers' own
table, as when it loads a folder (`weight_reader`), so that what is imported here is what it will find.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainer.runtime.importing.tensors import Stored, Tensors
from trainer.runtime.models.load.weight_reader import WeightReader
from trainer.runtime.models.quantisation import refuse_quantised
from trainer.spec.errors import InputError

_ANYWHERE = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_IN_FRONT = re.compile(r"^(module\.|base_model\.model\.)+")
_SHOWN = 3
_REFUSALS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    ImportError,
    AssertionError,
    ArithmeticError,
)


class Placed(NamedTuple):
    """Tensors that are all of a model, each under a name that transformers finds it by."""

    tensors: dict[str, Stored]
    model_names: dict[str, str]  # of those that are in the model as they are
    notes: tuple[str, ...]


def build_empty(config: Mapping[str, Any], origin: str, *, most_layers: int) -> PreTrainedModel:
    """The model of a config without weights; InputError where transformers has none.

    `most_layers`: as many as there are tensors, since even without weights a layer takes memory.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InputError(f"{origin}: names no model_type; is it the config.json of a transformers model?")
    for setting in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if isinstance(config.get(setting), int) and config[setting] > most_layers:
            raise InputError(f"{origin}: says {setting} {config[setting]}, and there are {most_layers} tensors")
    fields = {name: value for name, value in config.items() if name not in ("model_type", "dtype", "torch_dtype")}
    try:
        made = AutoConfig.for_model(model_type, **fields)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="eager")
    except (*_REFUSALS, StrictDataclassError) as error:
        first = " ".join(str(error).split())[:200]
        raise InputError(f"{origin}: is no causal language model that transformers can build: {first}") from error
    assert isinstance(model, PreTrainedModel)
    refuse_quantised(model.config, origin)
    return model


def place_tensors(
    model: PreTrainedModel, tensors: Tensors, origin: str, *, config_origin: str, is_nested: bool
) -> Placed:
    """The tensors by their plain names; InputError where one is missing, has no place or another shape.

    `is_nested`: the names begin with what the state dict put the model under, beside other things.
    """
    known = model.state_dict(keep_vars=True)
    plain, left_out = _without_nest(_unwrapped(tensors, origin), known, origin) if is_nested else (tensors, ())
    plain = _unwrapped(plain, origin)
    notes = [f"left out, as it is not of the model: {_some(left_out)}"] if left_out else []
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]
    ignored = {name for name in plain if name not in known and any(re.search(each, name) for each in patterns)}
    plain = {name: stored for name, stored in plain.items() if name not in ignored}  # buffers of earlier versions
    matched = _match(model, plain, origin)
    _check_complete(model, matched, origin, config_origin)
    copies = _copies(model, matched, origin)
    kept = {name: stored for name, stored in plain.items() if name not in copies}
    if copies:
        notes.append(f"tied weights, stored once: {_some(sorted(copies))}")
    return Placed(kept, {name: of for name, of in matched.renamed.items() if name in kept}, tuple(notes))


class _Matcher(WeightReader):
    """What of the model each tensor is, as `WeightReader` finds it for a folder; shapes are checked."""

    def __init__(self, model: PreTrainedModel, tensors: Tensors, origin: str) -> None:
        self._tensors = tensors
        types = {name: tensor.dtype for name, tensor in model.state_dict(keep_vars=True).items()}
        super().__init__(model, origin, types=types)
        for name, source in self._sources.items():
            if not source.is_renamed:
                self.read(name)  # one at a time, to see that what is put together has the model's shape

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
        """Whether two tensors of the model hold the same."""
        return torch.equal(self.read(name), self.read(other))


class _Slice:
    """A tensor as safetensors' slices are."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def get_shape(self) -> list[int]:
        return [*self._stored.shape]

    def __getitem__(self, part: Any) -> Tensor:  # noqa: ANN401  # whatever a tensor is indexed by
        return self._stored.read()[part]


def _match(model: PreTrainedModel, tensors: Tensors, origin: str) -> _Matcher:
    try:
        return _Matcher(model, tensors, origin)
    except (ValueError, IndexError, RuntimeError) as error:  # of transformers' conversions, at tensors they are not for
        first = " ".join(str(error).split())[:200]
        raise InputError(f"{origin}: cannot be matched with {type(model).__name__}: {first}") from error


def _unwrapped(tensors: Tensors, origin: str) -> dict[str, Stored]:
    """Without the names of wrappers: DDP's and DeepSpeed's, FSDP1's, torch.compile's, PEFT's."""
    plain: dict[str, Stored] = {}
    for name, stored in tensors.items():
        short = _IN_FRONT.sub("", _ANYWHERE.sub("", name))
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
            if _IN_FRONT.sub("", name[start:]) in known:
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
