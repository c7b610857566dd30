"""`plan`, `data`, `train` and `init` refuse the same inputs: one list of bad ones through all four."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml
from workplace_factory import TINY_CONFIG, Workplace, make_workplace

from shardwise.launch.cli import main

COMMANDS = ("plan job.yaml", "data job.yaml", "train job.yaml --dry-run")
CHATS = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}] * 50
PAIRS = [{"prompt": "p", "chosen": "a", "rejected": "b"}] * 50
WORDS = {"model": {"type": "BPE", "vocab": {f"t{number}": number for number in range(400)}, "merges": []}}


def jsonl(rows: Sequence[Mapping[str, object]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def config(**changes: object) -> str:
    return json.dumps({**TINY_CONFIG, **changes})


def rows(**settings: object) -> dict[str, object]:
    return {"data": {"train": "rows.jsonl", **settings}}


CASES: dict[str, tuple[dict[str, str], dict[str, object], str]] = {  # files, sections of the job, fact of the message
    "first row is no JSON": ({"rows.jsonl": "{oops\n"}, rows(), "rows.jsonl"),
    "unknown columns": ({"rows.jsonl": jsonl([{"foo": "x"}] * 50)}, rows(), "foo"),
    "unknown columns of a table": ({"rows.csv": "a,b\n1,2\n" * 9}, {"data": {"train": "rows.csv"}}, "a, b"),
    "named column is missing": ({"rows.jsonl": jsonl([{"text": "x"}] * 50)}, rows(fields={"text": "body"}), "text"),
    "stated format is another": ({"rows.jsonl": jsonl(CHATS)}, rows(format="preference"), "preference"),
    "chats without a template": ({"rows.jsonl": jsonl(CHATS)}, rows(), "data.chat_template"),
    "unknown template": ({"rows.jsonl": jsonl(CHATS)}, rows(chat_template="chatml2"), "chatml2"),
    "packed pairs": ({"rows.jsonl": jsonl(PAIRS)}, rows(packing=True, chat_template="plain"), "data.packing"),
    "objective of another shape": (
        {"rows.jsonl": jsonl(CHATS)},
        {"data": {"train": "rows.jsonl", "chat_template": "plain"}, "train": {"objective": "pretrain"}},
        "train.objective",
    ),
    "objective of chats on text": ({}, {"train": {"objective": "sft"}}, "train.objective: sft"),
    "loss of chats on text": ({}, {"data": {"train": "text", "loss_on": "completion"}}, "data.loss_on"),
    "chats in text files": ({}, {"data": {"train": "text", "format": "chat"}}, "data.format: chat"),
    "binary text": ({"b.txt": "a\0b" * 100}, {"data": {"train": "b.txt"}}, "NUL byte"),
    "no data": ({}, {"data": {"train": "absent.jsonl"}}, "absent.jsonl"),
    "empty data": ({"b.txt": ""}, {"data": {"train": "b.txt"}}, "empty"),
    "no held-out data": ({}, {"data": {"train": "text", "eval": "absent.jsonl"}}, "data.eval"),
    "empty held-out data": ({"e.txt": ""}, {"data": {"train": "text", "eval": "e.txt"}}, "empty"),
    "rows beyond the model": ({}, {"train": {"seq_len": 256}}, "128"),
    "batch below a row": ({}, {"train": {"tokens_per_step": 16}}, "train.tokens_per_step"),
    "batch of no whole rows": ({}, {"train": {"tokens_per_step": 250}}, "train.tokens_per_step"),
    "micro batch that does not divide": ({}, {"pin": {"micro_batch": 3}}, "pin.micro_batch"),
    "vocabulary of another model": (
        {"words/tokenizer.json": json.dumps(WORDS)},
        {"model": {"config": "model", "tokenizer": "words"}},
        "400",
    ),
    "tokenizer of other rules": ({"model/config.json": config(model_type="qwen2")}, {}, "model.tokenizer"),
    "unsupported model": ({"model/config.json": config(model_type="bert")}, {}, "bert"),
    "adapters in place of a model": (
        {"lora/adapter_config.json": json.dumps({"base_model_name_or_path": "org/base"})},
        {"model": {"name": "lora"}},
        "shardwise import lora lora-merged --base org/base",
    ),
    "no model": ({}, {"model": {"name": "qwen2.5-7"}}, "did you mean qwen2.5-7b?"),
}
# `init` states the settings by itself; what it refuses are models and data.
OF_INIT = (
    "first row is no JSON", "unknown columns", "unknown columns of a table", "binary text", "no data", "empty data",
    "unsupported model", "adapters in place of a model", "no model",
)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_all_commands_refuse_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, sections, fact = CASES[name]
    place = make_workplace(tmp_path / "place")
    for path, content in files.items():
        (place.folder / path).parent.mkdir(exist_ok=True)
        (place.folder / path).write_text(content)
    place.write_job(**sections)
    job = yaml.safe_load(place.job.read_text())
    if "name" in job["model"]:
        place.job.write_text(yaml.safe_dump({**job, "model": {"name": job["model"]["name"]}}))
    model, data = job["model"].get("name") or job["model"]["config"], job["data"]["train"]
    init = (f"init --model {model} --data {data} -o made.yaml",) if name in OF_INIT else ()
    enter(place, monkeypatch)
    for command in (*COMMANDS, *init):
        assert main(command.split()) == 2, command
        assert fact in capsys.readouterr().err, command
    assert not (place.folder / "made.yaml").exists()


def test_init_states_what_it_found_and_plan_accepts_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = make_workplace(tmp_path / "place")
    (place.folder / "rows.jsonl").write_text(jsonl(CHATS))
    enter(place, monkeypatch)
    assert main(["init", "--model", "model", "--data", "rows.jsonl", "-o", "made.yaml"]) == 0
    found = capsys.readouterr().out
    assert all(fact in found for fact in ("llama", "128 positions", "sft on chats", "chat template chatml")), found
    assert main(["plan", "made.yaml"]) == 0


def enter(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    for name in set(os.environ) - set(place.environment):
        monkeypatch.delenv(name)
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
