"""Shapes from config.json: parameter counts exact against transformers' own models, and what is refused."""

import json
from pathlib import Path

import pytest

from trainer.spec.errors import InputError
from trainer.spec.model_shape import ModelShape, read_model_shape

PRESETS = sorted((Path(__file__).parents[2] / "trainer" / "presets").glob("*.json"))

# Elements of all tensors in the published safetensors files.
PUBLISHED_PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "tiny-llama": 2_361_024,  # ours: nothing is published
}
TINY = json.loads((PRESETS[0].parent / "tiny-llama.json").read_text())
VARIANTS = {
    "biases everywhere": {**TINY, "attention_bias": True, "mlp_bias": True},
    "heads wider than hidden": {**TINY, "head_dim": 64},
    "untied": {**TINY, "tie_word_embeddings": False},
    "no grouped queries, defaults left out": {
        key: value for key, value in TINY.items() if key not in ("num_key_value_heads", "head_dim")
    },
    "mistral": {**TINY, "model_type": "mistral", "sliding_window": 512},
    "qwen2": {**TINY, "model_type": "qwen2"},
    "qwen3": {**TINY, "model_type": "qwen3"},
    "qwen3 with biases": {**TINY, "model_type": "qwen3", "attention_bias": True},
}


def counted_by_transformers(config: dict[str, object]) -> tuple[int, set[str]]:
    """Parameters and class names of the model that transformers builds, on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))
    return sum(weight.numel() for weight in model.parameters()), {type(part).__name__ for part in model.modules()}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_parameters_of_every_preset_equal_the_published_ones(path):
    assert read_model_shape(json.loads(path.read_text())).num_parameters == PUBLISHED_PARAMETERS[path.stem]


@pytest.mark.parametrize(
    "config",
    [*(json.loads(path.read_text()) for path in PRESETS), *VARIANTS.values()],
    ids=[*(path.stem for path in PRESETS), *VARIANTS],
)
def test_parameters_and_block_equal_those_of_the_model_that_transformers_builds(config):
    shape = read_model_shape(config)
    num_parameters, classes = counted_by_transformers(config)
    assert shape.num_parameters == num_parameters
    assert shape.block_class in classes


def test_a_shape_adds_up_from_its_linear_layers():
    shape = read_model_shape(TINY)
    assert (shape.query_size, shape.kv_size, shape.head_dim) == (192, 64, 32)
    assert shape.linear_parameters_per_block == 192 * (192 + 64 + 64 + 192) + 3 * 192 * 512
    assert shape.parameters_per_block == shape.linear_parameters_per_block + 2 * 192
    assert shape.embedding_parameters == 4096 * 192
    assert shape.head_parameters == 0
    assert shape.max_positions == 1024


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "bert"}, r"model_type 'bert' is not supported; supported: llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, r"model_type None is not supported"),
        ({"hidden_size": None}, r"llama needs 'hidden_size', which is missing"),
        ({"hidden_size": "wide"}, r"hidden_size must be a positive whole number, not 'wide'"),
        ({"vocab_size": 0}, r"vocab_size must be a positive whole number, not 0"),
        ({"num_hidden_layers": True}, r"num_hidden_layers must be a positive whole number, not True"),
        ({"num_key_value_heads": 4}, r"num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(change, sentence):
    with pytest.raises(InputError, match=rf"config\.json: {sentence}"):
        read_model_shape({**TINY, **change})


def test_the_same_config_gives_the_same_shape():
    assert isinstance(read_model_shape(TINY), ModelShape)
    assert read_model_shape(TINY) == read_model_shape(dict(reversed(TINY.items())))
