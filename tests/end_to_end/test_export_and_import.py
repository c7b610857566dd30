"""`shardwise export` and `import` as they are typed: what transformers loads, and what training starts from."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from export_factory import run_of, save_run, write_base
from hub_server import Hub, login, serving
from import_factory import saved_by_torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typed_command import typed
from workplace_factory import LIMIT_S, SENTENCES, TINY_CONFIG, Workplace, read_metrics

from shardwise.launch.inputs.model_files import find_config
from shardwise.trainer.runtime.data.tokenizer import train_tokenizer, write_trained_tokenizer
from shardwise.trainer.spec.strategy import Method

TOKEN = "hf_secretsecretsecret"  # of the server in this file


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("private folder")
    write_trained_tokenizer(train_tokenizer(iter(["a lazy dog"]), vocab_size=256 + 1), root / "tokenizer")
    base = write_base(root / "base", {**run_of(None, Method.LORA).model_config, "vocab_size": 260})
    plan = run_of(
        base, Method.LORA, config=json.loads((base / "config.json").read_text()), tokenizer=root / "tokenizer"
    )
    return save_run(root / "run", plan)


def export(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return subprocess.run(
        [sys.executable, "-P", "-m", "shardwise.launch.cli", "export", *map(str, words)],
        capture_output=True, text=True, check=False, timeout=LIMIT_S, env=clean | environment,
    )  # fmt: skip


def test_merged_weights_and_the_tokenizer_load_in_plain_transformers(run_dir, tmp_path):
    done = export(run_dir, tmp_path / "out", "--merge", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"export": str(tmp_path / "out")}
    assert "step-00000004" in done.stderr
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a lazy dog")["input_ids"]


def test_adapters_go_to_the_hub_without_a_path_of_this_machine(run_dir, tmp_path):
    with serving(Hub(logins={TOKEN: login()})) as hub:
        done = export(
            run_dir, tmp_path / "out", "--push", "ann/cats",
            HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN, HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_XET="1",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{hub.url}/ann/cats" in done.stdout
    files = hub.files["ann/cats"]
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "base"
    assert not any(b"private folder" in content or TOKEN.encode() in content for content in files.values())
    assert yaml.safe_load(files["README.md"].split(b"---\n")[1])["library_name"] == "peft"


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (("--push", "ann/cats"), "hf auth login", 4),
        (("--public",), "--push", 2),
        (("--dtype", "int8"), "int8", 2),
        (("--checkpoint", "step-9"), "step-4", 2),
        ((), "out", 2),  # a folder that holds something
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_built(
    words, message, code, run_dir, tmp_path, monkeypatch, capsys
):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no token"))
    out = tmp_path / "out"
    if not words:
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    refused = typed(capsys, "export", str(run_dir), str(out), *words)
    assert (refused.code, message in refused.err) == (code, True), refused.err
    assert [path.name for path in tmp_path.rglob("*")] == ([] if words else ["out", "notes.txt"])


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
        (("nowhere", "out"), "nowhere:"), (("their checkpoint/pytorch_model.bin", "out"), "pytorch_model.bin"),
        (("their checkpoint", "base"), "base:"),
        (("their checkpoint", "out", "--config", "nothing"), "--config: nothing"),
        (("their checkpoint", "out", "--base", "model"), "model.safetensors"),
        (("their checkpoint", "out", "--base", "base", "--config", "model"), "--config"),
        (("their checkpoint", "out", "--kind", "keras"), "keras"),
        (("their checkpoint", "out", "--dtype", "int8"), "int8"),
    ],
)  # fmt: skip
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
