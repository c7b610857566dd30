"""Libraries that saving a model loads, and the state after it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from optimizer_factory import tiny_llama
from safetensors.torch import load_file
from zoo import model_of

from shardwise.trainer.runtime.export.folder import save_model, staged
from shardwise.trainer.spec.errors import EnvironmentFaultError

MODEL = """
import sys
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
"""
LOADED = "print('loaded:', 'deepspeed' in sys.modules)"
OURS = "from shardwise.trainer.runtime.export.folder import save_model; save_model(model, Path(sys.argv[1]))"


@pytest.mark.parametrize(
    ("saving", "loads"), [("model.save_pretrained(sys.argv[1])", True), (OURS, False)], ids=["transformers", "ours"]
)
def test_w58_transformers_loads_deepspeed_to_save_a_model_and_we_do_not(saving, loads, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", f"{MODEL}{saving}\n{LOADED}", str(tmp_path / "out")],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == f"loaded: {loads}"


def test_the_files_are_those_of_transformers(tmp_path):
    model = tiny_llama()
    save_model(model, tmp_path / "ours")
    model.config.use_cache = True
    model.save_pretrained(tmp_path / "theirs")
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {p.name for p in (tmp_path / "theirs").iterdir()}
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3"])
def test_experts_have_the_names_and_shapes_under_which_transformers_publishes_them(model_type, tmp_path):
    model = model_of(model_type)
    save_model(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("ours", "theirs"))
    assert {name: each.shape for name, each in ours.items()} == {name: each.shape for name, each in theirs.items()}
    assert any(".experts." in name for name in ours) and not any(
        ".experts.gate_up_proj.weight" in name for name in ours
    )


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_exported_files_have_the_modes_of_the_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        with staged(tmp_path / "export") as folder:
            save_model(tiny_llama(), folder)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "export").iterdir()} == {0o666 & ~umask}


def test_an_export_that_fails_leaves_the_older_one_as_it_was(tmp_path):
    older = tmp_path / "export"
    older.mkdir()
    (older / "config.json").write_text("older")
    with pytest.raises(EnvironmentFaultError, match="cannot be written"), staged(older) as folder:
        (folder / "config.json").write_text("newer")
        raise OSError("the disk is full")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert (older / "config.json").read_text() == "older"


@pytest.mark.parametrize("name", ["export", ".export.partial"])
@pytest.mark.parametrize("is_there", [True, False])
def test_an_export_is_never_written_behind_a_link(name, is_there, tmp_path):
    theirs = tmp_path / "theirs"
    if is_there:
        theirs.mkdir()
        (theirs / "precious").write_text("precious")
    (tmp_path / name).symlink_to(theirs)
    with pytest.raises(EnvironmentFaultError, match="cannot be written"), staged(tmp_path / "export") as folder:
        (folder / "config.json").write_text("{}")
    assert [path.read_text() for path in theirs.glob("*")] == ["precious"] * is_there
