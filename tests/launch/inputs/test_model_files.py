"""A job's model: found where the job says, checked before anything heavy, and every fault one line with a remedy."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import job_of, plan_of
from safetensors import safe_open

from shardwise.launch.inputs import model_files as models
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.reading import read_job
from shardwise.trainer.spec.job.sections import DataFormat, Job
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method

CONFIG = {**models.read_preset("tiny-llama"), "vocab_size": 16, "hidden_size": 12}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def job(**model: Any) -> Job:
    """A job on this model; what starts from scratch has its tokenizer made, unless the test says otherwise."""
    if "config" in model:
        model = {"tokenizer": "train", **model}
    return read_job({"model": model, "data": {"train": "text"}}, origin="job.yaml")


def safetensors(rows: int = 16) -> bytes:
    num_bytes = rows * 12 * 4
    tensor = {"dtype": "F32", "shape": [rows, 12], "data_offsets": [0, num_bytes]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * num_bytes


def tokenizer(size: int, *, added: int = 0) -> str:
    content = {
        "model": {"type": "BPE", "vocab": {f"t{number}": number for number in range(size)}, "merges": []},
        "added_tokens": [{"id": size + number, "content": f"<{number}>"} for number in range(added)],
    }
    return json.dumps(content)


def write_model(
    folder: Path, *, config: Any = CONFIG, rows: int | None = 16, tokens: str | None = tokenizer(16)
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if rows is not None:
        (folder / "model.safetensors").write_bytes(safetensors(rows))
    if tokens is not None:
        (folder / "tokenizer.json").write_text(tokens)
    return folder


def write_cached(home: Path, repository: str, *, revision: str = "main", **model: Any) -> Path:
    """A snapshot in Hugging Face's cache, as huggingface_hub lays it out."""
    root = home / "hub" / f"models--{repository.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / revision).write_text(COMMIT)
    return write_model(root / "snapshots" / COMMIT, **model)


