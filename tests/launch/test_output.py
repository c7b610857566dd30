"""Output that cannot be written or shown ends in a line and a documented code, in every command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from reported_run import write_run
from typed_command import typed

from shardwise.launch.options import COMMANDS
from shardwise.trainer.spec.errors import ExitCode

READERS = tuple(
    line.split()
    for line in (
        "report run", "report run --json", "status run", "status run --json", "logs run", "watch run --once",
        "watch run --once --json", "schema",
    )
)  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def redirected(where: str, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "shardwise.launch.cli", *words]
    return subprocess.run(["sh", "-c", f'exec "$@" {where}', "sh", *argv], capture_output=True, text=True, check=False)


@pytest.mark.cold
@pytest.mark.parametrize(("where", "fact"), [(">/dev/full", "No space left"), (">&-", "Bad file descriptor")])
def test_output_that_cannot_be_written_is_a_fault_of_the_environment(here, where, fact):
    write_run(here / "run")
    for words in (READERS[0], READERS[3], READERS[5], READERS[7]):
        ended = redirected(where, *words)
        assert (ended.returncode, ended.stderr.count("\n")) == (int(ExitCode.ENVIRONMENT), 1), (words, ended.stderr)
        assert fact in ended.stderr


@pytest.mark.cold
def test_a_command_that_does_more_than_print_goes_on_without_its_output(here):
    """Only its own outcome decides about its exit code."""
    (here / "rows.jsonl").write_text('{"text": "a row"}\n' * 20)
    for where in (">/dev/full", ">&-", ">/dev/full 2>&1", ">&- 2>&-"):
        ended = redirected(where, "init", "--model", "gpt2", "--data", "rows.jsonl", "-o", "job.yaml")
        assert ended.returncode == 0 and (here / "job.yaml").is_file(), (where, ended.stderr)
        (here / "job.yaml").unlink()
    needing = {name for name, command in COMMANDS.items() if not command.needs_output}
    assert needing == {"init", "train", "submit", "fetch", "cancel", "export", "import", "workspace"}


@pytest.mark.cold
@pytest.mark.parametrize("before", ["", "import threading; "], ids=["at once", "after its threads"])
def test_a_process_ends_with_its_whole_output_its_code_and_what_was_registered(here, before):
    begin = f"{before}import atexit; atexit.register(print, 'registered')"
    program = f"{begin}; from shardwise.launch.cli import run_and_exit; run_and_exit()"
    for arguments, code in ((["schema"], ExitCode.DONE), (["report", "nowhere"], ExitCode.INPUT)):
        argv = [sys.executable, "-c", program, *arguments]
        ended = subprocess.run(argv, capture_output=True, text=True, check=False)
        shown, _, last = ended.stdout.removesuffix("\n").rpartition("registered")
        assert (ended.returncode, last) == (int(code), ""), ended
        assert json.loads(shown) if code is ExitCode.DONE else "nowhere" in ended.stderr


def test_a_folder_whose_name_is_not_utf_8_is_shown_and_never_an_internal_error(here, monkeypatch, capfd):
    name = os.fsdecode(b"caf\xe9")
    write_run(here / name)
    for words in READERS[:-1]:
        answer = typed(capfd, *(name if word == "run" else word for word in words))
        assert (answer.code, answer.err) == (0, ""), words
        if words[0] != "logs":
            assert r"caf\udce9" in answer.out, words
    assert os.fsencode(json.loads(typed(capfd, "status", name, "--json").out)["run_dir"]) == b"caf\xe9"
    assert typed(capfd, "report", name, "--html", "page.html").code == 0
    refused = typed(capfd, "plan", "gpt2", "--hardware", "1xA100-SXM4-80GB", "--data", name, "--json")
    assert refused.code == int(ExitCode.INPUT) and "internal error" not in refused.err


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"probe", "doctor", "cache", "schema", "workspace"}))
def test_a_path_that_is_too_long_is_an_error_of_the_input(here, capsys, command):
    name = "x" * 300
    words = {"init": ["--model", name, "--data", "rows"], "export": [name, "out"], "import": [name, "out"]}
    answer = typed(capsys, command, *words.get(command, [name]))
    assert answer.code == int(ExitCode.INPUT) and "File name too long" in answer.err, answer.err
    assert len(answer.err.splitlines()) <= 3
