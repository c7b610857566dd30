"""Folders and targets that a rank would refuse at its first step are refused before a plan, in the same words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_factory import write_base
from msgspec.structs import replace
from rank_factory import rank_plan
from safetensors.torch import load_file, save_file
from stored_models import as_fp8

from shardwise.launch.plan.gather import PlanInputs, read_inputs
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.strategy import Method, Quant


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "HOME": str(tmp_path_factory.mktemp("home"))}


def inputs(folder: Path, environment: dict[str, str], *settings: str) -> PlanInputs:
    return planned(f"model.name={json.dumps(str(folder))}", *settings, environment=environment)


def planned(*settings: str, environment: dict[str, str]) -> PlanInputs:
    return read_inputs(
        None, settings, hardware_spec="1xCPU", only_plans=True, assumes_data=True, environment=environment
    )


Tensors = dict[str, torch.Tensor]


def rewritten(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {each: tensor for each, tensor in tensors.items() if each != name}


def wrapped(tensors: Tensors) -> Tensors:
    return {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}


def narrowed(tensors: Tensors) -> Tensors:
    return {**tensors, "model.layers.1.mlp.up_proj.weight": tensors["model.layers.1.mlp.up_proj.weight"][:-1]}


def of_whole_numbers(tensors: Tensors) -> Tensors:
    return {**tensors, "model.layers.1.mlp.up_proj.weight": tensors["model.layers.1.mlp.up_proj.weight"].to(torch.int8)}


def with_more(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: torch.ones(64)}


def of_another_vocabulary(tensors: Tensors) -> Tensors:
    return {**tensors, "model.embed_tokens.weight": tensors["model.embed_tokens.weight"][:-1]}


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (without("lm_head.weight"), r"lack 1 tensors .* lm_head\.weight; .* write tie_word_embeddings true"),
        (without("model.layers.1.mlp.up_proj.weight"), r"lack 1 tensors of Llama.* model\.layers\.1\.mlp\.up_proj"),
        (wrapped, r"has a wrapper's name:\nshardwise import .*base .*base-plain$"),
        (narrowed, r"up_proj\.weight has shape .* different models"),
        (of_whole_numbers, r"up_proj\.weight is stored in int8 and no scales"),
        (with_more("model.layers.0.self_attn.q_proj.bias"), r"q_proj\.bias has no place .*attention_bias"),
        (with_more("model.layers.1.self_attn.q_norm.weight"), r"q_norm\.weight has no place"),
        (with_more("model.layers.2.input_layernorm.weight"), r"the block model\.layers\.2, .* has 2; .*num_hidden"),
        (of_another_vocabulary, r"embed_tokens\.weight has shape \(255, .* different models"),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_its_model_is_refused_as_at_the_first_step(change, fact, cache, tmp_path):
    folder = write_base(tmp_path / "base")
    whole = inputs(folder, cache)
    rewritten(folder, change)
    with pytest.raises(InputError, match=fact) as planned:
        inputs(folder, cache)
    plan = replace(rank_plan(tmp_path), model_path=str(folder), model_config=whole.model.config)
    with pytest.raises(InputError) as built:
        build_model(plan)
    assert str(built.value) == str(planned.value)


def test_a_head_as_a_target_and_one_that_is_no_layer_are_refused_and_what_passed_is_compared_once(cache, tmp_path):
    folder = write_base(tmp_path / "base")
    for target, fact in (("lm_head", "is the head, which has no adapter"), ("query", "no linear layer of that name")):
        with pytest.raises(InputError, match=f"lora.targets: {target}: .*{fact}"):
            inputs(folder, cache, "train.method=lora", f"train.lora.targets=[q_proj, {target}]")
    inputs(folder, cache, "train.method=full", "train.lora.targets=[lm_head]")
    inputs(folder, cache, "train.method=lora", "train.lora.targets=[layers.1.self_attn.q_proj]")
    stored = [*Path(cache["XDG_CACHE_HOME"]).rglob("checked/*")]
    inputs(folder, {**cache, "PATH": ""}, "train.method=lora", "train.lora.targets=[layers.1.self_attn.q_proj]")
    assert stored and [*Path(cache["XDG_CACHE_HOME"]).rglob("checked/*")] == stored


def mark(folder: Path, settings: dict[str, Any], **more: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings, **more}))


@pytest.mark.parametrize(
    ("settings", "method", "fact"),
    [
        ({"quant_method": "gptq"}, "full", r"quantised already \(gptq\); start from the 16-bit ones"),
        ({"quant_method": "modelopt"}, "lora", r"quantised already \(modelopt\)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "qlora", r"bitsandbytes 8 bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "lora", r"use train.method=qlora"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "full", r"use train.method=qlora"),
    ],
)  # fmt: skip
def test_a_base_that_no_method_can_start_from_is_refused_by_its_config(settings, method, fact, cache, tmp_path):
    folder = write_base(tmp_path / "base")
    mark(folder, settings)
    listed = "\n  - ORG/Original" if method == "full" else " ORG/Original"
    (folder / "README.md").write_text(f"---\nbase_model:{listed}\n---\n")
    with pytest.raises(InputError, match=f"{fact}.*model.name=ORG/Original"):
        inputs(folder, cache, f"train.method={method}")


def test_a_new_model_of_a_quantised_config_and_a_base_that_is_decoded_are_planned(cache, tmp_path):
    folder = write_base(tmp_path / "base")
    for kind in ("fp8", "gptq"):
        mark(folder, {"quant_method": kind})
        new = planned(f"model.config={folder}", "model.tokenizer=train", environment=cache)
        assert "quantization_config" not in new.model.config and new.model.weights is None
    as_fp8(folder)
    found = inputs(folder, cache)
    assert "quantization_config" not in found.model.config and "decoded while they are read" in str(found.model.note)


def test_adapters_are_the_method_of_a_base_in_4_bit_and_its_bytes_are_counted_as_they_are(cache, tmp_path):
    from stored_models import SIZES, as_bnb, save_new

    base = save_new(tmp_path / "base", {**SIZES, "model_type": "llama"})
    folder = as_bnb(base, tmp_path / "stored", doubly=False, skipped=("o_proj", "lm_head"))
    found = inputs(folder, cache)
    assert found.resolved.job.train.method is Method.QLORA
    num_packed = found.shape.linear_parameters - 2 * 64 * 64
    assert (found.shape.quant, found.shape.packed_linears) == (Quant.NF4, num_packed)
    mark(base, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert inputs(base, cache).shape.packed_linears is None, "of a base that has none in 4 bit all are quantised"
