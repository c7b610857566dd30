"""Fields that a config may omit: the table of defaults is that of the installed transformers."""

import dataclasses
from typing import Any

import pytest

from shardwise.trainer.spec.model.config_fields import ALIASES, DEFAULTS, fields_of
from shardwise.trainer.spec.model.readers import read_model_shape, supported_model_types

# The least a config of each type may say, so that transformers' own defaults for the rest make a model.
_LEAST: dict[str, Any] = {"vocab_size": 200, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 32}
LEAST = {
    **{model_type: {**_LEAST, "intermediate_size": 80} for model_type in supported_model_types()},
    "gemma3_text": {},
    "phi3": {**_LEAST, "intermediate_size": 80, "vocab_size": 32064},  # its padding token needs an embedding
    "glm": {**_LEAST, "intermediate_size": 80, "vocab_size": 151552},
    "glm4": {**_LEAST, "intermediate_size": 80, "vocab_size": 151552},
    "smollm3": {**_LEAST, "intermediate_size": 80, "vocab_size": 128256},
    "falcon": _LEAST,
    "opt": {**_LEAST, "ffn_dim": 80, "word_embed_proj_dim": 256},
    "gpt2": {"vocab_size": 200, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "gpt_bigcode": {"vocab_size": 200, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "mpt": {"vocab_size": 200, "d_model": 64, "n_layers": 2, "n_heads": 4},
}


@pytest.mark.parametrize("model_type", sorted(DEFAULTS))
def test_defaults_and_other_names_are_those_of_transformers(model_type):
    from transformers import CONFIG_MAPPING

    built = CONFIG_MAPPING[model_type]
    theirs = {field.name: field.default for field in dataclasses.fields(built)}
    assert {name: theirs[name] for name in DEFAULTS[model_type]} == DEFAULTS[model_type]
    for name, other in ALIASES.get(model_type, {}).items():
        renamed: dict[str, Any] = {other: 8}
        fields = fields_of({"model_type": model_type, **renamed}, model_type, origin="config.json")
        assert fields.whole(name) == getattr(built(**renamed), name) == 8


@pytest.mark.parametrize("model_type", supported_model_types())
def test_the_least_config_is_the_model_that_transformers_builds_from_it(model_type):
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    shape = read_model_shape({"model_type": model_type, **LEAST[model_type]})
    settings = CONFIG_MAPPING[model_type](**LEAST[model_type])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    assert shape.num_parameters == sum(weight.numel() for weight in model.parameters())
    assert shape.max_positions == (settings.max_seq_len if model_type == "mpt" else settings.max_position_embeddings)