def refused(wanted: Job, home: Path | None = None) -> str:
    with pytest.raises(InputError) as caught:
        models.read_model_config(wanted, cache_home=home)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_a_folder_with_a_config_wins_over_a_preset_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "phi-2").mkdir()
    assert models.read_model_config(job(name="phi-2"), cache_home=tmp_path).repository == "microsoft/phi-2"
    folder = write_model(tmp_path / "phi-2")
    assert models.read_model_config(job(name="phi-2"), cache_home=tmp_path).model_path == str(folder)
    assert models.read_model_config(job(config="phi-2"), cache_home=tmp_path).config == CONFIG
    assert models.read_model_config(job(config="tiny-llama"), cache_home=tmp_path) == models.ModelFiles(
        config=models.read_preset("tiny-llama"), config_origin="preset tiny-llama", model_path=None, tokenizer_path=None
    )


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("qwen/qwen2.5-7b", "qwen2.5-7b"),
        ("unsloth/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
    ],
)
def test_a_hub_id_that_cannot_be_read_is_in_the_table(name, preset, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    files = models.read_model_config(job(name=name), cache_home=tmp_path)
    assert (files.config, files.model_path, files.needs_download) == (models.read_preset(preset), name, True)
    assert "package's own table" in (files.note or "") and preset in (files.note or "")
    from_scratch = models.read_model_config(job(config=name), cache_home=tmp_path)
    assert (from_scratch.config, from_scratch.model_path) == (models.read_preset(preset), None)
    with pytest.raises(EnvironmentFaultError, match="HF_HUB_OFFLINE"):  # a run needs the weights
        models.download_model(job(name=name), files, cache_home=tmp_path)


def test_data_need_the_tokenizer_of_a_model_that_the_table_describes(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    wanted = job(name="Qwen/Qwen2.5-0.5B-Instruct")
    files = models.read_model_config(wanted, cache_home=tmp_path)
    with pytest.raises(EnvironmentFaultError, match=r"model\.name: .* name a local folder"):
        models.download_tokenizer(wanted, files, cache_home=tmp_path)
    snapshot = write_cached(tmp_path, "Qwen/Qwen2.5-0.5B-Instruct")
    assert models.download_tokenizer(wanted, files, cache_home=tmp_path).tokenizer_path == str(snapshot)


def test_the_table_stands_for_no_other_revision_and_no_other_model(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for wanted in (job(name="Qwen/Qwen2.5-7B", revision="abc"), job(name="someone/Qwen2.5-7B")):
        with pytest.raises(EnvironmentFaultError):
            models.read_model_config(wanted, cache_home=tmp_path)
    with pytest.raises(EnvironmentFaultError, match=r"did you mean Qwen/Qwen2\.5-7B\?"):
        models.read_model_config(job(name="Qwen/Qwen2.5-7b-"), cache_home=tmp_path)


def test_a_plan_alone_needs_no_weights_and_a_run_does(tmp_path):
    folder = write_model(tmp_path / "bare", rows=None, tokens=None)
    files = models.read_model_config(job(name=str(folder)), only_plans=True)
    assert (files.config, files.model_path, files.tokenizer_path) == (CONFIG, str(folder), None)
    assert "holds no weights" in (files.note or "")
    assert "model.safetensors" in refused(job(name=str(folder)))
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match="pickled"):
        models.read_model_config(job(name=str(folder)), only_plans=True)


@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.model.v3", "qwen.tiktoken"])
def test_a_tokenizer_in_another_form_is_refused_by_a_plan_too_unless_none_is_needed(name, tmp_path):
    folder = write_model(tmp_path / "model", tokens=None)
    (folder / name).write_bytes(b"x")
    wanted = job(name=str(folder))
    with pytest.raises(InputError, match=rf"^model\.tokenizer: {folder} holds {name} alone, .* as tokenizer\.json$"):
        models.read_model_config(wanted, only_plans=True)
    of_tokens = replace(wanted, data=replace(wanted.data, format=DataFormat.TOKENS))
    assert models.read_model_config(of_tokens, only_plans=True).tokenizer_path is None
    (folder / "tokenizer.json").write_text(tokenizer(16))
    assert models.read_model_config(wanted).tokenizer_path == str(folder)


def test_a_config_of_a_folder_or_file_needs_no_weights(tmp_path):
    folder = write_model(tmp_path / "shape", rows=None)
    from_folder = models.read_model_config(job(config=str(folder)))
    from_file = models.read_model_config(job(config=str(folder / "config.json")))
    assert from_folder.config == from_file.config == CONFIG
    assert from_folder.config_origin == from_file.config_origin == str(folder / "config.json")
    assert (from_folder.model_path, from_file.model_path) == (None, None)
    assert from_folder.tokenizer_path is None  # the job says: train


def test_a_hub_id_in_the_cache_needs_no_network(tmp_path, monkeypatch):
    snapshot = write_cached(tmp_path, "org/model")
    files = models.read_model_config(job(name="org/model"), cache_home=tmp_path)
    assert (files.model_path, files.tokenizer_path) == (str(snapshot), str(snapshot))
    assert (files.repository, files.revision, files.needs_download) == ("org/model", COMMIT, False)
    assert models.read_model_config(job(config="org/model"), cache_home=tmp_path).model_path is None
    (snapshot / "model.safetensors").unlink()
    files = models.read_model_config(job(name="org/model"), cache_home=tmp_path)
    assert (files.model_path, files.tokenizer_path, files.needs_download) == ("org/model", str(snapshot), True)
    (snapshot / "tokenizer.json").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    files = models.read_model_config(job(name="org/model"), cache_home=tmp_path)
    assert (files.config, files.tokenizer_path) == (CONFIG, None), "a plan without a tokenizer is possible"


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch, variable):
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "huggingface"
    snapshot = write_cached(home, "org/model")
    monkeypatch.setenv(variable, str({"HF_HUB_CACHE": home / "hub", "HF_HOME": home}.get(variable, tmp_path)))
    assert models.read_model_config(job(name="org/model")).model_path == str(snapshot)


def test_what_is_no_model_here_says_what_a_name_may_be():
    line = refused(job(name="llama-3.1-8"))
    assert line.startswith("model.name: llama-3.1-8 ") and "ORG/NAME" in line and "did you mean llama-3.1-8b?" in line
    assert "did you mean Qwen/Qwen2.5-7B-Instruct?" in refused(job(name="qwen2.5-7b-instrct"))
    assert "docs/architectures.md" in refused(job(config="zzz"))
    for name in ("../gone/model", "/gone", "a/b/c", "a b/c", "org/..", "x" * 300, "~nobody-at-all/model"):
        assert name in refused(job(name=name))


@pytest.mark.parametrize(
    ("config", "fact"),
    [(None, "no config.json"), ("", "not JSON"), ("{", "not JSON"), ("[]", "JSON object"), ("[" * 100_000, "not JSON")],
    ids=["none", "empty", "cut", "list", "deep"],
)
def test_a_folder_with_a_bad_config_is_refused(tmp_path, config, fact):
    folder = write_model(tmp_path / "model", config=config)
    for wanted in (job(name=str(folder)), job(config=str(folder))):
        assert "config.json" in refused(wanted) and fact in refused(wanted)


@pytest.mark.parametrize(("size", "added"), [(17, 0), (20, 3)])
def test_a_tokenizer_with_more_words_than_the_model_is_refused_with_both_numbers(tmp_path, size, added):
    folder = write_model(tmp_path / "model", tokens=tokenizer(size, added=added))
    line = refused(job(name=str(folder)))
    assert line.startswith(f"model.tokenizer: {folder} ") and f"{size + added} tokens" in line and " 16" in line


@pytest.mark.parametrize(("size", "added", "template"), [(16, 1, None), (2, 40, None), (15, 0, "chatml")])
def test_added_tokens_and_those_of_a_template_make_the_vocabulary_larger(tmp_path, size, added, template):
    folder = write_model(tmp_path / "model", tokens=tokenizer(size, added=added))
    wanted = job(name=str(folder))
    wanted = replace(wanted, data=replace(wanted.data, chat_template=template))
    files = models.read_model_config(wanted)
    assert (files.config["vocab_size"], files.new_rows) == (64, 48)
    plain = replace(wanted, data=replace(wanted.data, chat_template="plain"))
    assert models.read_model_config(plain).new_rows == (48 if added else 0)


def test_tokens_of_a_template_are_new_also_where_the_embeddings_have_spare_rows(tmp_path):
    folder = write_model(tmp_path / "model", tokens=tokenizer(3))
    wanted = job(name=str(folder))
    files = models.read_model_config(replace(wanted, data=replace(wanted.data, chat_template="chatml")))
    assert files.new_rows == 0
    models.refuse_frozen_rows(plan(Method.FULL), files, "chatml")
    with pytest.raises(InputError, match="adds tokens that are new to the model, and lora does not train"):
        models.refuse_frozen_rows(plan(Method.LORA), files, "chatml")
    models.refuse_frozen_rows(plan(Method.LORA), models.read_model_config(wanted), None)


@pytest.mark.parametrize(
    "content", ["{}", '{"model": 5}', '{"model": {"vocab": {"a": "b"}}}', '{"model": {"vocab": 5}}']
)
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    folder = write_model(tmp_path / "model", tokens=content)
    assert f"{folder}/tokenizer.json: " in refused(job(name=str(folder)))


def test_the_size_of_a_tokenizer_of_either_kind_is_its_largest_id(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}))
    assert models.read_tokens(tmp_path).size == 2
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 7}}, "added_tokens": None}))
    assert models.read_tokens(tmp_path).size == 8
    (tmp_path / "tokenizer.json").unlink()
    assert models.read_tokens(tmp_path) is None


