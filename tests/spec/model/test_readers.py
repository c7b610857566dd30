"""Shapes from config.json: exact against transformers' own models, block by block, and what is refused."""

from collections import Counter
from typing import Any

import pytest
from architecture_factory import TINY, VARIANTS

from shardwise.launch.inputs.model_files import known_models, read_preset
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.model.readers import read_model_shape, supported_model_types
from shardwise.trainer.spec.model.shape import Linear, ModelShape
from shardwise.trainer.spec.strategy import Attention, Precision

READ = [model for model in known_models() if model.config["model_type"] in supported_model_types()]
# One of each model type is built; the parameters of all equal the published ones.
PRESET_CONFIGS = {model.config["model_type"]: model.config for model in reversed(READ)}
SMALL = {**{f"{name}, plain": config for name, config in TINY.items()}, **VARIANTS}
CONFIGS = {**PRESET_CONFIGS, **SMALL}
LLAMA = read_preset("tiny-llama")
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
EACH_SMALL = pytest.mark.parametrize("config", SMALL.values(), ids=SMALL)


def built_by_transformers(config: dict[str, Any]):
    """The model that transformers builds, on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))


def blocks_of(model, shape: ModelShape) -> list:
    return [part for part in model.modules() if type(part).__name__ == shape.block_class]


def num_parameters(module) -> int:
    return sum(weight.numel() for weight in module.parameters())


@pytest.mark.parametrize("model", READ, ids=lambda model: model.name)
def test_parameters_of_every_preset_equal_the_published_ones(model):
    """Those of the safetensors files, without weights that are stored twice and those of vision; or as rounded."""
    found = read_model_shape(model.config, origin=model.name).num_parameters
    if model.name == "tiny-llama":  # ours: nothing is published
        assert found == 2_361_024
    elif model.parameters % 1_000_000:
        assert found == model.parameters
    else:
        assert found == pytest.approx(model.parameters, rel=0.01)


def test_most_published_counts_of_parameters_are_exact_and_every_architecture_is_tested():
    """A rounded count would not see a missing bias."""
    rounded = [model.name for model in READ if model.parameters is not None and not model.parameters % 10**6]
    assert len(rounded) <= 0.15 * len(READ)
    assert set(TINY) == set(supported_model_types())


@EACH
def test_parameters_equal_those_of_the_model_that_transformers_builds(config):
    shape, model = read_model_shape(config), built_by_transformers(config)
    sizes = sorted(num_parameters(block) for block in blocks_of(model, shape))
    usual = [shape.parameters_per_block] * (shape.num_layers - shape.num_dense_layers)
    assert shape.num_parameters == num_parameters(model)
    assert sizes == sorted([*usual, *[shape.dense_parameters_per_block] * shape.num_dense_layers])
    assert shape.block_parameters == sum(sizes)
    assert shape.largest_tensor == max(weight.numel() for weight in model.parameters())
    assert shape.embedding_parameters == model.get_input_embeddings().weight.numel()
    assert shape.is_tied == (model.get_input_embeddings().weight is model.get_output_embeddings().weight)


def every_linear(shape: ModelShape) -> list[tuple[Linear, int]]:
    """Each linear layer of a block with the number of blocks that have it."""
    num_usual = shape.num_layers - shape.num_dense_layers
    return [
        *((linear, num_usual) for linear in shape.linears),
        *((linear, shape.num_dense_layers) for linear in shape.dense_linears),
    ]


@EACH_SMALL
def test_linear_modules_are_those_of_the_blocks(config):
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    shape, model = read_model_shape(config), built_by_transformers(config)
    expected: Counter[tuple[str, int, int, bool]] = Counter()
    found: Counter[tuple[str, int, int, bool]] = Counter()
    for linear, times in every_linear(shape):
        if linear.is_linear_module:
            expected[(linear.name, linear.num_inputs, linear.num_outputs, linear.has_bias)] += times
    for block in blocks_of(model, shape):
        for name, part in block.named_modules():
            if isinstance(part, nn.Linear):
                sizes = (part.in_features, part.out_features, part.bias is not None)
                found[(name.rpartition(".")[2], *sizes)] += 1
            elif isinstance(part, Conv1D):
                found[(name.rpartition(".")[2], part.nx, part.nf, True)] += 1
    assert found == expected


@EACH_SMALL
@pytest.mark.filterwarnings("ignore:.*were ignored:RuntimeWarning")  # a rank for experts that it looks for as modules
@pytest.mark.filterwarnings("ignore:.*no parameter was matched:RuntimeWarning")  # all blocks dense
def test_adapters_on_all_linear_are_as_large_as_the_shape_says(config):
    from shardwise.trainer.runtime.models.methods import add_adapters

    shape, rank, adapted = read_model_shape(config), 3, built_by_transformers(config)
    add_adapters(adapted, LoraJob(rank=rank), Precision.FP32)
    assert sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad) == sum(
        times * linear.num_copies * linear.adapter_rank_factor * rank * (linear.num_inputs + linear.num_outputs)
        for linear, times in every_linear(shape)
    )


@pytest.mark.parametrize("name", [name for name in SMALL if "mixtral" in name or "moe" in name])
def test_what_is_no_linear_module_is_a_parameter_of_that_shape(name):
    shape, model = read_model_shape(SMALL[name]), built_by_transformers(SMALL[name])
    block = max(blocks_of(model, shape), key=num_parameters)
    parameters = {name.removeprefix("mlp."): weight.shape for name, weight in block.named_parameters()}
    for linear in (each for each in shape.linears if not each.is_linear_module):
        copies = (linear.num_copies,) if linear.num_copies > 1 else ()
        full_name = linear.name if copies else f"{linear.name}.weight"
        assert parameters[full_name] == (*copies, linear.num_outputs, linear.num_inputs)


@EACH_SMALL
def test_norms_positions_windows_and_attention_are_those_of_transformers(config):
    shape, model = read_model_shape(config), built_by_transformers(config)
    norms = [
        name
        for name, part in blocks_of(model, shape)[0].named_modules()
        if "norm" in type(part).__name__.lower() and not any(of in name for of in ("q_", "k_"))
    ]
    angles = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq") and "original" not in name]
    settings = model.config
    windows = getattr(settings, "sliding_window", None)
    layer_types = getattr(settings, "layer_types", None) or ["sliding_attention"] * shape.num_layers
    assert len(norms) == shape.num_norms
    assert {2 * buffer.numel() for buffer in angles} <= {shape.rotary_dim or shape.head_dim}
    assert bool(angles) == (shape.positions == "rotary") or settings.model_type == "falcon"
    assert shape.num_sliding_layers == (layer_types.count("sliding_attention") if windows else 0)
    assert shape.sliding_window == (windows if shape.num_sliding_layers else None)
    assert (Attention.SDPA in shape.attentions) == model._supports_sdpa
    refuses_flash = getattr(settings, "alibi", False)  # Falcon's forward does, with ALiBi
    assert (Attention.FLASH in shape.attentions) == (model._supports_flash_attn and not refuses_flash)


def test_the_text_part_of_a_config_with_vision_is_read():
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    shape = read_model_shape({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}})
    assert shape == read_model_shape(read_preset("gemma-3-4b-text"))


def test_a_token_passes_its_own_experts_only_and_blocks_are_counted_without_walking_them():
    shape = read_model_shape(VARIANTS["qwen3_moe with a dense block"])
    assert (shape.num_experts, shape.experts_per_token, shape.ffn_size) == (6, 2, 24)
    assert {(linear.num_copies, linear.num_used) for linear in shape.linears} == {(1, 1), (6, 2)}
    assert {(linear.num_copies, linear.num_used) for linear in shape.dense_linears} == {(1, 1)}
    deep = read_model_shape({**TINY["qwen3_moe"], "num_hidden_layers": 10**5, "mlp_only_layers": [1, 10**13]})
    assert deep.num_dense_layers == 1


def test_a_block_that_is_dense_for_two_reasons_is_counted_once():
    config = {**VARIANTS["qwen2_moe with every second block dense"], "mlp_only_layers": [0]}
    assert read_model_shape(config).num_dense_layers == 2


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gemma2, plain", {"attention_softcap": 50.0, "logit_softcap": 30.0, "activation": "gelu_pytorch_tanh"}),
        ("gemma3 with a capped head", {"attention_softcap": None, "logit_softcap": 5.0, "has_qk_norm": True}),
        ("gpt2, plain", {"hidden_dropout": 0.1, "attention_dropout": 0.1, "activation": "gelu_new", "is_gated": False}),
        ("gpt_bigcode, plain", {"num_kv_heads": 1, "position_parameters": 96 * 64}),
        ("gpt_neox, plain", {"is_parallel": True, "num_norms": 2}),
        ("phi, plain", {"is_parallel": True, "num_norms": 1, "head_bias_parameters": 200}),
        ("falcon, plain", {"is_parallel": True, "num_kv_heads": 1, "num_norms": 1}),
        ("mistral without window", {"sliding_window": None, "num_sliding_layers": 0}),
        ("falcon rw", {"is_parallel": False, "num_kv_heads": 4, "positions": "alibi"}),
        ("stablelm with everything", {"is_parallel": True, "has_qk_norm": True, "norm": "layer"}),
    ],
)
def test_a_shape_says_how_its_blocks_differ(name, fields):
    shape = read_model_shape(CONFIGS[name])
    assert {field: getattr(shape, field) for field in fields} == fields


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"model_type": "bert"}, r"\"bert\".*falcon, gemma, gemma2, .*stablelm.*traced with torch"),
        ({"model_type": None}, "model_type empty"), ({"hidden_size": None}, "llama .*hidden_size"),
        ({"hidden_size": "wide"}, r"hidden_size .*\"wide\""), ({"vocab_size": 0}, r"vocab_size .*0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers .* at most 100000, .*1000000000"),
        ({"vocab_size": 10**30}, "vocab_size .* at most 1099511627776"),
        ({"num_hidden_layers": True}, r"num_hidden_layers .*true"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 .*num_key_value_heads 4"),
        ({"hidden_size": 194, "head_dim": None}, "194 .* 6"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings .*\"yes\""),
        ({"attention_dropout": "some"}, r"attention_dropout .*\"some\""),
        ({**TINY["mpt"], "expansion_ratio": 2}, "expansion_ratio is 2; .*4"),
        ({**TINY["gpt2"], "add_cross_attention": True}, "add_cross_attention is true"),
        ({**TINY["qwen3_moe"], "mlp_only_layers": "first"}, r"mlp_only_layers .*\"first\""),
        ({**TINY["gpt_neox"], "rotary_pct": 1e300}, "rotary_pct must be a number from 0 to 1"),
        ({**TINY["mpt"], "attn_config": [1]}, r"attn_config .*a list"),
    ],
)  # fmt: skip
def test_a_config_that_is_not_understood_is_refused(change, fact):
    with pytest.raises(InputError, match=rf"config\.json: .*{fact}"):
        read_model_shape({**LLAMA, **change})
