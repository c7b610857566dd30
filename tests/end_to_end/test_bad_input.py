"""Faults of the input: one to three lines, the documented exit code, and no file lost or left behind."""

import json
import os
import struct
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from small_disk import mounted_disk
from workplace_factory import TINY_CONFIG

from shardwise.launch.cli import main

TRAIN = ("train job.yaml",)
READING = ("plan job.yaml", "data job.yaml", "train job.yaml --dry-run")
INIT = (*READING, "init --model {model} --data {data} -o made.yaml")  # where model and data alone are at fault


class Case(NamedTuple):
    """Files of a workplace, sections of its job, and facts that each of the commands reports with the exit code."""

    facts: tuple[str, ...]
    files: dict[str, str | bytes] = {}
    job: dict[str, object] = {}
    commands: tuple[str, ...] = READING
    code: int = 2


def jsonl(row: object) -> str:
    return f"{json.dumps(row)}\n" * 50


def config(**changes: object) -> dict[str, str | bytes]:
    return {"model/config.json": json.dumps({**TINY_CONFIG, **changes})}


def on_rows(**settings: object) -> dict[str, object]:
    return {"data": {"train": "rows.jsonl", **settings}}


CHATS = jsonl({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})
WORDS = json.dumps({"model": {"type": "BPE", "vocab": {f"t{number}": number for number in range(400)}, "merges": []}})
HEADER = b'{"model.embed_tokens.weight": {"dtype": "F32", "shape": [320, 32], "data_offsets": [0, 40960]}}'
TRUNCATED: dict[str, str | bytes] = {
    "weights/config.json": json.dumps(TINY_CONFIG),
    "weights/tokenizer.json": json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}),
    "weights/model.safetensors": struct.pack("<Q", len(HEADER)) + HEADER + b"\0" * 100,
}
DATA = {
    "first row is no JSON": Case(("rows.jsonl", "byte 1"), {"rows.jsonl": "{oops\n"}, on_rows(), INIT),
    "unknown columns": Case(("foo",), {"rows.jsonl": jsonl({"foo": "x"})}, on_rows(), INIT),
    "columns of a table": Case(("a, b",), {"rows.csv": "a,b\n1,2\n" * 9}, {"data": {"train": "rows.csv"}}, INIT),
    "named column is missing": Case(("text",), {"rows.jsonl": jsonl({"text": "x"})}, on_rows(fields={"text": "body"})),
    "stated format is another": Case(("preference",), {"rows.jsonl": CHATS}, on_rows(format="preference")),
    "chats without a template": Case(("data.chat_template",), {"rows.jsonl": CHATS}, on_rows()),
    "unknown template": Case(("chatml2",), {"rows.jsonl": CHATS}, on_rows(chat_template="chatml2")),
    "chats in text files": Case(("data.format: chat",), {}, {"data": {"train": "text", "format": "chat"}}),
    "binary text": Case(("b.txt", "NUL byte"), {"b.txt": b"a\0\x01\xff" * 100}, {"data": {"train": "b.txt"}}, INIT),
    "no data": Case(("data", "no/such"), {}, {"data": {"train": "./no/such"}}, INIT),
    "empty data": Case(("empty",), {"b.txt": ""}, {"data": {"train": "b.txt"}}, INIT),
    "no held-out data": Case(("data.eval",), {}, {"data": {"train": "text", "eval": "absent.jsonl"}}),
    "empty held-out data": Case(("empty",), {"e.txt": ""}, {"data": {"train": "text", "eval": "e.txt"}}),
    "rows beyond the model": Case(("256", "128"), {}, {"train": {"seq_len": 256, "tokens_per_step": 512}}),
    "vocabulary of another model": Case(
        ("400", "320"), {"words/tokenizer.json": WORDS}, {"model": {"config": "model", "tokenizer": "words"}}
    ),
    "tokenizer of other rules": Case(("model.tokenizer", "qwen2"), config(model_type="qwen2")),
    "encoder": Case(
        ("bert cannot be trained: a token sees those after it", "is_decoder=true"), config(model_type="bert"), {},
        (*INIT, "plan model"),
    ),
    "adapters in place of a model": Case(
        ("shardwise import lora lora-merged --base org/base",),
        {"lora/adapter_config.json": json.dumps({"base_model_name_or_path": "org/base"})},
        {"model": {"name": "lora"}}, INIT,
    ),
    "a loss that is more than a cross-entropy": Case(  # of a router
        ("output_router_logits is true, which adds a loss",),
        config(model_type="olmoe", num_experts=4, output_router_logits=True), {}, ("train job.yaml",),
    ),
    "no model": Case(("did you mean qwen2.5-7b?",), {}, {"model": {"name": "qwen2.5-7"}}, INIT),
    "truncated safetensors": Case(("model.safetensors",), TRUNCATED, {"model": {"name": "weights"}}, TRAIN),
    "folder without config": Case(("config.json",), {"w/x": b""}, {"model": {"config": "w"}}),
    "config.json is not JSON": Case(("config.json",), {"model/config.json": "{"}),
    "a size of the model is missing": Case(("hidden_size",), config(hidden_size=None)),
}  # fmt: skip
JOB = {
    "YAML syntax error": Case(("job.yaml", "line"), {"job.yaml": "model: {config: [model\n"}),
    "job file is not UTF-8": Case(("job.yaml", "UTF-8"), {"job.yaml": b"model: \xff\xfe"}),
    "a kernel the machine cannot run": Case(("flash",), {}, {"pin": {"attention": "flash"}}, ("plan job.yaml",)),
    "wandb without a login": Case(("log.wandb=offline",), {}, {"log": {"wandb": "online"}}, TRAIN),
    "a missing program": Case(
        ("log.notify", "no-such-program"), {}, {"log": {"notify": "no-such-program --me"}}, TRAIN
    ),
}  # fmt: skip
FILES: dict[str, str | bytes] = {
    "used/plan.json": "{}", "h.json": "{", "p.json": '{"format": 99}', "hf/config.json": "{}", "chats.jsonl": CHATS,
    "script.py": 'import os\nprint("a: b")\n',
}  # fmt: skip
TYPED = {  # commands, and facts of their refusal
    "plan absent.yaml": ("absent.yaml",),
    "plan text": ("text",),
    "train job.yaml --run-dir used": ("used", "--resume"),
    "train job.yaml --hardware 1xT4": ("shardwise plan job.yaml --hardware 1xT4",),
    "train job.yaml --resume": ("--resume", "runs/tiny"),
    "train p.json": ("p.json",),
    "plan job.yaml --hardware 8xH300": ("H200",),
    "plan job.yaml --hardware h.json": ("h.json",),
    "plan job.yaml --take 999": ("999",),
    "plan job.yaml --gpus 63": ("63",),
    "plan job.yaml --vram apples": ("apples",),
    "plan job.yaml --vram 8": ("8 bytes", "8GiB"),
    "plan job.yaml --vram 0GiB": ("0GiB",),
    "plan job.yaml --fast": ("--fast",),
    "trian job.yaml": ("trian is no command; did you mean train?",),
    "frobnicate": ("frobnicate is no command; there are init, probe, plan, ",),
    "train job.yaml --epochs 2": ("did you mean train.epochs=2?",),
    "train job.yaml --learning-rate=1e-4 --load-in-4bit": ("did you mean train.lr=1e-4 train.method=qlora?",),
    "train job.yaml --cutoff_len": ("did you mean train.seq_len=...?",),
    "train --model m --data a.jsonl train.lr=1": ("did you mean model.name=m data.train=a.jsonl?",),
    "train job.yaml --lr 1 --frobnicate": ("--lr --frobnicate; see shardwise train --help",),
    "status --epochs": ("--epochs; see shardwise status --help",),
    "plan job.yaml train.lora.r=8": ("train.lora.rank",),
    "plan job.yaml pin.quantization=nf4": ("train.method=qlora",),
    "train chats.jsonl": ("shardwise init --model MODEL --data chats.jsonl",),
    "plan script.py": ("own-script.md",),
    "chat hf": ("RUN/export",),
    "status text": ("shardwise status",),
    "watch run": ("run:",),
    "ladder nothing.yaml": ("nothing.yaml:",),
    "ladder job.yaml --steps 2": ("third step",),
    "ladder job.yaml --html no/folder/page.html": ("no/folder",),
    "profile job.yaml --steps 4": ("5",),
    "plan job.yaml --nodes 2 --hardware 8xH200 --hardware 8xH200": ("--partition",),
    "plan job.yaml --trial 2 --hardware 8xH100-SXM5-80GB": ("8xH100-SXM5-80GB",),  # a trial that could decide nothing
    "train job.yaml --trial 2 --resume": ("--resume",),
    "train job.yaml --trial 2 --dry-run": ("--dry-run",),
    "train kept.json --trial 2": ("kept.json",),
    "report text": ("text:", "shardwise status"),
    "export text out": ("text:",),
    "init --model m --data d -o job.yaml": ("job.yaml:",),
}
CASES = {
    **DATA, **JOB, **{command: Case(facts, FILES, {}, (command,)) for command, facts in TYPED.items()},
    "no permission to write": Case(("/proc/none",), {}, {}, ("train job.yaml --run-dir /proc/none",), code=4),
    "unknown model": Case(("shardwise fetch",), {}, {}, ("plan some/unknown-model --hardware 1xCPU",), code=4),
    "partition without Slurm": Case(("scontrol",), {}, {}, ("plan job.yaml --partition x",), code=4),
}  # fmt: skip


