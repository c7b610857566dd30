"""Values of a config.json that no model can be trained with, by the names of the fields, for every model type.

transformers builds from most of them without a word: a NaN, a negative epsilon or a rotary base of 0 gives a model
whose logits are no numbers, more experts for a token than there are, or heads that groups do not divide, one that
fails at its first forward. Values of a wrong type, and names that transformers does not know, are left to its build.
"""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.kinds import shown
from shardwise.trainer.spec.model.config_json import decoded

NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")


class _Range(NamedTuple):
    """The numbers that the fields of a name may have; infinity is none of them."""

    name: re.Pattern[str]
    expected: str
    least: float
    most: float = sys.float_info.max

    def includes(self, value: float) -> bool:
        return self.least <= value <= self.most


_SIZES = r"vocab_size|hidden_size|num_hidden_layers|num_attention_heads|num_key_value_heads"
_RANGES = (
    _Range(re.compile(r"(.*_)?(eps|epsilon)"), "a finite number, zero or more", 0.0),
    _Range(
        re.compile(r"((global|local)_)?rope_theta|(.*_)?base_freq|rotary_emb_base"),
        "a finite number above zero",
        sys.float_info.min,
    ),
    _Range(re.compile(r"(.*_)?(dropout|pdrop)(_p|_prob|_rate|_ratio)?"), "a number from 0 to 1", 0.0, 1.0),
    _Range(re.compile(r"initializer_range|partial_rotary_factor|rotary_pct"), "a number from 0 to 1", 0.0, 1.0),
    _Range(re.compile(_SIZES), "a positive whole number", 1.0),
)


def refuse_values(config: Mapping[str, Any], *, origin: str) -> None:
    """InputError for a config of a language model with values that no model can be trained with."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        has = "names no model_type" if model_type is None else f"its model_type is {shown(model_type)}"
        raise InputError(f'{origin}: {has}; write that of its architecture, such as "model_type": "llama"')
    for path, value in _numbers(decoded(dict(config))):
        name = path.rpartition(".")[2]
        found = next((each for each in _RANGES if each.name.fullmatch(name)), None)
        if math.isnan(value) or (found is not None and not found.includes(value)):
            expected = "a number" if found is None else found.expected
            raise InputError(f"{origin}: {path} must be {expected}, not {shown(value)}")
    _refuse_more(config, EXPERTS_PER_TOKEN, NUM_EXPERTS, origin)
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise InputError(f"{origin}: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")


def _refuse_more(config: Mapping[str, Any], parts: tuple[str, ...], wholes: tuple[str, ...], origin: str) -> None:
    part, whole = (next((name for name in names if _is_whole(config.get(name))), None) for names in (parts, wholes))
    if part is not None and whole is not None and config[part] > config[whole] > 0:
        raise InputError(f"{origin}: {part} {config[part]} is more than {whole} {config[whole]}")


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:  # noqa: ANN401  # any value of a config
    """Every number below a value, with the names of the fields that lead to it."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _numbers(each, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def _is_whole(value: Any) -> bool:  # noqa: ANN401  # any value of a config
    return isinstance(value, int) and not isinstance(value, bool)
