"""Mistakes that people make early: one to three lines that name what to do; the list of commands in groups."""

import json
import shlex
from pathlib import Path

import pytest
from typed_command import Run, in_empty_home, typed

from shardwise.launch.options import COMMANDS, GROUPS
from shardwise.trainer.spec.errors import ExitCode

CARD = "--hardware 1xH100-SXM5-80GB"
MISTAKES = {
    "a name of another trainer": ("plan job.yaml train.lora.r=8", "train.lora.rank"),
    "quantization": ("plan job.yaml pin.quantization=nf4", "train.method=qlora"),
    "data as a job": ("train chats.jsonl", "shardwise init --model MODEL --data chats.jsonl"),
    "a script as a job": ("plan script.py", "own-script.md"),
    "a command": ("trian job.yaml", "did you mean train?"),
    "an option for a setting": ("train job.yaml --epochs 2", "train.epochs=2"),
    "an unknown model": (f"plan some/unknown-model {CARD}", "shardwise fetch"),
    "a model to chat with": ("chat hf", "RUN/export"),
    "no run": ("report empty", "shardwise status"),
    "neither a run": ("status empty", "shardwise status"),
    "a file in Latin-1": ("plan job.yaml data.train=latin.txt", "iconv -f latin1 -t utf-8 "),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    in_empty_home(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chats.jsonl").write_text(50 * f"{json.dumps({'messages': turns})}\n")
    (tmp_path / "script.py").write_text('import os\nprint("a: b")\n')
    (tmp_path / "job.yaml").write_text("model: {name: llama-3.2-1b}\ndata: {train: chats.jsonl, eval: none}\n")
    (tmp_path / "latin.txt").write_bytes("schön\n".encode("latin1"))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.fixture
def shell(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`shardwise LINE` in that folder."""
    return lambda line: typed(capsys, *shlex.split(line))


@pytest.mark.parametrize(("line", "way_on"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_typical_mistake_ends_in_three_lines_at_most_with_a_way_on(shell: Run, line: str, way_on: str) -> None:
    code, out, err = shell(line)
    assert code in (ExitCode.INPUT, ExitCode.ENVIRONMENT) and out == ""
    assert way_on in err and len(err.splitlines()) <= 3, err


@pytest.mark.parametrize("setting", ["train.lora.rank=8", "train.lr=1"])
def test_a_setting_that_does_nothing_or_ruins_a_run_is_a_warning_of_its_plan(shell: Run, setting: str) -> None:
    code, out, _ = shell(f"plan job.yaml train.method=full {setting} {CARD}")
    assert code == ExitCode.DONE and f"WARNING: {setting.partition('=')[0]} " in out


def test_every_command_is_in_one_group_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    with pytest.raises(SystemExit):
        typed(capsys, "--help")
    lines = capsys.readouterr().out.splitlines()
    places = [lines.index(f"  {title}") for title in GROUPS]
    assert places == sorted(places)
