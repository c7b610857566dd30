"""`shardwise init` writes a job that reads, whatever the model and the data are called."""

import json
from pathlib import Path
from typing import Any

import pytest
from workplace_factory import TINY_CONFIG

from shardwise.launch.commands.housekeeping import DataFacts, ModelFacts, job_template, look_at_data, look_at_model
from shardwise.launch.inputs.model_files import preset_names, read_preset
from shardwise.launch.job.yaml_text import read_yaml
from shardwise.trainer.spec.job.reading import read_job
from shardwise.trainer.spec.job.sections import DataFormat, Job
from shardwise.trainer.spec.model.readers import config_positions

UNREAD = DataFacts()


def job_for(model: str, data: DataFacts = UNREAD, **facts: Any) -> Job:
    known = ModelFacts(**facts) if facts else look_at_model(model)
    return read(job_template(model=model, data="text", model_facts=known, data_facts=data))


def read(text: str) -> Job:
    tree = read_yaml(text, origin="job.yaml")
    assert isinstance(tree, dict)
    return read_job(tree, origin="job.yaml")


@pytest.mark.parametrize("preset", preset_names())
def test_a_template_of_a_preset_is_a_job_within_its_positions(preset):
    job = job_for(preset)
    assert job.train.seq_len <= (config_positions(read_preset(preset)) or 0)
    has_no_weights = preset == "tiny-llama"
    assert (job.model.config, job.model.name) == ((preset, None) if has_no_weights else (None, preset))
    assert job.model.tokenizer == ("train" if has_no_weights else None)


@pytest.mark.parametrize(
    ("facts", "data", "settings"),
    [
        ({"max_positions": 1024}, DataFacts(), {"seq_len": 1024}),
        ({"vocab_size": 32000}, DataFacts(DataFormat.CHAT, 10**6, 5000, 20_000), {"seq_len": 8192}),
        ({"max_positions": 4096}, DataFacts(DataFormat.CHAT, 10**6, 5000, 20_000), {"seq_len": 4096}),
        ({"vocab_size": 32000}, DataFacts(None, 40_000), {"seq_len": 128, "eval": 0.1}),
        ({"has_chat_template": True}, DataFacts(DataFormat.CHAT, 50_000, 400, 200), {"eval": 0.1}),
        ({"has_chat_template": False}, DataFacts(DataFormat.CHAT, 10**6, 5000, 200), {"chat_template": "plain"}),
        (
            {"has_chat_template": False, "starts_from_scratch": True},
            DataFacts(DataFormat.PREFERENCE, 10**6, 5000, 200),
            {"chat_template": "chatml"},
        ),
    ],
)
def test_a_job_follows_the_limits_of_the_model_and_the_shape_of_the_data(facts, data, settings):
    job = job_for("org/model", data, **facts)
    made = {"seq_len": job.train.seq_len, "eval": job.data.eval_share, "chat_template": job.data.chat_template}
    usual = {"seq_len": 2048, "eval": 0.01, "chat_template": None}
    assert made == usual | settings


def test_a_model_and_data_on_disk_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 3)
    model, data = look_at_model(str(tmp_path)), look_at_data(str(tmp_path / "chats.jsonl"))
    assert model == ModelFacts(True, 128, 320, has_chat_template=False)
    assert (data.shape, data.num_rows, data.longest_bytes) == (DataFormat.CHAT, 3, 50)
    assert job_for(str(tmp_path)).model.tokenizer == "train"
    (tmp_path / "vocab.txt").touch()
    assert job_for(str(tmp_path)).model.tokenizer == job_for(str(tmp_path)).model.config == str(tmp_path)
    for text in ("{}", '{"chat_template": "{{ messages }}"}'):
        (tmp_path / "tokenizer_config.json").write_text(text)
        assert look_at_model(str(tmp_path)).has_chat_template is (text != "{}")
    assert "absent.jsonl" in look_at_data(str(tmp_path / "absent.jsonl")).problem[0]
    assert look_at_model(str(tmp_path / "absent")).problem


def test_a_folder_whose_weights_cannot_be_read_is_no_model_to_start_from_scratch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    for name, fact in (("consolidated.safetensors", "not read"), ("pytorch_model.bin", "shardwise import")):
        (tmp_path / name).touch()
        found = look_at_model(str(tmp_path))
        assert not found.starts_from_scratch and fact in found.problem[0]
