"""Faults of the input: one to three lines, the documented exit code, and no file lost or left behind."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from workplace_factory import TINY_CONFIG, Workplace

from shardwise.launch.cli import main

TRAIN = "train job.yaml"
Damage = Callable[[Workplace], object]


class Case(NamedTuple):
    """A change to a good workplace, a command, and the exit code and facts that it must report."""

    name: str
    prepare: Damage
    expected: tuple[str, ...]
    command: str = "plan job.yaml"
    code: int = 2


def nothing(_: Workplace) -> None:
    """The workplace stays good."""


def text(content: str) -> Damage:
    return lambda place: place.job.write_text(content)


def job(**sections: object) -> Damage:
    return lambda place: place.write_job(**sections)


def append(line: str) -> Damage:
    return lambda place: place.job.write_text(place.job.read_text() + line + "\n")


def config(**changes: object) -> Damage:
    content = json.dumps({**TINY_CONFIG, **changes})
    return lambda place: (place.folder / "model" / "config.json").write_text(content)


def file(name: str, content: bytes) -> Damage:
    def write(place: Workplace) -> None:
        path = place.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    return write


def both(*steps: Damage) -> Damage:
    return lambda place: [step(place) for step in steps]


def weights(content: bytes) -> Damage:
    """A model folder that has everything but sound weights."""
    tokenizer = json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}).encode()
    return both(
        file("weights/config.json", json.dumps(TINY_CONFIG).encode()),
        file("weights/tokenizer.json", tokenizer),
        file("weights/model.safetensors", content),
        job(model={"name": "weights", "config": None, "tokenizer": None}),
        lambda place: _without_none(place),
    )


def _without_none(place: Workplace) -> None:
    import yaml

    tree = yaml.safe_load(place.job.read_text())
    tree["model"] = {key: value for key, value in tree["model"].items() if value is not None}
    place.job.write_text(yaml.safe_dump(tree))


def tokenizer_of(size: int) -> bytes:
    vocabulary = {f"t{number}": number for number in range(size)}
    return json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}}).encode()


HEADER = b'{"model.embed_tokens.weight": {"dtype": "F32", "shape": [320, 32], "data_offsets": [0, 40960]}}'
TRUNCATED = struct.pack("<Q", len(HEADER)) + HEADER + b"\0" * 100

CASES = [
    Case("missing job file", nothing, ("absent.yaml",), "plan absent.yaml"),
    Case("job file is a folder", nothing, ("text",), "plan text"),
    Case("YAML syntax error", text("model: {config: [model\n"), ("job.yaml", "line")),
    Case("job file is not UTF-8", file("job.yaml", b"model: \xff\xfe"), ("job.yaml", "UTF-8")),
    Case("unknown section", append("modle: {}"), ("modle", "model")),
    Case("two problems", job(train={"seq_len": "long"}, pin={"sharding": "zero9"}), ("train.seq_len", "zero9")),
    Case("unknown key", job(pin={"micro_bach": 2}), ("pin.micro_bach", "pin.micro_batch")),
    Case("override without a value", nothing, ("train.lr", "="), "plan job.yaml train.lr"),
    Case("sequence too long", job(train={"seq_len": 256, "tokens_per_step": 512}), ("256", "128")),
    Case("missing data path", job(data={"train": "./no/such"}), ("data.train", "no/such"), TRAIN),
    Case("empty data", both(file("void/a.txt", b""), job(data={"train": "void"})), ("empty",), TRAIN),
    Case("binary file", both(file("b.txt", b"a\0\x01\xff" * 100), job(data={"train": "b.txt"})), ("b.txt",), TRAIN),
    Case("folder without config", both(file("w/x", b""), job(model={"config": "w"})), ("config.json",)),
    Case("config.json is not JSON", file("model/config.json", b"{"), ("config.json",)),
    Case("unsupported architecture", config(model_type="bert"), ("bert", "llama")),
    Case("a size of the model is missing", config(hidden_size=None), ("hidden_size",)),
    Case("truncated safetensors", weights(TRUNCATED), ("model.safetensors",), TRAIN),
    Case(
        "vocabulary mismatch",
        both(file("words/tokenizer.json", tokenizer_of(400)), job(model={"config": "model", "tokenizer": "words"})),
        ("400", "320"),
        TRAIN,
    ),
    Case("no permission to write", nothing, ("/proc/none",), f"{TRAIN} --run-dir /proc/none", 4),
    Case("used run directory", file("used/plan.json", b"{}"), ("used", "--resume"), f"{TRAIN} --run-dir used"),
    Case("ranks on a card", nothing, ("shardwise plan job.yaml --hardware 1xT4",), f"{TRAIN} --hardware 1xT4"),
    Case("resume without a run", nothing, ("--resume", "runs/tiny"), f"{TRAIN} --resume"),
    Case("a kernel the machine cannot run", job(pin={"attention": "flash"}), ("flash",)),
    Case("a method that needs weights", job(train={"method": "qlora"}), ("qlora",)),
    Case("clash", job(pin={"sharding": "ddp", "offload": "optimizer"}), ("pin.offload", "pin.sharding")),
    Case("fits nowhere", job(model={"config": "llama-3.1-70b"}), ("GiB",), "plan job.yaml --hardware 1xT4", 3),
    Case("unknown GPU", nothing, ("H200",), "plan job.yaml --hardware 8xH300"),
    Case("nonsense for hardware", nothing, ("0x0x",), "plan job.yaml --hardware 0x0x"),
    Case("damaged hardware file", file("h.json", b"{"), ("h.json",), "plan job.yaml --hardware h.json"),
    Case("plan of another format", file("p.json", b'{"format": 99}'), ("p.json",), "train p.json"),
    Case("candidate out of range", nothing, ("999",), "plan job.yaml --take 999"),
    Case("GPU that is not there", nothing, ("63",), "plan job.yaml --gpus 63"),
    Case("vram is no size", nothing, ("apples",), "plan job.yaml --vram apples"),
    Case("vram without a unit", nothing, ("8 bytes", "8GiB"), "plan job.yaml --vram 8"),
    Case("vram of zero", nothing, ("0GiB",), "plan job.yaml --vram 0GiB"),
    Case("unknown option", nothing, ("--fast",), "plan job.yaml --fast"),
    Case("unknown command", nothing, ("trian", "train"), "trian job.yaml"),
    Case("no run to watch", nothing, ("run:",), "watch run"),
    Case("no job for a ladder", nothing, ("nothing.yaml:",), "ladder nothing.yaml"),
    Case("a rung that is none", nothing, ("chunked?",), "ladder job.yaml --rungs fp32,chunkd"),
    Case("too few steps of a ladder", nothing, ("third step",), "ladder job.yaml --steps 2"),
    Case("a page in no folder", nothing, ("no/folder",), "ladder job.yaml --html no/folder/page.html"),
    Case("too few steps of a profile", nothing, ("5",), "profile job.yaml --steps 4"),
    Case("partition without Slurm", nothing, ("scontrol",), "plan job.yaml --partition x", 4),
    Case(
        "a partition and two machines", nothing, ("--partition",), "plan job.yaml --nodes 2" + 2 * " --hardware 8xH200"
    ),
    Case("wandb without a login", job(log={"wandb": "online"}), ("log.wandb=offline",), TRAIN),
    Case("a missing program", job(log={"notify": "no-such-program --me"}), ("log.notify", "no-such-program"), TRAIN),
    Case("a tokenizer that could not be read back", config(model_type="qwen2"), ("model.tokenizer", "qwen2")),
    Case("report of no run", nothing, ("text:",), "report text"),
    Case("export of no run", nothing, ("text:",), "export text out"),
    Case("init over a file", nothing, ("job.yaml:",), "init --model m --data d -o job.yaml"),
]


def everything_in(folder: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_relative_to(folder / "cache")
    }


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_each_case_has_its_lines_and_its_code(case, workplace, monkeypatch, capsys):
    case.prepare(workplace)
    monkeypatch.chdir(workplace.folder)
    for name in set(os.environ) - set(workplace.environment):
        monkeypatch.delenv(name)
    for name, value in workplace.environment.items():
        monkeypatch.setenv(name, value)
    before = everything_in(workplace.folder)

    code = main(case.command.split())

    printed = capsys.readouterr()
    assert "fits, about" not in printed.out, "an error comes before the plan"
    lines = printed.err.splitlines()
    told = "\n".join(lines)
    assert code == case.code, told
    assert 1 <= len(lines) <= 3, told
    for words in case.expected:
        assert words in told
    assert "Traceback" not in told and "internal error" not in told
    assert everything_in(workplace.folder) == before


def test_debug_shows_the_traceback(workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace.folder)
    assert main(["plan", "absent.yaml", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fact", "name", "old", "new"),
    [
        ("hidden_size", "model/config.json", b'"hidden_size": 32', b'"hidden_size": 64'),
        ("dataset", "text/00.txt", b"the cat", b"the rat"),
    ],
)
def test_a_run_does_not_resume_with_another_model_or_data_set(trained, fact, name, old, new):
    place, run_dir, _ = trained()
    path = place.folder / name
    content, before = path.read_bytes(), everything_in(run_dir)
    assert old in content
    path.write_bytes(content.replace(old, new))
    try:
        answer = place.run("train", "job.yaml", "--resume", "--run-dir", run_dir, check=False)
    finally:
        path.write_bytes(content)
    assert answer.returncode == 2 and fact in answer.stderr, answer.stderr
    assert len(answer.stderr.splitlines()) <= 3 and everything_in(run_dir) == before


def test_a_disk_too_small_for_a_checkpoint_is_told_before_training(workplace, small_disk):
    answer = workplace.run("train", "job.yaml", "--run-dir", small_disk / "run", check=False)
    assert answer.returncode == 4 and "free" in answer.stderr, answer.stderr
    assert len(answer.stderr.splitlines()) <= 3
