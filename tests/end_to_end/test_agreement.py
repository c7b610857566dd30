"""`plan`, `data` and `train` refuse the same jobs: one list of bad inputs through all three."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
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
}


@pytest.mark.parametrize("name", CASES)
def test_plan_data_and_train_refuse_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, sections, fact = CASES[name]
    place = make_workplace(tmp_path / "place")
    for path, content in files.items():
        (place.folder / path).parent.mkdir(exist_ok=True)
        (place.folder / path).write_text(content)
    place.write_job(**sections)
    enter(place, monkeypatch)
    for command in COMMANDS:
        assert main(command.split()) == 2, command
        assert fact in capsys.readouterr().err, command


def enter(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    for name in set(os.environ) - set(place.environment):
        monkeypatch.delenv(name)
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
