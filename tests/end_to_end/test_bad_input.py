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

H100 = "8xH100-SXM5-80GB"
Damage = Callable[[Workplace], object]


class Case(NamedTuple):
    """A change to a good workplace, a command, and the exit code and facts that it must report."""

    name: str
    prepare: Damage
    command: tuple[str, ...]
    code: int
    expected: tuple[str, ...]


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
    Case("missing job file", nothing, ("plan", "absent.yaml"), 2, ("absent.yaml",)),
    Case("job file is a folder", nothing, ("plan", "text"), 2, ("text",)),
    Case("empty job file", text(""), ("plan", "job.yaml"), 2, ("job.yaml", "empty")),
    Case("YAML syntax error", text("model: {config: [model\n"), ("plan", "job.yaml"), 2, ("job.yaml", "line")),
    Case("job file is a list", text("- model\n"), ("plan", "job.yaml"), 2, ("job.yaml",)),
    Case("job file is not UTF-8", file("job.yaml", b"model: \xff\xfe"), ("plan", "job.yaml"), 2, ("job.yaml", "UTF-8")),
    Case("duplicate key", append("output: twice"), ("plan", "job.yaml"), 2, ("output", "twice")),
    Case("unknown section", append("modle: {}"), ("plan", "job.yaml"), 2, ("modle", "model")),
    Case("unknown key", job(pin={"micro_bach": 2}), ("plan", "job.yaml"), 2, ("pin.micro_bach", "pin.micro_batch")),
    Case("wrong type", job(train={"steps": "many"}), ("plan", "job.yaml"), 2, ("train.steps", "many")),
    Case("negative size", job(train={"seq_len": -4}), ("plan", "job.yaml"), 2, ("train.seq_len", "-4")),
    Case("zero size", job(train={"tokens_per_step": 0}), ("plan", "job.yaml"), 2, ("train.tokens_per_step", "0")),
    Case(
        "two problems at once",
        job(train={"seq_len": "long"}, pin={"sharding": "zero9"}),
        ("plan", "job.yaml"),
        2,
        ("train.seq_len", "pin.sharding", "zero9"),
    ),
    Case("override without a value", nothing, ("plan", "job.yaml", "train.lr"), 2, ("train.lr", "=")),
    Case("override of an unknown key", nothing, ("plan", "job.yaml", "train.lt=1"), 2, ("train.lt", "train.lr")),
    Case(
        "sequence longer than the model allows",
        job(train={"seq_len": 256, "tokens_per_step": 512}),
        ("plan", "job.yaml"),
        2,
        ("256", "128"),
    ),
    Case("missing data path", job(data={"train": "./no/such"}), ("train", "job.yaml"), 2, ("data.train", "no/such")),
    Case(
        "empty data",
        both(file("void/a.txt", b""), job(data={"train": "void"})),
        ("train", "job.yaml"),
        2,
        ("empty",),
    ),
    Case(
        "binary file as text",
        both(file("blob.txt", b"text\0\x01\xff" * 100), job(data={"train": "blob.txt"})),
        ("train", "job.yaml"),
        2,
        ("blob.txt",),
    ),
    Case(
        "model folder without config.json",
        both(file("weights/readme", b""), job(model={"config": "weights"})),
        ("plan", "job.yaml"),
        2,
        ("config.json",),
    ),
    Case("config.json is not JSON", file("model/config.json", b"{"), ("plan", "job.yaml"), 2, ("config.json",)),
    Case("unsupported architecture", config(model_type="bert"), ("plan", "job.yaml"), 2, ("bert", "llama")),
    Case("a size of the model is missing", config(hidden_size=None), ("plan", "job.yaml"), 2, ("hidden_size",)),
    Case("damaged safetensors", weights(b"\xff" * 64), ("train", "job.yaml"), 2, ("model.safetensors",)),
    Case("truncated safetensors", weights(TRUNCATED), ("train", "job.yaml"), 2, ("model.safetensors",)),
    Case(
        "vocabulary mismatch",
        both(
            file("words/tokenizer.json", tokenizer_of(400)),
            job(model={"config": "model", "tokenizer": "words"}),
        ),
        ("train", "job.yaml"),
        2,
        ("400", "320"),
    ),
    Case("no permission to write", nothing, ("train", "job.yaml", "--run-dir", "/proc/none"), 4, ("/proc/none",)),
    Case(
        "run directory is used",
        file("used/plan.json", b"{}"),
        ("train", "job.yaml", "--run-dir", "used"),
        2,
        ("used", "--resume"),
    ),
    Case("resume without a run", nothing, ("train", "job.yaml", "--resume"), 2, ("--resume", "runs/tiny")),
    Case(
        "a kernel the machine cannot run",
        job(pin={"attention": "flash"}),
        ("plan", "job.yaml"),
        2,
        ("flash",),
    ),
    Case(
        "a method that needs weights to start from",
        job(train={"method": "qlora"}),
        ("plan", "job.yaml"),
        2,
        ("qlora",),
    ),
    Case(
        "two settings that exclude each other",
        job(pin={"sharding": "ddp", "offload": "optimizer"}),
        ("plan", "job.yaml"),
        2,
        ("pin.offload", "pin.sharding"),
    ),
    Case(
        "two lengths of the run",
        job(train={"epochs": 2}),
        ("plan", "job.yaml"),
        2,
        ("train.epochs", "train.steps"),
    ),
    Case(
        "fits nowhere",
        job(model={"config": "llama-3.1-70b"}),
        ("plan", "job.yaml", "--hardware", "1xT4"),
        3,
        ("GiB",),
    ),
    Case("unknown GPU", nothing, ("plan", "job.yaml", "--hardware", "8xH300"), 2, ("H200",)),
    Case("nonsense for hardware", nothing, ("plan", "job.yaml", "--hardware", "0x0x"), 2, ("0x0x",)),
    Case(
        "hardware file is damaged", file("h.json", b"{"), ("plan", "job.yaml", "--hardware", "h.json"), 2, ("h.json",)
    ),
    Case("plan of another format", file("p.json", b'{"format": 99}'), ("train", "p.json"), 2, ("p.json",)),
    Case("candidate out of range", nothing, ("plan", "job.yaml", "--take", "999"), 2, ("999",)),
    Case("GPU that is not there", nothing, ("plan", "job.yaml", "--gpus", "63"), 2, ("63",)),
    Case("vram is no size", nothing, ("plan", "job.yaml", "--vram", "8 apples"), 2, ("8 apples",)),
    Case("vram without a unit", nothing, ("plan", "job.yaml", "--vram", "8"), 2, ("8 bytes", "8GiB")),
    Case("vram of zero", nothing, ("plan", "job.yaml", "--vram", "0GiB"), 2, ("0GiB",)),
    Case("unknown option", nothing, ("plan", "job.yaml", "--fast"), 2, ("--fast",)),
    Case("unknown command", nothing, ("trian", "job.yaml"), 2, ("trian", "train")),
    Case("no run to watch", nothing, ("watch", "run"), 2, ("run:",)),
    Case("a page of no run", nothing, ("report", "run", "--html", "x"), 2, ("run:",)),
    Case("no job for a ladder", nothing, ("ladder", "nothing.yaml"), 2, ("nothing.yaml:",)),
    Case("partition without Slurm", nothing, ("plan", "job.yaml", "--partition", "x"), 4, ("scontrol",)),
    Case("nodes without Slurm", nothing, ("plan", "job.yaml", "--nodes", "2"), 4, ("scontrol",)),
    Case(
        "a partition and two machines",
        nothing,
        ("plan", "job.yaml", "--partition", "x", "--hardware", "8xH200", "--hardware", "1xRTX-4090"),
        2,
        ("--partition", "--hardware"),
    ),
    Case(
        "wandb online without a login",
        job(log={"wandb": "online"}),
        ("train", "job.yaml"),
        2,
        ("log.wandb", "wandb login", "log.wandb=offline"),
    ),
    Case(
        "a program to notify that is not there",
        job(log={"notify": "no-such-program --to me"}),
        ("train", "job.yaml"),
        2,
        ("log.notify", "no-such-program"),
    ),
    Case(
        "a tokenizer that could not be read back",
        both(config(model_type="qwen2")),
        ("plan", "job.yaml"),
        2,
        ("model.tokenizer", "qwen2"),
    ),
    Case("report of no run", nothing, ("report", "text"), 2, ("text:",)),
    Case("export of no run", nothing, ("export", "text", "out"), 2, ("text:",)),
    Case("init over a file", nothing, ("init", "--model", "m", "--data", "d", "-o", "job.yaml"), 2, ("job.yaml:",)),
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

    code = main(case.command)

    lines = capsys.readouterr().err.splitlines()
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


