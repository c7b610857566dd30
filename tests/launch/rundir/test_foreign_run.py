"""A run directory that somebody else made: no command waits for its files, and none prints what a terminal obeys."""

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from reported_run import report_for, step_rows, tiny_plan, write_run
from run_factory import write_attempt, write_start, write_submission
from typed_command import typed

from shardwise.launch.engine.operators import _refuse_foreign
from shardwise.launch.rundir.lock import CANCEL_FLAG, LOCK, locked
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.messages.submission import CHAIN_FILE, FILE_NAME, JOBS_FILE, Submission
from shardwise.trainer.spec.report import Sample
from shardwise.trainer.spec.value import Value

FILES = (
    "plan.json", "report.json", "metrics.jsonl", FILE_NAME, JOBS_FILE, CHAIN_FILE, LOCK, CANCEL_FLAG, "wandb.json",
    "slurm-7.out", "attempts/1/plan.json", "attempts/1/status.json", "attempts/1/heartbeats/rank-0",
    "attempts/1/logs/rank-0.log", "attempts/1/logs/launcher.log", "checkpoints/step-00000004/MANIFEST.json",
)  # fmt: skip
COMMANDS = tuple(
    line.split()
    for line in (
        "report run --html page.html", "report run --json", "report run run", "watch run --once", "report run",
        "status", "status run", "watch run --once --json", "status run --json", "logs run", "logs run --attempt 1",
    )
)  # fmt: skip
EVIL = "\x1b[2J\x1b]0;t\x07\x9b31m\r\u202eevil"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A run with all files; a command that takes 20 s fails."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nonexistent")
    run = tmp_path / "run"
    write_run(run)
    write_attempt(run, steps=[1, 2])
    write_submission(run, "7")
    write_start(run, "7")
    for name in FILES:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        if not (run / name).exists():
            (run / name).write_text("a line\n")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run").symlink_to(run)

    def give_up(*_: object) -> None:
        raise AssertionError("the command waits")

    before = signal.signal(signal.SIGALRM, give_up)
    yield run
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


KINDS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a socket": _make_socket,
    "a folder": Path.mkdir,
    "a circle": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", ["a FIFO", *(pytest.param(kind, marks=pytest.mark.long) for kind in [*KINDS][1:])])
def test_a_file_that_is_no_file_is_never_waited_for(run_dir, capsys, kind):
    for name in FILES:
        content = (run_dir / name).read_bytes()
        (run_dir / name).unlink()
        KINDS[kind](run_dir / name)
        for words in COMMANDS[:: 3 if kind == "a FIFO" else 1]:
            signal.alarm(20)
            answer = typed(capsys, *words)
            assert answer.code in (0, 2, 4) and "internal error" not in answer.err, (name, words, answer.err)
        signal.alarm(0)
        (run_dir / name).rmdir() if kind == "a folder" else (run_dir / name).unlink()
        (run_dir / name).write_bytes(content)


def _poisoned(value: Value) -> Any:
    """The value as JSON, with `EVIL` in each text that may be anything."""
    tree = json.loads(msgspec.json.encode(value))
    is_free: dict[str, bool] = {}  # by key: text, not the name of a member of an enum

    def poison(node: Any, name: str) -> None:
        for key, part in list(node.items() if isinstance(node, dict) else enumerate(node)):
            known = name if isinstance(node, list) else key
            if isinstance(part, dict | list):
                poison(part, known)
            elif isinstance(part, str) and is_free.get(known, True):
                node[key] = part + EVIL
                if known not in is_free:
                    try:
                        msgspec.convert(tree, type(value))
                        is_free[known] = True
                    except (msgspec.ValidationError, ValueError):
                        is_free[known], node[key] = False, part

    poison(tree, "")
    msgspec.convert(tree, type(value))
    return tree


