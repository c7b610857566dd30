"""`shardwise export` from the command line, and what it wrote, as plain transformers loads it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from export_factory import run_of, save_run, write_base
from hub_server import Hub, login, serving
from transformers import AutoModelForCausalLM, AutoTokenizer
from typed_command import typed
from workplace_factory import LIMIT_S

from shardwise.trainer.runtime.checkpoint import find_checkpoint, import_weights
from shardwise.trainer.runtime.data.tokenizer import train_tokenizer, write_trained_tokenizer
from shardwise.trainer.runtime.export.check import SAME, logits_of, prompt_ids, relative_difference
from shardwise.trainer.runtime.export.run import plan_on, read_plan
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.spec.hardware import DeviceKind
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
    ids = prompt_ids(260)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    AutoTokenizer.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        found = plain(input_ids=ids).logits
    model = build_model(plan_on(read_plan(run_dir), DeviceKind.CPU))
    checkpoint = find_checkpoint(run_dir / "checkpoints", on_skip=pytest.fail)
    import_weights(model, checkpoint)
    assert relative_difference(logits_of(model, ids), found) < SAME
    assert torch.isfinite(found).all()


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
        (("--push", "cats"), "USER/NAME", 2),
        (("--format", "onnx"), "--merge", 2),
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