def test_the_chat_templates_of_a_tokenizer_are_those_of_its_settings_or_of_files_beside_them(tmp_path):
    assert models.chat_templates(tmp_path) == set()
    several = [{"name": "default"}, {"name": "tool_use"}]
    for template, names in ((None, set()), ("{{ x }}", {"default"}), (several, {"default", "tool_use"})):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        assert models.chat_templates(tmp_path) == names
    (tmp_path / "chat_template.jinja").touch()
    assert models.chat_templates(tmp_path) == {"default"}


def test_a_tokenizer_may_be_named_and_one_that_is_not_there_is_refused(tmp_path):
    named = write_model(tmp_path / "named", config=None, rows=None)
    assert models.read_model_config(job(config="tiny-llama", tokenizer=str(named))).tokenizer_path == str(named)
    write_cached(tmp_path, "org/words")
    files = models.read_model_config(job(config="tiny-llama", tokenizer="org/words"), cache_home=tmp_path)
    assert Path(files.tokenizer_path or "").name == COMMIT
    (tmp_path / "words").mkdir()
    (tmp_path / "tokenizer.json").write_text(tokenizer(3))
    write_cached(tmp_path, "org/mute", tokens=None)
    words, file = str(tmp_path / "words"), str(tmp_path / "tokenizer.json")
    facts = {words: "no tokenizer.*tokenizer.json", file: "is a file", "gone": "no folder", "org/mute": "no tokenizer"}
    for missing, fact in facts.items():
        line = refused(job(config="tiny-llama", tokenizer=missing), tmp_path)
        assert re.match(f"model.tokenizer: {re.escape(missing)} .*{fact}", line), line