def test_no_text_of_a_file_reaches_a_terminal_as_a_command(run_dir, capsys):
    plan = tiny_plan(notes=("a note",), fallbacks=())
    plan = msgspec.structs.replace(plan, candidates=plan.candidates[:1], rejections=plan.rejections[:2])
    report = report_for(
        plan, incidents=("one",), error="it\nfailed", sample=Sample(prompt="a", before="b", after="c"), export="export"
    )
    (run_dir / "plan.json").write_text(json.dumps(_poisoned(plan)))
    (run_dir / "attempts/1/plan.json").write_text(json.dumps(_poisoned(plan)))
    (run_dir / "report.json").write_text(json.dumps(_poisoned(report)))
    submission = msgspec.json.decode((run_dir / FILE_NAME).read_bytes(), type=Submission)
    (run_dir / FILE_NAME).write_text(json.dumps(_poisoned(msgspec.structs.replace(submission, overrides=("a=1",)))))
    rows = [{**row, "gpu_throttle": EVIL, "attempt": 1} for row in step_rows()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "attempts/1/status.json").write_text(json.dumps({"phase": EVIL, "step": 3}))
    for name in (JOBS_FILE, CHAIN_FILE, LOCK, CANCEL_FLAG, "slurm-7.out", *FILES[-3:-1]):
        (run_dir / name).write_text(f"1 {EVIL} {EVIL}\n" * 3)
    for words in [*COMMANDS, ["cancel", "run"]]:
        answer = typed(capsys, *words)
        assert answer.code in (0, 2, 4) and "internal error" not in answer.err, (words, answer.err)
        assert OBEYED.search(answer.out + answer.err) is None, words
    assert OBEYED.search(Path("page.html").read_text()) is None
    shown = typed(capsys, "report", "run").out
    assert shown.count("evil") >= 8 and r"\u001b[2J" in shown
    assert json.loads(typed(capsys, "report", "run", "--json").out)["incidents"] == [f"one{EVIL}"]


@pytest.mark.parametrize("name", [LOCK, "metrics.jsonl", "logs/sinks.log", CANCEL_FLAG])
def test_a_run_is_never_written_through_a_link(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    target, path = tmp_path / "precious", tmp_path / "run" / name
    target.write_text("precious")
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    answer = typed(capsys, "train", "job.yaml", "--run-dir", "run", "--resume")
    assert answer.code == 2 and f"run/{name}: is a link" in answer.err
    assert target.read_text() == "precious"


def test_the_lock_of_a_run_is_no_link(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / LOCK).symlink_to("precious")
    with pytest.raises(EnvironmentFaultError), locked(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_private_run_of_another_user_hides_no_run_of_ones_own(run_dir, capsys, monkeypatch):
    """Root may read everything, so access is asked as for another user."""
    (run_dir.parent / "runs" / "theirs").mkdir(mode=0o700)
    write_run(run_dir.parent / "runs" / "theirs" / "inner")
    own_access, own_stat = os.access, Path.stat

    def stat_as_stranger(path: Path, **settings: Any) -> os.stat_result:
        if path.parent.name == "theirs":
            raise PermissionError(13, "Permission denied", str(path))
        return own_stat(path, **settings)

    monkeypatch.setattr(Path, "stat", stat_as_stranger)
    monkeypatch.setattr(os, "access", lambda path, mode: "theirs" not in str(path) and own_access(path, mode))
    answer = typed(capsys, "status")
    assert answer.code == 0 and "runs/run" in answer.out, answer.err


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_operators_that_another_user_can_change_are_not_loaded(tmp_path, monkeypatch, mode):
    folder = tmp_path / "operators"
    folder.mkdir()
    folder.chmod(mode)
    if mode == 0o755:
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
        monkeypatch.setattr(Path, "stat", lambda path, **_: os.stat_result((mode, 0, 0, 0, 7, 7, 0, 0, 0, 0)))
    with pytest.raises(EnvironmentFaultError, match="SHARDWISE_CACHE"):
        _refuse_foreign(folder)