def everything_in(folder: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_relative_to(folder / "cache")
    }


@pytest.mark.parametrize("name", CASES)
def test_each_case_has_its_lines_and_its_code(name, workplace, monkeypatch, capsys):
    case = CASES[name]
    workplace.write_job(**case.job)
    job = yaml.safe_load(workplace.job.read_text())
    model = job["model"].get("name")
    if model:
        workplace.job.write_text(yaml.safe_dump({**job, "model": {"name": model}}))
    for path, content in case.files.items():
        (workplace.folder / path).parent.mkdir(exist_ok=True)
        (workplace.folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(workplace.folder)
    for name in set(os.environ) - set(workplace.environment):
        monkeypatch.delenv(name)
    for name, value in (workplace.environment | {"HF_HUB_OFFLINE": "1"}).items():
        monkeypatch.setenv(name, value)
    before = everything_in(workplace.folder)
    for command in case.commands:
        words = command.format(model=model or "model", data=job["data"]["train"]).split()
        assert main(words) == case.code, command
        printed = capsys.readouterr()
        assert "fits, about" not in printed.out, "an error comes before the plan"
        told = printed.err
        assert 1 <= len(told.splitlines()) <= 3 and all(fact in told for fact in case.facts), f"{command}\n{told}"
        assert "Traceback" not in told and "internal error" not in told
        assert everything_in(workplace.folder) == before


def test_debug_shows_the_traceback(capsys):
    assert main(["plan", "absent.yaml", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_run_does_not_resume_with_another_model(trained):
    place, run_dir, _ = trained
    path = place.folder / "model" / "config.json"
    content, before = path.read_text(), everything_in(run_dir)
    path.write_text(json.dumps({**TINY_CONFIG, "hidden_size": 64}))
    try:
        answer = place.run("train", "job.yaml", "--resume", "--run-dir", run_dir, check=False)
    finally:
        path.write_text(content)
    assert answer.returncode == 2 and "hidden_size" in answer.stderr, answer.stderr
    assert len(answer.stderr.splitlines()) <= 3 and everything_in(run_dir) == before


def test_a_disk_too_small_for_a_checkpoint_is_told_before_training(workplace, tmp_path):
    with mounted_disk(tmp_path / "small", "256k") as disk:
        answer = workplace.run("train", "job.yaml", "--run-dir", disk / "run", check=False)
    assert answer.returncode == 4 and "free" in answer.stderr, answer.stderr
    assert len(answer.stderr.splitlines()) <= 3
