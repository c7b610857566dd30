"""Weights of a folder: the text part of a checkpoint with vision, and no weight that starts at random unseen."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from rank_factory import rank_plan
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from shardwise.launch.inputs.model_files import read_model_config
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import Job, ModelJob
from shardwise.trainer.spec.model.readers import read_model_shape, text_part
from shardwise.trainer.spec.plan import Plan

_TEXT = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": 96, "sliding_window": 16,
}  # fmt: skip


_VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def plan_of_folder(folder: Path) -> Plan:
    """A rank's plan that starts from the weights in a folder."""
    files = read_model_config(Job(model=ModelJob(name=str(folder), tokenizer="train")))
    plan = rank_plan(Path("nowhere"))
    return replace(plan, model_path=files.model_path, model_config=dict(text_part(files.config)))


@pytest.fixture(name="with_vision", scope="module")
def _with_vision(tmp_path_factory) -> tuple[Path, Gemma3ForConditionalGeneration]:
    folder = tmp_path_factory.mktemp("gemma3")
    config = Gemma3Config(
        text_config=_TEXT, vision_config=_VISION, image_token_index=199, boi_token_index=198, eoi_token_index=197,
        mm_tokens_per_image=4,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config)
    model.save_pretrained(folder)
    return folder, model


def test_of_a_checkpoint_with_vision_the_text_part_is_trained(with_vision):
    folder, saved = with_vision
    plan = plan_of_folder(folder)
    model = build_model(plan)
    weights = dict(model.named_parameters())
    expected = dict(saved.model.language_model.named_parameters())
    assert type(model).__name__ == "Gemma3ForCausalLM"
    assert weights.keys() == {f"model.{name}" for name in expected}
    assert all(torch.equal(weights[f"model.{name}"], weight) for name, weight in expected.items())
    assert sum(weight.numel() for weight in weights.values()) == read_model_shape(plan.model_config).num_parameters


def tiny_llama(folder: Path, *, is_tied: bool) -> Path:
    fields = {name: value for name, value in _TEXT.items() if name not in ("head_dim", "sliding_window")}
    config = AutoConfig.for_model("llama", **fields, tie_word_embeddings=is_tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_a_weight_that_is_missing_is_refused_rather_than_drawn(tmp_path):
    folder = tiny_llama(tmp_path, is_tied=False)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        InputError, match=r"lack 1 tensors of LlamaForCausalLM, the first model\.layers\.1\.mlp\.up_proj"
    ):
        build_model(plan_of_folder(folder))


def test_a_model_whose_loss_is_another_is_not_trained():
    plan = rank_plan(Path("nowhere"))
    shape = replace(plan.model_shape, model_type="granite", loss_obstacle="its logits are divided")
    with pytest.raises(InputError, match=r"^granite cannot be trained: its logits are divided$"):
        build_model(replace(plan, model_shape=shape))