def plan(method: Method) -> Plan:
    return plan_of("tiny", "1xRTX-4090", job=job_of(method=method, seq_len=512, tokens_per_step=2048))


OF_TEMPLATE = ("data.chat_template: chatml", "data.chat_template=plain")
OF_TOKENIZER = ("model.tokenizer: ", "a tokenizer without")


@pytest.mark.parametrize(
    ("method", "template", "named"),
    [(Method.LORA, "chatml", OF_TEMPLATE), (Method.QLORA, "chatml", OF_TEMPLATE), (Method.LORA, "plain", OF_TOKENIZER)],
)
def test_adapters_are_refused_for_tokens_that_the_model_does_not_know(method, template, named):
    origin: dict[str, Any] = {"config_origin": "config.json", "model_path": "model", "tokenizer_path": "model"}
    with pytest.raises(InputError) as caught:
        models.refuse_frozen_rows(plan(method), models.ModelFiles(config={}, new_rows=48, **origin), template)
    facts = (*named, f" {method} ", "train.method=full")
    assert [fact for fact in facts if fact not in str(caught.value)] == []


def test_a_kept_plan_gets_the_rows_it_counts(tmp_path: Path) -> None:
    retained = plan(Method.FULL)
    folder, said = tmp_path / "model", list[str]()
    write_weights(folder, vocab_size=retained.model_config["vocab_size"] - 40)
    retained = replace(retained, model_path=str(folder))
    grown = models.retained_plan_with_new_rows(retained, cache=tmp_path / "cache", on_progress=said.append)
    assert grown.model_path is not None and Path(grown.model_path).is_relative_to(tmp_path / "cache")
    with safe_open(Path(grown.model_path) / "model.safetensors", framework="np") as weights:
        rows = weights.get_tensor("model.embed_tokens.weight")
    assert len(rows) == retained.model_config["vocab_size"]
    assert len(said) == 1
    same = replace(retained, model_path=grown.model_path)
    assert models.retained_plan_with_new_rows(same, cache=tmp_path / "cache", on_progress=said.append) is same


def write_weights(folder: Path, *, vocab_size: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
