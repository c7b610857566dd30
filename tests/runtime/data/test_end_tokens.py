"""The ids that end an answer, from the base, the tokenizer and the chat template."""

import json
from pathlib import Path

import pytest
from export_factory import run_of, write_base
from msgspec.structs import replace

from shardwise.trainer.runtime.data.tokenizer import train_tokenizer, write_trained_tokenizer
from shardwise.trainer.runtime.export.folder import end_of_turn_id, end_token_ids, read_tokenizer, write_model_folder
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.spec.job.sections import ModelJob
from shardwise.trainer.spec.strategy import Method

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LOOP = "{% for message in messages %}"
TEMPLATES = {
    "chatml": (LOOP + "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}", "<|im_end|>"),
    "llama 3": (
        LOOP + "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{{ message.content | trim }}<|eot_id|>{% endfor %}",
        "<|eot_id|>",
    ),
    "mistral": (
        LOOP + "{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
        "{% else %} {{ message.content }} {{ eos_token }}{% endif %}{% endfor %}",
        "<|endoftext|>",
    ),
    "plain words": (LOOP + "{{ message.role }}: {{ message.content }}\n{% endfor %}", None),
    "refuses": ("{{ raise_exception('only tools here') }}", None),
    "unknown to the tokenizer": (LOOP + "{{ message.content }}<|end|>{% endfor %}", None),
    "none": (None, None),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("source") / "tokenizer"
    write_trained_tokenizer(train_tokenizer(iter(["a lazy dog"]), vocab_size=260), made)
    tokenizer = read_tokenizer(made)
    assert tokenizer is not None
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    tokenizer.save_pretrained(made)
    return made


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_the_token_behind_an_answer_ends_the_turn(name, folder):
    tokenizer = read_tokenizer(folder)
    assert tokenizer is not None
    tokenizer.chat_template, expected = TEMPLATES[name]
    found = end_of_turn_id(tokenizer)
    assert (None if found is None else tokenizer.decode([found])) == expected


def with_template(folder: Path, out: Path, *, as_file: bool) -> Path:
    """The tokenizer with ChatML, in a file of its own or in tokenizer_config.json."""
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    template, _ = TEMPLATES["chatml"]
    if as_file:
        (out / "chat_template.jinja").write_text(template)
    else:
        settings = json.loads((out / "tokenizer_config.json").read_text())
        (out / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return out


@pytest.mark.parametrize("as_file", [True, False])
def test_an_export_carries_its_template_in_a_file_and_ends_where_it_ends(as_file, folder, tmp_path):
    tokenizer = with_template(folder, tmp_path / "tokenizer", as_file=as_file)
    config = {**run_of(None, Method.FULL).model_config, "vocab_size": 280}
    plan = replace(run_of(None, Method.FULL, tokenizer=tokenizer), model_config=config)
    assert write_model_folder(build_model(plan), plan, tmp_path / "out") is None
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATES["chatml"][0]
    exported = read_tokenizer(tmp_path / "out")
    assert exported is not None
    ids = [exported.convert_tokens_to_ids(each) for each in ("<|endoftext|>", "<|im_end|>")]
    for name in ("generation_config.json", "config.json"):
        settings = json.loads((tmp_path / "out" / name).read_text())
        assert (settings["eos_token_id"], settings["pad_token_id"]) == (ids, ids[0]), name
        assert "bos_token_id" not in settings, "the class's own default means another token here"


def test_a_base_keeps_its_own_end_tokens_and_settings_beside_the_tokenizers(folder, tmp_path):
    base = write_base(tmp_path / "base", {**run_of(None, Method.FULL).model_config, "vocab_size": 280})
    own = {"eos_token_id": [3, 4], "pad_token_id": 5, "temperature": 0.6, "transformers_version": "5.0.0"}
    (base / "generation_config.json").write_text(json.dumps(own))
    plan = run_of(base, Method.FULL, tokenizer=folder)
    plan = replace(plan, model_config=json.loads((base / "config.json").read_text()))
    assert write_model_folder(build_model(plan), plan, tmp_path / "out") is None
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    tokenizer = read_tokenizer(folder)
    assert tokenizer is not None
    assert settings["eos_token_id"] == [3, 4, tokenizer.eos_token_id]
    assert (settings["pad_token_id"], settings["temperature"]) == (5, 0.6)
    other = replace(plan, job=replace(plan.job, model=ModelJob(name=str(base), tokenizer="train")))
    assert end_token_ids(other, tokenizer) == (tokenizer.eos_token_id,), "the base's tokens are those of its tokenizer"
