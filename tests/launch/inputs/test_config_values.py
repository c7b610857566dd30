"""Values in a model's files that no model is built from, or a wrong one, are refused before a plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_factory import TINY
from export_factory import write_base

from shardwise.launch.inputs.known_configs import is_known_to_build
from shardwise.launch.plan.gather import PlanInputs, plan_inputs, profile_data, read_inputs
from shardwise.trainer.runtime.models.build import model_from_config
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.model.config_values import refuse_values
from shardwise.trainer.spec.model.readers import admitted_types, read_model_shape
from shardwise.trainer.spec.strategy import Attention

NAN, INFINITY = {"__float__": "NaN"}, {"__float__": "Infinity"}
LLAMA = {**TINY["llama"], "pad_token_id": 0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4}
TYPES = ("llama", "qwen3", "gemma3_text", "gpt2", "phi3", "stablelm")
ODD_VALUES: tuple[Any, ...] = (
    *(-1, 0, 3, 10**6, -0.5, 2.0, 1e-3, NAN, INFINITY, "x", "8", True, None, [], [3], {"a": 1}),
    {"partial_rotary_factor": "x"}, {"partial_rotary_factor": 0.1, "rope_type": "default", "rope_theta": 1e4},
)  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"hidden_act": "sillu"}, 'hidden_act "sillu" is unknown'),
    "activation of another type": ({"hidden_act": 3}, "hidden_act"),
    "rope type": ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, r'rope_scaling\.type "spiral" is unknown'),
    "rope parameters": ({"rope_parameters": {**YARN, "rope_type": "spiral"}}, r'rope_parameters.* "spiral" is unknown'),
    "rope without its factor": ({"rope_parameters": YARN}, "rope_parameters.*factor"),
    "rotary base": ({"rope_theta": 0}, "rope_theta must be a finite number above zero, not 0"),
    "rotary base in a rope": ({"rope_parameters": {"rope_theta": NAN}}, r"rope_parameters\.rope_theta must .* not NaN"),
    "padding": ({"pad_token_id": 200}, "pad_token_id 200 is beyond its vocab_size 200"),
    "padding from the end": ({"pad_token_id": -1}, "pad_token_id -1 stands for token 199"),
    "heads": ({"num_attention_heads": 5, "head_dim": None}, "attention_heads 5 is not a multiple|multiple of .* 5"),
    "groups": ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    "size": ({"hidden_size": -64}, "hidden_size must be a positive whole number, not -64"),
    "size as text": ({"vocab_size": "200"}, 'vocab_size must be a positive whole number, not "200"'),
    "odd heads": ({"head_dim": 7}, "head_dim"),
    "layer types": ({"layer_types": ["full_attention"]}, "layer_types"),
    "name of a layer type": ({"layer_types": ["attn"] * 3}, "layer_types"),
    "epsilon": ({"rms_norm_eps": NAN}, "rms_norm_eps must be a finite number, zero or more, not NaN"),
    "spread": ({"initializer_range": INFINITY}, "initializer_range must be a number from 0 to 1"),
    "dropout": ({"attention_dropout": 2.0}, "attention_dropout must be a number from 0 to 1, not 2"),
    "switch": ({"use_cache": "yes"}, "use_cache"),
    "type": ({"model_type": None}, "names no model_type"),
    "type that is none": ({"model_type": "lama"}, r"does not know model_type lama; did you mean llama\?"),
    "format": ({"quantization_config": 5}, "quantization_config must be an object, not 5"),
    "experts": (
        {**TINY["mixtral"], "num_experts_per_tok": 7}, "num_experts_per_tok 7 is more than num_local_experts 6",
    ),
    "activation of a traced model": ({**TINY["mixtral"], "hidden_act": "sillu"}, 'hidden_act "sillu" is unknown'),
    "padding of a traced model": ({**TINY["mixtral"], "pad_token_id": 200}, "pad_token_id 200 is beyond"),
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "HOME": str(tmp_path_factory.mktemp("home"))}


def planned(*settings: str, environment: dict[str, str]) -> PlanInputs:
    return read_inputs(
        None, settings, hardware_spec="1xCPU", only_plans=True, assumes_data=True, environment=environment
    )


def inputs(folder: Path, environment: dict[str, str]) -> PlanInputs:
    return planned(f"model.name={json.dumps(str(folder))}", environment=environment)


def notes(folder: Path, environment: dict[str, str]) -> str:
    read = inputs(folder, environment)
    return "\n".join(plan_inputs(read, profile_data(read), environment=environment).notes)


def write_config(folder: Path, content: str | bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize("kind", REFUSED)
def test_a_value_that_no_model_is_built_from_is_refused_with_its_file_and_key(kind, home, tmp_path):
    changed, fact = REFUSED[kind]
    folder = write_config(tmp_path / "model", json.dumps({**LLAMA, **changed}))
    with pytest.raises(InputError, match=fact) as caught:
        planned(f"model.config={json.dumps(str(folder))}", "model.tokenizer=train", environment=home)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"{folder / 'config.json'}: ") and len(lines) <= 3


@pytest.mark.parametrize("model_type", TYPES)
def test_what_counts_as_known_is_built_and_has_finite_logits(model_type):
    base = TINY[model_type]
    names = {
        *base, "rope_theta", "rope_parameters", "layer_types", "attention_dropout", "hidden_act", "use_cache",
        "rotary_pct",
    }  # fmt: skip
    counted = 0
    for name in sorted(names - {"model_type"}):
        for value in ODD_VALUES:
            config = {**base, name: value}
            try:
                refuse_values(config, origin="config.json")
                shape = read_model_shape(config)
            except InputError:
                continue
            if shape.vocab_size * shape.hidden_size < 10**7 and is_known_to_build(config, shape):
                counted += 1
                assert has_finite_logits(config), (name, value)
    assert counted > len(names) / 2 and model_type in admitted_types()


def has_finite_logits(config: dict[str, Any]) -> bool:
    if max(value for value in config.values() if type(value) is int) > 10**5:  # too large to run, and no odd value
        return True
    torch.manual_seed(0)
    model = model_from_config(config, dtype=torch.float32, attention=Attention.EAGER)
    length = min(8, config.get("max_position_embeddings") or config.get("n_positions") or 8)
    return bool(torch.isfinite(model(input_ids=torch.zeros(1, length, dtype=torch.long)).logits).all())


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (json.dumps(LLAMA).encode("utf-8-sig"), "not JSON: .*BOM.*save it as UTF-8"),
        (json.dumps(LLAMA).encode("utf-16"), "not JSON in UTF-8: .*save it as UTF-8"),
        (json.dumps(LLAMA)[:-9], "not JSON"),
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        (f'{{"hidden_size": 32, {json.dumps(LLAMA)[1:]}', "hidden_size twice, with different values"),
    ],
    ids=["byte order mark", "utf-16", "truncated", "empty", "list", "a key twice"],
)  # fmt: skip
def test_a_config_that_transformers_cannot_read_is_refused(content, fact, home, tmp_path):
    folder = write_config(tmp_path / "model", content)
    with pytest.raises(InputError, match=rf"config\.json: is {fact}|config\.json: .*{fact}"):
        planned(f"model.config={json.dumps(str(folder))}", "model.tokenizer=train", environment=home)


@pytest.mark.parametrize(
    "name",
    ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "model.safetensors.index.json"],
)
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xef\xbb\xbf{}"], ids=["truncated", "list", "byte order mark"])
def test_a_damaged_file_of_a_model_is_named(name, content, home, tmp_path):
    folder = write_base(tmp_path / "base")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    (folder / name).write_bytes(content)
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=rf"^{folder / name}: "):
        inputs(folder, home)


@pytest.mark.parametrize("settings", [{"quant_method": "fp8"}, {"quant_method": "mxfp4"}, {"quant_method": "mxfp8"}])
def test_a_format_that_the_weights_do_not_have_is_refused(settings, home, tmp_path):
    folder = write_base(tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(InputError, match=r"config\.json: quantization_config .* all of them in F32; remove"):
        inputs(folder, home)


def test_a_plan_names_a_tokenizer_that_training_will_need(home, tmp_path):
    folder = write_base(tmp_path / "base")
    assert "base brings no tokenizer; training needs one" in notes(folder, home)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    assert "tokenizer" not in notes(folder, home)
