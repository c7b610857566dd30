"""A folder's weights by the model's names: the values of `from_pretrained`, as a whole and by rows."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_factory import TINY
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from shardwise.trainer.runtime.models.meta_model import MetaModel, is_placeholder, meta_model_from_folder
from shardwise.trainer.runtime.models.weight_files import WeightReader
from shardwise.trainer.spec.errors import InputError

LLAMA = TINY["llama"]
# The weights of a folder are fp32; bf16 casts each as it is read. What fp32 differs in does not hang on the model type.
CASES = [
    pytest.param(name, dtype, marks=() if name in short else pytest.mark.long, id=f"{name}-{dtype}")
    for dtype, short in ((torch.bfloat16, TINY), (torch.float32, ("llama", "gpt2", "mixtral")))
    for name in TINY
]


def write_folder(folder: Path, config: dict[str, Any], *, max_shard_size: int = 2**16) -> PreTrainedModel:
    """New weights of a config in several files, with norms and biases that are not all ones and zeros."""
    torch.manual_seed(5)
    fields = {name: value for name, value in config.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn(weight.shape)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def reader_of(folder: Path, dtype: torch.dtype = torch.float32) -> WeightReader:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    types = {name: tensor.dtype for name, tensor in model.state_dict(keep_vars=True).items()}
    return WeightReader(model, str(folder), types=types)


def skeleton_of(folder: Path, dtype: torch.dtype = torch.float32) -> MetaModel:
    config = AutoConfig.from_pretrained(folder)
    return meta_model_from_folder(str(folder), config, dtype=dtype, attention="eager", key_mapping=None)


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    """Folders of the model types, each written when it is first asked for, and only read."""

    @cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp("model")
        write_folder(path, TINY[name])
        return path

    return folder


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_tensor_and_any_of_its_rows_are_those_that_from_pretrained_loads(name, dtype, folder_of):
    folder = folder_of(name)
    reader, tensors = reader_of(folder, dtype), loaded(folder, dtype).state_dict()
    assert tensors.keys() >= set(reader.names)
    for name in reader.names:
        assert torch.equal(reader.read(name).to(tensors[name].dtype), tensors[name])
        num_rows = tensors[name].shape[0]
        for start, stop in ((0, num_rows // 2), (num_rows // 2, num_rows), (1, 2)):
            assert torch.equal(reader.read_rows(name, start, stop).to(tensors[name].dtype), tensors[name][start:stop])


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_rows_of_stacked_experts_are_read_without_the_other_experts(model_type, folder_of, monkeypatch):
    reader = reader_of(folder_of(model_type))
    stacked = [name for name in reader.names if "experts." in name and reader.read(name).dim() == 3]
    read: list[int] = []
    stack = torch.stack

    def note(parts, dim):
        read.append(len(parts))
        return stack(parts, dim)

    monkeypatch.setattr(torch, "stack", note)
    assert len(stacked) == 2 * 3
    assert reader.read_rows(stacked[0], 2, 4).shape[0] == 2
    assert set(read) == {2}


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_skeleton_is_the_loaded_model_but_for_its_weights(name, dtype, folder_of):
    folder = folder_of(name)
    meta_model, model = skeleton_of(folder, dtype), loaded(folder, dtype)
    ours, theirs = dict(meta_model.model.named_parameters()), dict(model.named_parameters())
    assert [(n, p.shape, p.dtype) for n, p in ours.items()] == [(n, p.shape, p.dtype) for n, p in theirs.items()]
    assert all(is_placeholder(parameter) and parameter.untyped_storage().nbytes() <= 4 for parameter in ours.values())
    buffers = dict(model.named_buffers())
    assert {name: None for name, _ in meta_model.model.named_buffers()} == dict.fromkeys(buffers)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in meta_model.model.named_buffers())
    filled = {}
    meta_model.source.deliver(lambda name, values: filled.update({name: values.whole().clone()}))
    assert filled.keys() == meta_model.wanted.keys()
    for name, tensor in meta_model.wanted.items():
        assert torch.equal(filled[name].to(tensor.dtype), model.state_dict()[name])


def test_what_transformers_saves_beside_the_weights_is_kept(tmp_path):
    saved = write_folder(tmp_path, TINY["mixtral"])
    saved.generation_config.max_new_tokens = 77
    saved.generation_config.save_pretrained(tmp_path)
    meta_model, model = skeleton_of(tmp_path).model, loaded(tmp_path)
    assert meta_model.generation_config.max_new_tokens == 77
    assert meta_model.generation_config.to_dict() == model.generation_config.to_dict()
    assert meta_model.config.to_dict() == model.config.to_dict()
    assert [*map(str, vars(meta_model)["_weight_conversions"])] == [*map(str, vars(model)["_weight_conversions"])]


def test_weights_that_a_model_keeps_in_fp32_are_read_so(tmp_path, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["layernorm"])
    write_folder(tmp_path, LLAMA)
    model = loaded(tmp_path, torch.bfloat16)
    types = {
        name: parameter.dtype for name, parameter in skeleton_of(tmp_path, torch.bfloat16).model.named_parameters()
    }
    assert types == {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert set(types.values()) == {torch.float32, torch.bfloat16}


TIED = {**LLAMA, "tie_word_embeddings": True}


def spoil(folder: Path, change) -> None:
    """Rewrites the one file of a folder."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_head_that_is_in_the_file_and_is_the_embedding_is_tied(tmp_path):
    write_folder(tmp_path, TIED, max_shard_size=2**30)
    spoil(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    model = skeleton_of(tmp_path).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_head_that_is_in_the_file_and_is_another_is_not_tied(tmp_path):
    write_folder(tmp_path, TIED, max_shard_size=2**30)
    spoil(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    meta_model, model = skeleton_of(tmp_path), loaded(tmp_path)
    assert meta_model.model.get_output_embeddings().weight is not meta_model.model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    assert "lm_head.weight" in meta_model.wanted


def test_an_embedding_that_is_only_there_as_the_head_is_read_from_it(tmp_path):
    write_folder(tmp_path, TIED, max_shard_size=2**30)
    spoil(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    meta_model = skeleton_of(tmp_path)
    assert meta_model.wanted["lm_head.weight"] is meta_model.model.get_input_embeddings().weight
    assert "model.embed_tokens.weight" not in meta_model.wanted


def test_a_weight_that_is_missing_is_named(tmp_path):
    write_folder(tmp_path, LLAMA, max_shard_size=2**30)
    spoil(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj"):
        skeleton_of(tmp_path)


def test_a_weight_of_another_shape_is_named_with_both(tmp_path):
    write_folder(tmp_path, LLAMA, max_shard_size=2**30)
    spoil(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(InputError, match=r"model\.norm\.weight.*\(63,\).*\(64,\)"):
        skeleton_of(tmp_path)


def test_a_damaged_file_is_named(tmp_path):
    write_folder(tmp_path, LLAMA, max_shard_size=2**30)
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        skeleton_of(tmp_path)
