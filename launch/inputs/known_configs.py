"""Configs that transformers is known to build, so that most plans of a model with a closed form need no build.

Known are the values that the package's own table of models and the defaults of the closed forms have for a model type,
numbers and switches in the fields that have such ones there, and the settings that every config.json has. Any other
value is left to transformers: a worker builds the model without memory (`model_check`).
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from shardwise.launch.inputs.model_files import known_models
from shardwise.trainer.spec.model.config_fields import DEFAULTS
from shardwise.trainer.spec.model.shape import ModelShape

_TEXTS = frozenset({"model_type", "transformers_version", "dtype", "torch_dtype", "_name_or_path"})
_SWITCHES = frozenset({"use_cache"})
_TOKENS = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})
_ROPES = frozenset({"rope_scaling", "rope_parameters"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})  # that every type with a window has


class _Seen(NamedTuple):
    """The values of a field of a model type in the package's own tables, as JSON, and their types."""

    values: frozenset[str]
    types: frozenset[type]


def is_known_to_build(config: Mapping[str, Any], shape: ModelShape) -> bool:
    """True if every value of a config of this shape is one from which transformers builds; false where unsure."""
    rotated = shape.head_dim if shape.rotary_dim is None else shape.rotary_dim
    is_even = rotated % 2 == 0 and shape.hidden_size % shape.num_heads == 0
    return is_even and all(_is_known(name, value, shape) for name, value in config.items())


def _is_known(name: str, value: Any, shape: ModelShape) -> bool:  # noqa: ANN401  # any value of a config
    if name in _TOKENS:
        ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
        return all(each is None or (type(each) is int and 0 <= each < shape.vocab_size) for each in ids)
    if name == "architectures":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if name == "layer_types" and isinstance(value, list):
        return len(value) == shape.num_layers and all(each in _LAYER_TYPES for each in map(str, value))
    if name in _ROPES and isinstance(value, Mapping):
        rotated = shape.head_dim * _share_of(value)
        is_base = _is_usual("rope_theta", value.get("rope_theta", 1.0), shape.model_type)
        is_whole = int(rotated) % 2 == 0 and rotated > 0
        return is_base and is_whole and _text(_plain_rope(value)) in _ropes(shape.model_type)
    is_text, is_switch = isinstance(value, str), isinstance(value, bool)
    return (is_text and name in _TEXTS) or (is_switch and name in _SWITCHES) or _is_usual(name, value, shape.model_type)


def _is_usual(name: str, value: Any, model_type: str) -> bool:  # noqa: ANN401  # any value of a config
    seen = _seen(model_type).get(name)
    if seen is None:
        return False
    is_number = type(value) is float or (type(value) is int and value > 0)
    return ((is_number or type(value) is bool) and type(value) in seen.types) or _text(value) in seen.values


@cache
def _seen(model_type: str) -> Mapping[str, _Seen]:
    values: dict[str, list[Any]] = {"initializer_range": [0.02], "pretraining_tp": [1], "rope_theta": [10000.0, 10000]}
    for config in (*_configs_of(model_type), DEFAULTS[model_type]):
        for name, value in config.items():
            values.setdefault(name, []).append(value)
    return {name: _Seen(frozenset(map(_text, found)), frozenset(map(type, found))) for name, found in values.items()}


@cache
def _ropes(model_type: str) -> frozenset[str]:
    """The scalings of rotary positions that the table has for a type, and none."""
    found = [config[name] for config in _configs_of(model_type) for name in _ROPES & config.keys()]
    return frozenset(_text(_plain_rope(each)) for each in (*found, {}) if isinstance(each, Mapping))


def _configs_of(model_type: str) -> list[dict[str, Any]]:
    return [model.config for model in known_models() if model.config["model_type"] == model_type]


def _plain_rope(value: Mapping[str, Any]) -> dict[str, Any]:
    """A scaling as one of the two forms of transformers has it, without its base and the share that is rotated."""
    kind = value.get("rope_type", value.get("type", "default"))
    apart = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    rest = {name: each for name, each in value.items() if name not in apart}
    return rest if kind == "default" else {**rest, "rope_type": kind}


def _share_of(value: Mapping[str, Any]) -> float:
    """The share of a head that is rotated; 0 for one that is none."""
    share = value.get("partial_rotary_factor", 1.0)
    return share if type(share) is float and 0 < share <= 1 else 0.0


def _text(value: Any) -> str:  # noqa: ANN401  # any value of a config
    return json.dumps(value, sort_keys=True)