class TestARunThatIsThere:
    """Cases that need a finished run."""

    def test_resume_with_another_model(self, trained):
        place, run_dir, _ = trained()
        self.refused(
            place,
            run_dir,
            "hidden_size",
            place.folder / "model" / "config.json",
            b'"hidden_size": 32',
            b'"hidden_size": 64',
        )

    def test_resume_with_another_dataset(self, trained):
        place, run_dir, _ = trained()
        self.refused(place, run_dir, "dataset", place.folder / "text" / "00.txt", b"the cat", b"the rat")

    def test_resume_without_a_checkpoint(self, trained, tmp_path):
        place, run_dir, _ = trained()
        copy = tmp_path / "copy"
        copy.mkdir()
        for name in ("plan.json", "metrics.jsonl"):  # it did train
            (copy / name).write_bytes((run_dir / name).read_bytes())
        answer = place.run("train", "job.yaml", "--resume", "--run-dir", copy, check=False)
        assert answer.returncode == 2 and f"{copy}" in answer.stderr and "checkpoint" in answer.stderr

    def refused(self, place, run_dir, expected, path, old, new):
        content = path.read_bytes()
        assert old in content
        path.write_bytes(content.replace(old, new))
        before = everything_in(run_dir)
        try:
            answer = place.run("train", "job.yaml", "--resume", "--run-dir", run_dir, check=False)
        finally:
            path.write_bytes(content)
        assert answer.returncode == 2 and expected in answer.stderr, answer.stderr
        assert len(answer.stderr.splitlines()) <= 3 and everything_in(run_dir) == before


def test_a_disk_too_small_for_a_checkpoint_is_told_before_training(workplace, small_disk):
    answer = workplace.run("train", "job.yaml", "--run-dir", small_disk / "run", check=False)
    assert answer.returncode == 4 and "free" in answer.stderr, answer.stderr
    assert len(answer.stderr.splitlines()) <= 3
