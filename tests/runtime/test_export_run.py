"""The exported folder, used as its user will use it: the same weights and the same ids, beside every config.json."""

import json
import re
from pathlib import Path

import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from prepare_request_factory import numbered_text
from rank_factory import rank_plan
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.runtime.export_run import write_model_folder
from trainer.runtime.model import build_model
from trainer.runtime.tokenizer import load_tokenizer, train_tokenizer, write_trained_tokenizer

MODEL_TYPES = ("llama", "mistral", "qwen3")
SAMPLES = [
    "row 70 of 50",
    "don't\n\n  \tgo\r\n",
    "caf\u00e9 or cafe\u0301 \u65e5\u672c \U0001f600",
    "",
    " a",
    "<|endoftext|>b",
]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "tokenizer"
    text = numbered_text(200, word="caf\u00e9  don't\n\n")
    write_trained_tokenizer(train_tokenizer(iter([text]), vocab_size=400), folder)
    return folder


def build(model_type: str):
    """A model whose vocabulary holds the tokenizer's."""
    return build_model(
        rank_plan(Path("nowhere"), model_config={**TINY_LLAMA, "model_type": model_type, "vocab_size": 400})
    )


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_exported_tokenizer_gives_the_ids_that_were_trained_with(model_type, tokenizer_folder, tmp_path):
    incident = write_model_folder(build(model_type), tmp_path / "out", tokenizer_path=str(tokenizer_folder))
    assert incident is None
    exported, trained_with = AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(tokenizer_folder)
    assert exported(SAMPLES)["input_ids"] == trained_with.encode(SAMPLES)
    assert (exported.eos_token_id, exported.pad_token_id) == (trained_with.eos_id, trained_with.pad_id)
    assert len(exported) == trained_with.vocab_size


def test_a_model_type_whose_tokenizers_transformers_cuts_by_its_own_rules_is_an_incident(tokenizer_folder, tmp_path):
    incident = write_model_folder(build("qwen2"), tmp_path / "out", tokenizer_path=str(tokenizer_folder))
    assert incident is not None and "Qwen2Tokenizer gives" in incident
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert "trust_remote_code" not in settings
    names = ("tokenizer.json", "special_tokens_map.json")
    assert all((tmp_path / "out" / name).read_bytes() == (tokenizer_folder / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra_special_tokens": ["lazy"]}, r"token \d+: \[\d.*\] was trained with, TokenizersBackend gives \[400, "),
        ({"extra_special_tokens": ["\u00e9"]}, r"'na\u00efve caf\u00e9"),
        ({"added_tokens_decoder": {"0": "nonsense"}}, "transformers cannot load it: "),
    ],
)
def test_a_tokenizer_that_gives_other_ids_is_an_incident(changes, words, tokenizer_folder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for path in tokenizer_folder.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | changes))
    incident = write_model_folder(build("llama"), tmp_path / "out", tokenizer_path=str(source))
    assert incident is not None and "\n" not in incident
    start = "the exported tokenizer does not give the same ids as the one trained with: "
    assert incident.startswith(start)
    assert re.search(words, incident)


def test_a_model_without_a_tokenizer_is_exported_alone(tmp_path):
    assert write_model_folder(build("llama"), tmp_path / "out", tokenizer_path=None) is None
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip


def test_an_export_replaces_an_older_one_and_leaves_nothing_beside_it(tokenizer_folder, tmp_path):
    model = build("qwen2")
    write_model_folder(model, tmp_path / "out", tokenizer_path=str(tokenizer_folder))
    with torch.no_grad():
        model.lm_head.weight.fill_(0.5)
    write_model_folder(model, tmp_path / "out", tokenizer_path=None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert float(loaded.lm_head.weight.detach().min()) == 0.5
    assert loaded.config.use_cache is True and model.config.use_cache is False
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
