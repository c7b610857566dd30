"""`shardwise import` from the command line, and training from what it wrote."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from import_factory import saved_by_torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from typed_command import typed
from workplace_factory import SENTENCES, TINY_CONFIG, Workplace, read_metrics

from shardwise.launch.inputs.model_files import find_config
from shardwise.trainer.runtime.data.tokenizer import train_tokenizer, write_trained_tokenizer


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of another trainer: pickled weights under DDP's names, its optimizer, a tokenizer, no config."""
    root = tmp_path_factory.mktemp("theirs")
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_CONFIG)).save_pretrained(root / "base")
    folder = saved_by_torch(
        root / "base",
        root / "their checkpoint",
        lambda weights: {f"module.{name}": each for name, each in weights.items()},
    )
    (folder / "config.json").unlink()
    write_trained_tokenizer(train_tokenizer(iter(SENTENCES), vocab_size=300), root / "tokenizer")
    shutil.copytree(root / "tokenizer", folder, dirs_exist_ok=True)
    (folder / "optimizer.pt").write_bytes(b"a pickle of theirs")
    return root


@pytest.fixture
def checkpoint(theirs: Path, workplace: Workplace) -> Path:
    """The same in the workplace, beside a base and a tokenizer."""
    shutil.copytree(theirs, workplace.folder, dirs_exist_ok=True)
    return workplace.folder / "their checkpoint"


def test_training_starts_from_an_imported_checkpoint(checkpoint, workplace):
    done = workplace.run("import", checkpoint.name, "imported", "--config", "model")
    for fact in ("pytorch_model.bin", "20 tensors, 113 KiB", "F32", "optimizer.pt", "model.name: imported"):
        assert fact in done.stdout
    workplace.write_job(model={"name": "imported", "config": None, "tokenizer": None}, train={"steps": 2})
    workplace.run("train", "job.yaml")
    run_dir = workplace.only_run()
    assert sorted(read_metrics(run_dir)) == [1, 2]
    assert json.loads((run_dir / "plan.json").read_text())["model_path"] == str(workplace.folder / "imported")
    began, ended = (
        load_file(folder / "model.safetensors") for folder in (workplace.folder / "base", run_dir / "export")
    )
    moved = max(float((ended[name] - each).abs().max()) for name, each in began.items())
    assert 0 < moved < 0.02, "two steps of 3e-3 away from the weights that were imported"


def test_a_config_with_fewer_rows_than_its_tokenizer_has_tokens_is_taken(theirs, tmp_path):
    """As Gemma 3's: the model that was trained from it has as many."""
    folder = Path(shutil.copytree(theirs / "tokenizer", tmp_path / "model"))
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG | {"vocab_size": 256}))
    found = find_config(str(folder))
    assert (found.config["vocab_size"], found.tokenizer_path) == (256, str(folder))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere", "out"), "nowhere:"),
        (("their checkpoint/pytorch_model.bin", "out"), "pytorch_model.bin"),
        (("their checkpoint", "base"), "base:"),
        (("their checkpoint", "out", "--config", "nothing"), "--config: nothing"),
        (("their checkpoint", "out", "--config", "gpt2"), "GPT2LMHeadModel"),
        (("their checkpoint", "out", "--base", "model"), "model.safetensors"),
        (("their checkpoint", "out", "--base", "base", "--config", "model"), "--config"),
        (("their checkpoint", "out", "--kind", "keras"), "keras"),
        (("their checkpoint", "out", "--dtype", "int8"), "int8"),
    ],
)
def test_what_cannot_be_imported_is_error_2_in_at_most_three_lines(
    words, message, checkpoint, workplace, monkeypatch, capsys
):
    monkeypatch.chdir(workplace.folder)
    before = sorted(workplace.folder.iterdir())
    refused = typed(capsys, "import", *words)
    assert (refused.code, message in refused.err) == (2, True), refused.err
    assert len(refused.err.splitlines()) <= 3 and refused.out == ""
    assert sorted(workplace.folder.iterdir()) == before


def test_as_json_only_the_answer_is_on_stdout(checkpoint, workplace):
    done = workplace.run("import", checkpoint.name, "out", "--config", "model", "--dtype", "bf16", "--json")
    told = json.loads(done.stdout)
    (note,) = told.pop("notes")
    assert told == {"import": "out", "kind": "huggingface"} and "optimizer.pt" in note
    assert "56.3 KiB" in done.stderr and "BF16" in done.stderr
