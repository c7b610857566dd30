"""The model card: what the hub reads of it, what a person reads, and what must never stand in it."""

from pathlib import Path

import pytest
import yaml
from export_factory import LORA, run_of
from msgspec.structs import replace

from shardwise.trainer.runtime.export.model_card import Export, model_card
from shardwise.trainer.spec.job.sections import DataJob, ModelJob
from shardwise.trainer.spec.job.sources import DataSource
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def front_matter(card: str) -> dict:
    opening, front, _ = card.split("---\n", 2)
    assert opening == ""
    return yaml.safe_load(front)


def on_the_hub(folder: Path, method: Method, *, licence: str | None = None, lora=LORA) -> Plan:
    """A plan whose base is a revision in the hub's cache."""
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


def test_the_card_states_what_was_trained_from_what_and_how_to_load_it(tmp_path):
    plan = on_the_hub(tmp_path, Method.QLORA, lora=replace(LORA, dora=True, rslora=True))
    card = model_card(Export(plan=plan, step=30, checks=("loaded again: fine",)))
    for text in (
        f"| base | org/base, revision {COMMIT} |",
        "| method | qlora with DoRA, rank 4, alpha 8, rank-stabilised, on all-linear |",
        "steps of", "exported at step 30", "- loaded again: fine", "load_in_4bit=True",
        f'from_pretrained("org/base", revision="{COMMIT}"', 'PeftModel.from_pretrained(base, "THIS_FOLDER")', "torch ",
    ):  # fmt: skip
        assert text in card, card


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
