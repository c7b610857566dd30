"""A shape described from the model itself is the one that a reader finds, and says which losses are not ours."""

from collections import Counter

import pytest
from architecture_factory import TINY, VARIANTS
from msgspec.structs import replace

from shardwise.trainer.simulation.describe import describe
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.model.blocks import Component
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.model.shape import DescriptionRequest, Linear, ModelShape
from shardwise.trainer.spec.strategy import Attention

_SIZES = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VARIANTS = ("falcon rw", "qwen3_moe with a dense block", "gemma3 with a capped head")
_KNOWN = {**TINY, **{name: VARIANTS[name] for name in _VARIANTS}}
_SAME = (
    "num_parameters", "model_type", "block_class", "vocab_size", "hidden_size", "ffn_size", "num_layers",
    "num_dense_layers", "num_heads", "head_dim", "is_tied", "norm", "norm_parameters_per_block", "is_gated",
    "num_sliding_layers", "positions", "rotary_dim", "position_parameters", "head_bias_parameters", "has_qk_norm",
    "num_experts", "experts_per_token", "hidden_dropout", "attention_dropout", "logit_softcap", "attentions",
    "block_parameters", "loss_obstacle", "other_parameters",
)  # fmt: skip


def described(config) -> ModelShape:
    return describe(DescriptionRequest(model_config=config, origin="config.json"))


@pytest.mark.parametrize("config", _KNOWN.values(), ids=_KNOWN)
def test_a_described_shape_is_the_one_that_a_reader_finds(config):
    shape, expected = described(config), read_model_shape(config)
    assert shape.is_described
    assert {name: getattr(shape, name) for name in _SAME} == {name: getattr(expected, name) for name in _SAME}
    assert _layers(shape.linears) == _layers(expected.linears)
    assert _layers(shape.dense_linears) == _layers(expected.dense_linears)


def _layers(linears: tuple[Linear, ...]) -> Counter:
    """Linear layers; of blocks without experts, readers do not tell attention from the rest."""
    has_experts = any(one.num_copies > 1 for one in linears)
    return Counter(one if has_experts else replace(one, component=Component.FEED_FORWARD) for one in linears)


def test_an_architecture_without_a_reader_is_described_in_full():
    shape = described({"model_type": "bloom", "vocab_size": 200, "hidden_size": 64, "n_layer": 3, "n_head": 4})
    assert (shape.block_class, shape.num_layers, shape.num_parameters) == ("BloomBlock", 3, 163_008)
    assert abs(shape.other_parameters) <= 2 * shape.hidden_size
    assert shape.loss_obstacle is None


def test_attention_is_what_the_class_of_the_model_supports_without_a_kernel_of_the_hub():
    """W30: a class that lists what may stand in for `flash_attention_2` makes transformers take the first."""
    assert described({**_SIZES, "model_type": "gemma2"}).attentions == (Attention.FLASH, Attention.EAGER)
    assert described({**_SIZES, "model_type": "granite_swa"}).attentions == (Attention.EAGER,)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "mistral3"}, r"^config\.json: .*no causal language model of type mistral3$"),
        ({"model_type": "no_such_model"}, r"^config\.json: .* does not know model_type no_such_model$"),
        ({**_SIZES, "model_type": "olmo2", "hidden_size": "wide"}, r"^config\.json: .*not build olmo2 .*hidden_size"),
    ],
)
def test_a_config_that_transformers_cannot_build_is_refused(config, sentence):
    with pytest.raises(InputError, match=sentence):
        described(config)
