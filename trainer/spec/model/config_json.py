"""A config.json as transformers writes it, which JSON is not everywhere: infinity and NaN are no numbers in JSON.

transformers 5 writes them as `{"__float__": "Infinity"}`, earlier versions as bare names, and both read either. Here a
config keeps the first form, so that plan.json and requests to workers are JSON, and it is decoded where transformers
builds from it (configuration_utils.py, `_encode_special_floats`).
"""

import math
from pathlib import Path
from typing import Any

from shardwise.trainer.spec import codec

_TAG = "__float__"
_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config.json, as JSON; InputError if it is not one."""
    found: dict[str, Any] = _encoded(codec.read_object(path))
    return found


def decoded(value: Any) -> Any:  # noqa: ANN401  # any value of a config
    """The value with its numbers that JSON has no form for."""
    if isinstance(value, dict):
        if value.keys() == {_TAG} and value[_TAG] in _NUMBERS:
            return _NUMBERS[value[_TAG]]
        return {name: decoded(each) for name, each in value.items()}
    return [decoded(each) for each in value] if isinstance(value, list) else value


def _encoded(value: Any) -> Any:  # noqa: ANN401  # any value of a config
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {name: _encoded(each) for name, each in value.items()}
    return [_encoded(each) for each in value] if isinstance(value, list) else value
