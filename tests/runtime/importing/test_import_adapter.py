"""An adapter is merged into its base as PEFT merges it; one that would not be is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from export_factory import TINY_GPT2, write_base
from import_factory import IDS, assert_refused, imported, logits
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shardwise.trainer.runtime.export.check import logits_of

pytestmark = [  # PEFT's
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers. to .True.:UserWarning"),
]

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ["q_proj", "down_proj", "lm_head"]},
    "rslora": {"target_modules": ["q_proj", "up_proj"], "use_rslora": True},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "patterns": {
        "target_modules": ["q_proj", "k_proj"], "rank_pattern": {"layers.1.self_attn.q_proj": 7},
        "alpha_pattern": {r"layers\.0.*k_proj": 3},
    },
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "transposed": {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
}  # fmt: skip


def adapter_of(base: Path, folder: Path, **settings) -> Path:
    """A saved adapter whose every part has moved away from where it began."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=9, task_type="CAUSAL_LM", **settings)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) * 0.05
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_merged_as_peft_merges_it(name, base, tmp_path):
    from peft import PeftModel

    base = write_base(tmp_path / "base", TINY_GPT2) if name == "transposed" else base
    adapter = adapter_of(base, tmp_path / "adapter", **ADAPTERS[name])
    done = imported(adapter, tmp_path / "out", base=str(base))
    assert all(name in done.source for name in ("adapter_model.safetensors", "base"))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    expected = logits_of(model.eval(), IDS)
    torch.testing.assert_close(logits(tmp_path / "out"), expected, rtol=0, atol=2e-6)
    assert not torch.allclose(expected, logits(base), atol=1e-2)


def test_an_adapter_without_its_base_names_it(base, tmp_path):
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"])
    assert_refused(adapter, tmp_path / "out", rf"{base}\b(?s:.*)--base")


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"peft_type": "IA3"}, "IA3.*LoRA and DoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"lora_alpha": None}, r"lora_alpha .*model\.layers\.0\."),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"fan_in_fan_out": True}, r"model\.layers\.0\.mlp\.up_proj \(64, 128\).* \(128, 64\)"),
    ],
)
def test_an_adapter_that_is_not_merged_right_is_refused(changes, fact, base, tmp_path):
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj", "up_proj"])
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | changes))
    assert_refused(adapter, tmp_path / "out", fact, base=str(base))


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("base_model.model.model.layers.7.mlp.up_proj.lora_A.weight", r"model\.layers\.7\.mlp\.up_proj"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", r"A or B of model\.layers\.0\.mlp\.up_proj"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_B.bias", r"up_proj\.lora_B\.bias"),
        ("lm_head.weight", r"lm_head\.weight"),
        ("base_model.model.score.weight", r"score\.weight \(3, 3\)"),
    ],
)
def test_a_part_of_an_adapter_without_a_place_is_refused(name, fact, base, tmp_path):
    adapter = adapter_of(base, tmp_path / "adapter", target_modules=["q_proj"])
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({**tensors, name: torch.ones(3, 3)}, adapter / "adapter_model.safetensors")
    assert_refused(adapter, tmp_path / "out", fact, base=str(base))
