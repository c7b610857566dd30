"""`shardwise import` from the command line, and training from what it wrote."""

import json
from pathlib import Path

import pytest
import torch
from import_factory import saved_by_torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from workplace_factory import SENTENCES, TINY_CONFIG, Workplace, read_metrics

from launch.model_files import find_config
from trainer.runtime.tokenizer import train_tokenizer, write_trained_tokenizer


@pytest.fixture
def checkpoint(workplace: Workplace) -> Path:
    """What another trainer left: pickled weights under DDP's names, its optimizer, a tokenizer, no config."""
    torch.manual_seed(2)
    base = workplace.folder / "base"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_CONFIG)).save_pretrained(base)

    def under_ddp(weights):
        return {f"module.{name}": each for name, each in weights.items()}

    folder = workplace.folder / "their checkpoint"
    write_trained_tokenizer(train_tokenizer(iter(SENTENCES), vocab_size=300), workplace.folder / "tokenizer")
    saved_by_torch(base, folder, under_ddp)
    for path in (workplace.folder / "tokenizer").iterdir():
        path.rename(folder / path.name)
    (folder / "config.json").unlink()
    (folder / "optimizer.pt").write_bytes(b"a pickle of theirs")
    return folder


def test_training_starts_from_an_imported_checkpoint(checkpoint, workplace):
    done = workplace.run("import", checkpoint.name, "imported", "--config", "model")
    assert done.stdout.splitlines() == [
        "their checkpoint: a Hugging Face model folder: pytorch_model.bin",
        "20 tensors, 113 KiB, most of them F32; all there, all finite",
        "not read, as weights only are imported: optimizer.pt",
        "wrote imported; train from it with model.name: imported",
    ]
    workplace.write_job(model={"name": "imported", "config": None, "tokenizer": None}, train={"steps": 2})
    workplace.run("train", "job.yaml")
    losses = read_metrics(workplace.only_run())
    assert sorted(losses) == [1, 2]
    plan = json.loads((workplace.only_run() / "plan.json").read_text())
    assert plan["model_path"] == str(workplace.folder / "imported")
    began, ended = (
        load_file(workplace.folder / "base" / "model.safetensors"),
        load_file(workplace.only_run() / "export" / "model.safetensors"),
    )
    moved = max(float((ended[name] - each).abs().max()) for name, each in began.items())
    assert 0 < moved < 0.02, "two steps of 3e-3 away from the weights that were imported"


def test_a_config_with_fewer_rows_than_its_tokenizer_has_tokens_is_taken(checkpoint, workplace):
    """As Gemma 3's: the model that was trained from it has as many."""
    folder = workplace.folder / "model"
    write_trained_tokenizer(train_tokenizer(iter(SENTENCES), vocab_size=300), workplace.folder / "tokenizer2")
    for path in (workplace.folder / "tokenizer2").iterdir():
        path.rename(folder / path.name)
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG | {"vocab_size": 256}))
    found = find_config(str(folder))
    assert (found.config["vocab_size"], found.tokenizer_path) == (256, str(folder))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere", "out"), "nowhere: is not there; name the folder of the checkpoint"),
        (("their checkpoint/pytorch_model.bin", "out"), "is a file; name the folder of the checkpoint"),
        (("their checkpoint", "base"), "base: exists already; name a folder that does not"),
        (("their checkpoint", "out", "--config", "nothing"), "--config: nothing is no folder here, no hub id"),
        (("their checkpoint", "out", "--config", "gpt2"), "is not of the GPT2LMHeadModel that preset gpt2 describes"),
        (("their checkpoint", "out", "--base", "model"), "model: holds no model.safetensors"),
        (("their checkpoint", "out", "--base", "base", "--config", "model"), "--config: the merged model has"),
        (("their checkpoint", "out", "--kind", "keras"), "invalid choice: 'keras'"),
        (("their checkpoint", "out", "--dtype", "int8"), "invalid choice: 'int8'"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_error_2_in_at_most_three_lines(words, message, checkpoint, workplace):
    before = sorted(workplace.folder.iterdir())
    refused = workplace.run("import", *words, check=False)
    assert (refused.returncode, message in refused.stderr) == (2, True), refused.stderr
    assert len(refused.stderr.splitlines()) <= 3 and refused.stdout == ""
    assert sorted(workplace.folder.iterdir()) == before


def test_as_json_only_the_answer_is_on_stdout(checkpoint, workplace):
    done = workplace.run("import", checkpoint.name, "out", "--config", "model", "--dtype", "bf16", "--json")
    assert json.loads(done.stdout) == {
        "import": "out", "kind": "huggingface", "notes": ["not read, as weights only are imported: optimizer.pt"],
    }  # fmt: skip
    assert "20 tensors, 56.3 KiB, most of them BF16" in done.stderr
