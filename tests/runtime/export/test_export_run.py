"""The exported folder, used as its user will use it: the same weights and the same ids, with every config.json."""

import json
import re
from pathlib import Path

import pytest
import torch
from attempt_runs import run_attempt
from engine_plan_factory import TINY_LLAMA
from export_factory import export, write_base
from msgspec.structs import replace
from prepare_request_factory import numbered_text
from rank_factory import rank_plan, write_attempt, write_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from shardwise.trainer.runtime.checkpoint import find_checkpoint, import_weights
from shardwise.trainer.runtime.data.tokenizer import load_tokenizer, train_tokenizer, write_trained_tokenizer
from shardwise.trainer.runtime.export.folder import write_adapter_folder, write_model_folder
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.runtime.models.methods import quantised_layers
from shardwise.trainer.spec.job.sections import LoraJob, ModelJob
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method, Precision

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


def plan_of(model_type: str, tokenizer_folder: Path | None) -> Plan:
    """A plan of a model whose vocabulary holds the tokenizer's."""
    config = {**TINY_LLAMA, "model_type": model_type, "vocab_size": 400}
    plan = rank_plan(Path("nowhere"), model_config=config)
    return replace(plan, tokenizer_path=None if tokenizer_folder is None else str(tokenizer_folder))


def write_folder(model_type: str, out: Path, tokenizer_folder: Path | None) -> str | None:
    plan = plan_of(model_type, tokenizer_folder)
    return write_model_folder(build_model(plan), plan, out)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_an_exported_tokenizer_gives_the_ids_that_were_trained_with(model_type, tokenizer_folder, tmp_path):
    incident = write_folder(model_type, tmp_path / "out", tokenizer_folder)
    assert incident is None
    exported, trained_with = AutoTokenizer.from_pretrained(tmp_path / "out"), load_tokenizer(tokenizer_folder)
    assert exported(SAMPLES)["input_ids"] == trained_with.encode(SAMPLES)
    assert (exported.eos_token_id, exported.pad_token_id) == (trained_with.eos_id, trained_with.pad_id)
    assert len(exported) == trained_with.vocab_size


def test_a_model_type_whose_tokenizers_transformers_cuts_by_its_own_rules_is_an_incident(tokenizer_folder, tmp_path):
    incident = write_folder("qwen2", tmp_path / "out", tokenizer_folder)
    assert incident is not None and "Qwen2Tokenizer" in incident
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert "trust_remote_code" not in settings
    names = ("tokenizer.json", "special_tokens_map.json")
    assert all((tmp_path / "out" / name).read_bytes() == (tokenizer_folder / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"extra_special_tokens": ["lazy"]}, r"token \d+: \[\d.*\].*TokenizersBackend.*\[400, "),
        ({"added_tokens_decoder": {"0": "nonsense"}}, "transformers cannot load"),
    ],
)
def test_a_tokenizer_that_gives_other_ids_is_an_incident(changes, fact, tokenizer_folder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for path in tokenizer_folder.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | changes))
    incident = write_folder("llama", tmp_path / "out", source)
    assert incident is not None and "\n" not in incident
    assert re.search(f"tokenizer.* {fact}", incident)


def test_a_model_without_a_tokenizer_is_exported_alone(tmp_path):
    assert write_folder("llama", tmp_path / "out", None) is None
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md", "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip


def test_an_export_replaces_an_older_one_and_leaves_nothing_beside_it(tokenizer_folder, tmp_path):
    plan = plan_of("qwen2", tokenizer_folder)
    model = build_model(plan)
    write_model_folder(model, plan, tmp_path / "out")
    with torch.no_grad():
        model.lm_head.weight.fill_(0.5)
    write_model_folder(model, replace(plan, tokenizer_path=None), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert float(loaded.lm_head.weight.detach().min()) == 0.5
    assert loaded.config.use_cache is True and model.config.use_cache is False
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("models") / "base")


ADAPTERS = {
    "dora": LoraJob(rank=4, alpha=8.0, dora=True),
    "rslora": LoraJob(rank=4, alpha=8.0, rslora=True, targets=("q_proj", "layers.1.mlp.up_proj")),
}


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows")


def adapter_plan(base: Path, cache_dir: Path, lora: LoraJob, method: Method, precision: Precision) -> Plan:
    plan = rank_plan(
        cache_dir, method=method, precision=precision, train={"lora": lora}, num_steps=4, micro_batch=8, accumulation=1
    )
    job = replace(plan.job, model=ModelJob(name=str(base)))
    return replace(plan, job=job, model_path=str(base))


def logits(model: PreTrainedModel) -> torch.Tensor:
    for layer in quantised_layers(model):
        layer.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        return model(input_ids=torch.arange(32).reshape(2, 16)).logits


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize(("kind", "method"), [("rslora", Method.LORA), ("dora", Method.LORA), ("dora", Method.QLORA)])
def test_peft_loads_the_exported_adapters_and_answers_as_the_model_that_was_trained(
    kind, method, base, cache_dir, tmp_path
):
    from peft import PeftModel

    plan = adapter_plan(base, cache_dir, ADAPTERS[kind], method, Precision.FP32)
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


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
def test_the_newest_checkpoint_exports_the_adapters_that_the_run_did_without_its_base(
    method, base, cache_dir, tmp_path, monkeypatch
):
    plan = adapter_plan(base, cache_dir, ADAPTERS["dora"], method, Precision.BF16_MIXED)
    run_attempt(tmp_path / "run", plan)
    gone = replace(plan, model_path=str(tmp_path / "gone"))
    (tmp_path / "run" / "plan.json").unlink()
    write_attempt(tmp_path / "run", gone, number=2)
    done = export(tmp_path / "run", tmp_path / "out", checks=False)
    assert done.checkpoint.path.name == "step-00000004" and done.notes == ()
    folders = (tmp_path / "out", tmp_path / "run" / "export")
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in folders)
    assert ours.keys() == theirs.keys()
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in folders]
    assert configs[0] | {"base_model_name_or_path": None} == configs[1] | {"base_model_name_or_path": None}


def test_adapters_come_with_their_tokenizer_and_with_the_name_and_revision_of_the_base(tokenizer_folder, tmp_path):
    """Of a base from the hub, which is recorded without a path."""
    cached = "/home/somebody/.cache/models--org--name/snapshots/abc"
    plan = rank_plan(Path("nowhere"), method=Method.LORA, train={"lora": ADAPTERS["dora"]})
    job = replace(plan.job, model=ModelJob(name="org/name", revision="abc"))
    plan = replace(plan, job=job, model_path=cached, tokenizer_path=str(tokenizer_folder))
    weights = {f"model.layers.0.mlp.up_proj.lora_{each}.default.weight": torch.zeros(2, 2) for each in "AB"}
    assert write_adapter_folder(weights, plan, tmp_path / "out") is None
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
