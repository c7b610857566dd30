"""The exported folder, used as its user will use it: the same weights, the same ids, the tokens that end an answer."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from attempt_runs import run_attempt
from chat_tokenizers import byte_level_folder
from engine_plan_factory import TINY_LLAMA
from export_factory import LORA, run_of, write_base
from msgspec.structs import replace
from prepare_request_factory import numbered_text
from programs import printed_by
from rank_factory import rank_plan
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel
from zoo import model_of

from shardwise.trainer.runtime.checkpoint import find_checkpoint, import_weights
from shardwise.trainer.runtime.data.chat.template import TEMPLATE_NAMES, load_chat_template
from shardwise.trainer.runtime.data.tokenizer import load_tokenizer, train_tokenizer, write_trained_tokenizer
from shardwise.trainer.runtime.export import folder as export_folder
from shardwise.trainer.runtime.export.folder import save_model, staged
from shardwise.trainer.runtime.export.model_card import Export, model_card
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.runtime.models.methods import quantised_layers
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.job.sections import DataJob, LoraJob, ModelJob
from shardwise.trainer.spec.job.sources import DataSource
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method

SAMPLES = [
    "row 70",
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


def write_folder(model_type: str, out: Path, tokenizer_folder: Path) -> str | None:
    config = {**TINY_LLAMA, "model_type": model_type, "vocab_size": 400}
    plan = replace(rank_plan(Path("nowhere"), model_config=config), tokenizer_path=str(tokenizer_folder))
    return export_folder.write_model_folder(build_model(plan), plan, out)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_an_exported_tokenizer_gives_the_ids_that_were_trained_with(model_type, tokenizer_folder, tmp_path):
    assert write_folder(model_type, tmp_path / "out", tokenizer_folder) is None
    exported, trained_with = AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(tokenizer_folder)
    assert exported(SAMPLES)["input_ids"] == trained_with.encode(SAMPLES)
    assert (exported.eos_token_id, exported.pad_token_id) == (trained_with.eos_id, trained_with.pad_id)
    assert len(exported) == trained_with.vocab_size


def test_a_model_type_with_rules_of_its_own_for_tokenizers_is_an_incident(tokenizer_folder, cache_dir, tmp_path):
    incident = write_folder("qwen2", tmp_path / "out", tokenizer_folder)
    assert incident is not None and "Qwen2Tokenizer" in incident
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert "trust_remote_code" not in settings
    names = ("tokenizer.json", "special_tokens_map.json")
    assert all((tmp_path / "out" / name).read_bytes() == (tokenizer_folder / name).read_bytes() for name in names)
    plan = rank_plan(cache_dir, model_config={**TINY_LLAMA, "model_type": "qwen2", "vocab_size": 400}, num_steps=1)
    _, state = run_attempt(tmp_path / "run", replace(plan, tokenizer_path=str(tokenizer_folder)))
    assert incident in state.incidents


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"extra_special_tokens": ["lazy"]}, r"token \d+: \[\d.*\].*TokenizersBackend.*\[400, "),
        ({"added_tokens_decoder": {"0": "nonsense"}}, "transformers cannot load"),
    ],
)
def test_a_tokenizer_that_gives_other_ids_is_an_incident(changes, fact, tokenizer_folder, tmp_path):
    source = shutil.copytree(tokenizer_folder, tmp_path / "source")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | changes))
    incident = write_folder("llama", tmp_path / "out", source)
    assert incident is not None and "\n" not in incident
    assert re.search(f"tokenizer.* {fact}", incident)


ADAPTERS = {
    "dora": LoraJob(rank=4, alpha=8.0, dora=True),
    "rslora": LoraJob(rank=4, alpha=8.0, rslora=True, targets=("q_proj", "layers.1.mlp.up_proj")),
}


def logits(model: PreTrainedModel) -> torch.Tensor:
    for layer in quantised_layers(model):
        layer.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        return model(input_ids=torch.arange(32).reshape(2, 16)).logits


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize(("kind", "method"), [("rslora", Method.LORA), ("dora", Method.LORA), ("dora", Method.QLORA)])
def test_peft_loads_the_exported_adapters_and_answers_as_the_trained_model(kind, method, base, cache_dir, tmp_path):
    from peft import PeftModel

    steps: dict[str, Any] = {"num_steps": 4, "micro_batch": 8, "accumulation": 1}
    plan = rank_plan(cache_dir, method=method, train={"lora": ADAPTERS[kind]}, **steps)
    plan = replace(plan, job=replace(plan.job, model=ModelJob(name=str(base))), model_path=str(base))
    _, state = run_attempt(tmp_path / "run", plan)
    assert state.incidents == [] and state.export == "export"
    quantised = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )
    settings = {"quantization_config": quantised} if method is Method.QLORA else {}
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **settings)
    loaded = PeftModel.from_pretrained(theirs, tmp_path / "run" / "export")
    ours = build_model(plan)
    ours.eval()
    assert not torch.allclose(logits(loaded), logits(ours), atol=1e-3), "the run learned"
    import_weights(ours, find_checkpoint(tmp_path / "run" / "checkpoints", on_skip=pytest.fail))
    torch.testing.assert_close(logits(loaded), logits(ours), rtol=0, atol=1e-6)


WEIGHTS = {f"model.layers.0.mlp.up_proj.lora_{each}.default.weight": torch.zeros(2, 2) for each in "AB"}


def test_adapters_to_be_uploaded_name_the_base_without_its_folder(tmp_path):
    folder = tmp_path / "private" / "base"
    plan = rank_plan(Path("nowhere"), method=Method.LORA, train={"lora": ADAPTERS["dora"]})
    for hides_paths, name in ((False, str(folder)), (True, "base")):
        out = tmp_path / name.replace("/", "-")
        export_folder.save_adapters(WEIGHTS, replace(plan, model_path=str(folder)), out, hides_paths=hides_paths)
        assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == name


def test_adapters_come_with_their_tokenizer_and_with_the_name_and_revision_of_the_base(tokenizer_folder, tmp_path):
    """Of a base from the hub, which is recorded without a path."""
    cached = "/home/somebody/.cache/models--org--name/snapshots/abc"
    plan = rank_plan(Path("nowhere"), method=Method.LORA, train={"lora": ADAPTERS["dora"]})
    job = replace(plan.job, model=ModelJob(name="org/name", revision="abc"))
    plan = replace(plan, job=job, model_path=cached, tokenizer_path=str(tokenizer_folder))
    assert export_folder.write_adapter_folder(WEIGHTS, plan, tmp_path / "out") is None
    text = (tmp_path / "out" / "adapter_config.json").read_text()
    config = json.loads(text)
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/name", "abc")
    assert "somebody" not in text
    assert config["target_modules"] == ["up_proj"] and config["inference_mode"] is True
    assert set(load_file(tmp_path / "out" / "adapter_model.safetensors")) == {
        f"base_model.model.model.layers.0.mlp.up_proj.lora_{each}.weight" for each in "AB"
    }
    exported, trained_with = AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(tokenizer_folder)
    assert exported(SAMPLES)["input_ids"] == trained_with.encode(SAMPLES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return byte_level_folder(tmp_path_factory.mktemp("source") / "tokenizer", bos=None, eos="<|endoftext|>")


LOOP = "{% for message in messages %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("chatml", "<|im_end|>"),
        ("llama3", "<|eot_id|>"),
        ("mistral", "<|endoftext|>"),
        (LOOP + "{{ message.role }}: {{ message.content }}\n{% endfor %}", None),
        ("{{ raise_exception('only tools here') }}", None),
        (LOOP + "{{ message.content }}<|unknown|>{% endfor %}", None),
        (None, None),
    ],
)
def test_the_token_behind_an_answer_ends_the_turn(template, expected, folder):
    tokenizer = export_folder.read_tokenizer(folder)
    tokenizer.chat_template = load_chat_template(template, folder).source if template in TEMPLATE_NAMES else template
    found = export_folder.end_of_turn_id(tokenizer)
    assert (None if found is None else tokenizer.decode([found])) == expected


@pytest.mark.parametrize("as_file", [True, False])
def test_an_export_carries_its_template_in_a_file_and_ends_where_it_ends(as_file, folder, tmp_path):
    """Also where its template stood in tokenizer_config.json."""
    tokenizer, template = shutil.copytree(folder, tmp_path / "tokenizer"), load_chat_template("chatml", folder).source
    if as_file:
        (tokenizer / "chat_template.jinja").write_text(template)
    else:
        settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
        (tokenizer / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    config = {**run_of(None, Method.FULL).model_config, "vocab_size": 1024}
    plan = replace(run_of(None, Method.FULL, tokenizer=tokenizer), model_config=config)
    assert export_folder.write_model_folder(build_model(plan), plan, tmp_path / "out") is None
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == template
    exported = export_folder.read_tokenizer(tmp_path / "out")
    ids = [exported.convert_tokens_to_ids(each) for each in ("<|endoftext|>", "<|im_end|>")]
    for name in ("generation_config.json", "config.json"):
        settings = json.loads((tmp_path / "out" / name).read_text())
        assert (settings["eos_token_id"], settings["pad_token_id"]) == (ids, ids[0]), name
        assert "bos_token_id" not in settings, "the class's own default means another token here"


def test_a_base_keeps_its_own_end_tokens_and_settings_beside_the_tokenizers(folder, tmp_path):
    base = write_base(tmp_path / "base", {**run_of(None, Method.FULL).model_config, "vocab_size": 1024})
    sampling = {"do_sample": False, "temperature": 0.6}
    own = {"eos_token_id": [3, 4], "pad_token_id": 5, **sampling, "transformers_version": "5.0.0"}
    (base / "generation_config.json").write_text(json.dumps(own))
    plan = run_of(base, Method.FULL, tokenizer=folder)
    plan = replace(plan, model_config=json.loads((base / "config.json").read_text()))
    assert export_folder.write_model_folder(build_model(plan), plan, tmp_path / "out") is None
    settings = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    tokenizer = export_folder.read_tokenizer(folder)
    assert settings["eos_token_id"] == [3, 4, tokenizer.eos_token_id]
    assert (settings["pad_token_id"], settings["temperature"]) == (5, 0.6)
    other = replace(plan, job=replace(plan.job, model=ModelJob(name=str(base), tokenizer="train")))
    assert export_folder.end_token_ids(other, tokenizer) == (tokenizer.eos_token_id,), "not those of another tokenizer"


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def front_matter(card: str) -> dict:
    opening, front, _ = card.split("---\n", 2)
    assert opening == ""
    return yaml.safe_load(front)


def on_the_hub(folder: Path, method: Method, *, licence: str | None = None, lora=LORA) -> Plan:
    snapshot = folder / "models--org--base" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    if licence is not None:
        (snapshot / "README.md").write_text(f"---\nlicense: {licence}\ntags: [x]\n---\n# base\n")
    plan = run_of(None, method, lora=lora)
    job = replace(plan.job, model=ModelJob(name="org/base"))
    return replace(plan, name='cats: a "test"', job=job, model_path=str(snapshot))


@pytest.mark.parametrize(
    ("method", "kind", "library", "relation"),
    [(Method.LORA, None, "peft", "adapter"), (Method.LORA, "merged", "transformers", "finetune"),
     (Method.FULL, None, "transformers", "finetune"), (Method.QLORA, "onnx", "transformers", "finetune")],
)  # fmt: skip
def test_the_front_matter_is_what_the_hub_reads_and_the_code_is_python(method, kind, library, relation, tmp_path):
    plan = on_the_hub(tmp_path, method, licence="apache-2.0")
    card = model_card(Export(plan=plan, kind=kind))
    front = front_matter(card)
    assert front["base_model"] == "org/base" and front["base_model_relation"] == relation
    assert front["library_name"] == library and front["license"] == "apache-2.0"
    assert front["tags"] == ["shardwise", str(method), *(["onnx"] if kind == "onnx" else [])]
    compile(card.split("```python\n")[1].split("```")[0], "card", "exec")


def test_folders_of_this_machine_and_secrets_stay_out_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    sources = (
        DataSource(source="/home/ann/private/chats.jsonl", weight=2.0),
        DataSource(source="data/train"),
        DataSource(source="org/dataset"),
    )
    (tmp_path / "data" / "train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "ann" / "my-base"
    base.mkdir(parents=True)
    plan = run_of(None, Method.FULL)
    plan = replace(
        plan, model_path=str(base), tokenizer_path=str(tmp_path / "ann"),
        job=replace(plan.job, model=ModelJob(name=str(base)), data=DataJob(train=sources)),
    )  # fmt: skip
    card = model_card(Export(plan=plan))
    assert "chats.jsonl (weight 2), train, org/dataset" in card
    assert "| base | my-base |" in card and "base_model" not in front_matter(card)
    for secret in ("hf_secret", "/home/ann", str(tmp_path), "data/train"):
        assert secret not in card


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
    printed = printed_by("-c", f"{MODEL}{saving}\n{LOADED}", tmp_path / "out", cwd=Path(__file__).parents[3])
    assert printed.splitlines()[-1] == f"loaded: {loads}"


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3"])
def test_the_files_are_those_of_transformers(model_type, tmp_path):
    """Experts have the names and shapes under which transformers publishes them."""
    model = model_of(model_type)
    save_model(model, tmp_path / "ours")
    model.config.use_cache = True
    model.save_pretrained(tmp_path / "theirs")
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {p.name for p in (tmp_path / "theirs").iterdir()}
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()
    ours, theirs = (load_file(tmp_path / each / "model.safetensors") for each in ("ours", "theirs"))
    assert ours.keys() == theirs.keys() and not any(".experts.gate_up_proj.weight" in name for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any(".experts." in name for name in ours) is (model_type != "llama")


def test_an_export_that_fails_leaves_the_older_one_as_it_was(tmp_path):
    older = tmp_path / "export"
    older.mkdir()
    (older / "config.json").write_text("older")
    with pytest.raises(EnvironmentFaultError, match="cannot be written"), staged(older) as folder:
        (folder / "config.json").write_text("newer")
        raise OSError("the disk is full")
    assert [path.read_text() for path in tmp_path.glob("**/*.json")] == ["older"]


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
