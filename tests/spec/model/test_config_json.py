"""A config.json with numbers that JSON lacks, in both forms that transformers writes."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from shardwise.trainer.runtime.models.configs import config_of
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.model.config_json import decoded, read_config

_LIMIT = {"model_type": "mamba2", "num_heads": 8, "hidden_size": 64, "expand": 2, "head_dim": 16}
_OBJECTS = '[0.0, {"__float__": "Infinity"}], "more": {"a": {"__float__": "-Infinity"}, "b": {"__float__": "NaN"}}'
_WORDS = '[0.0, Infinity], "more": {"a": -Infinity, "b": NaN}'


@pytest.mark.parametrize("text", [_OBJECTS, _WORDS])
def test_infinity_is_read_in_both_forms_and_kept_as_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(f'{json.dumps(_LIMIT)[:-1]}, "time_step_limit": {text}}}')
    config = read_config(path)
    assert msgspec.json.decode(msgspec.json.encode(config)) == config  # plan.json and requests hold it
    found = decoded(config)
    assert found["time_step_limit"] == [0.0, math.inf]
    assert found["more"]["a"] == -math.inf and math.isnan(found["more"]["b"])
    assert tuple(config_of(config).time_step_limit) == (0.0, math.inf)


def test_an_object_that_is_no_number_stays_and_other_faults_are_named(tmp_path: Path) -> None:
    assert decoded({"a": {"__float__": "x"}, "b": "Infinity"}) == {"a": {"__float__": "x"}, "b": "Infinity"}
    path = tmp_path / "config.json"
    path.write_text('{"a": Infinite}')
    with pytest.raises(InputError, match=r"config\.json"):
        read_config(path)
