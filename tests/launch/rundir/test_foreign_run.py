"""A run directory that somebody else made: no command waits for its files, and none prints what a terminal obeys."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from outcome_file import FAULTS
from planted_texts import planted
from reported_run import report_for, step_rows, tiny_plan, write_run
from run_factory import write_attempt, write_start, write_submission
from typed_command import typed

from shardwise.launch.rundir.lock import CANCEL_FLAG, LOCK
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.messages.submission import CHAIN_FILE, FILE_NAME, JOBS_FILE, Submission
from shardwise.trainer.spec.report import Sample

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
HANG_S = 60  # for a command that takes a second where no other work keeps the cores busy
EVIL = "\x1b[2J\x1b]0;t\x07\x9b31m\r\u202eevil"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")


class Waited(BaseException):  # no handler of errors takes it for one
    """A command did not end."""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A run with all files; a command that takes a minute fails."""
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
        raise Waited

    before = signal.signal(signal.SIGALRM, give_up)
    yield run
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _make_socket(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:  # its path may have 107 bytes
        bound.bind(path.name)


KINDS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a socket": _make_socket,
    "a folder": Path.mkdir,
    "a circle": lambda path: path.symlink_to(path.name),
}
WHOLE = [pytest.param(kind, 1, marks=(pytest.mark.long, pytest.mark.timeout(0))) for kind in KINDS]


@pytest.mark.parametrize(("kind", "every"), [("a FIFO", 3), *WHOLE])
def test_a_file_that_is_no_file_is_never_waited_for(run_dir, capsys, kind, every, record_property):
    """By each command for each file, 176 pairs of a kind; without `long`, every third command for one kind."""
    tried, failures = 0, []
    for name in FILES:
        content = (run_dir / name).read_bytes()
        (run_dir / name).unlink()
        KINDS[kind](run_dir / name)
        for words in COMMANDS[::every]:
            tried += 1
            signal.alarm(HANG_S)
            try:
                answer = typed(capsys, *words)
            except Waited:
                failures.append((name, words, "hung"))
                continue
            if answer.code not in (0, 2, 4) or "internal error" in answer.err:
                failures.append((name, words, answer.err))
        signal.alarm(0)
        (run_dir / name).rmdir() if kind == "a folder" else (run_dir / name).unlink()
        (run_dir / name).write_bytes(content)
    hung = sum(problem == "hung" for *_, problem in failures)
    counts = {"tried": tried, "survived": tried - len(failures), "hung": hung, "tracebacks": len(failures) - hung}
    record_property(FAULTS, {f"in place of a file of a run: {kind}": counts})
    assert not failures


def test_no_text_of_a_file_reaches_a_terminal_as_a_command(run_dir, capsys):
    plan = tiny_plan(notes=("a note",), fallbacks=())
    plan = msgspec.structs.replace(plan, candidates=plan.candidates[:1], rejections=plan.rejections[:2])
    report = report_for(
        plan, incidents=("one",), error="it\nfailed", sample=Sample(prompt="a", before="b", after="c"), export="export"
    )
    submission = msgspec.json.decode((run_dir / FILE_NAME).read_bytes(), type=Submission)
    submission = msgspec.structs.replace(submission, overrides=("a=1",))
    values = {"plan.json": plan, "attempts/1/plan.json": plan, "report.json": report, FILE_NAME: submission}
    for name, value in values.items():
        (run_dir / name).write_text(json.dumps(planted(value, lambda old: None if old is None else old + EVIL)))
    rows = [{**row, "gpu_throttle": EVIL, "attempt": 1} for row in step_rows()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run_dir / "attempts/1/status.json").write_text(json.dumps({"phase": EVIL, "step": 3}))
    for name in (JOBS_FILE, CHAIN_FILE, LOCK, CANCEL_FLAG, "slurm-7.out", *FILES[-3:-1]):
        (run_dir / name).write_text(f"1 {EVIL} {EVIL}\n" * 3)
    for words in [*COMMANDS, ["cancel", "run"]]:
        assert OBEYED.search(shown(capsys, *words)) is None, words
    assert OBEYED.search(Path("page.html").read_text()) is None
    text = typed(capsys, "report", "run").out
    assert text.count("evil") >= 8 and r"\u001b[2J" in text
    assert json.loads(typed(capsys, "report", "run", "--json").out)["incidents"] == [f"one{EVIL}"]


LINKS = (LOCK, "metrics.jsonl", "logs/sinks.log", CANCEL_FLAG)
FOLDERS = ("attempts", "checkpoints", "export", ".export.partial", "logs", "wandb")


@pytest.mark.parametrize("name", [*LINKS, *FOLDERS])
def test_a_run_is_never_written_through_a_link(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    target, path = tmp_path / "precious", tmp_path / "run" / name
    target.mkdir() if name in FOLDERS else target.write_text("precious")
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    answer = typed(capsys, "train", "job.yaml", "--run-dir", "run", "--resume")
    assert answer.code == 2 and f"run/{name}: is a link" in answer.err
    assert list(target.iterdir()) == [] if name in FOLDERS else target.read_text() == "precious"


def shown(capsys, *words: str) -> str:
    """What a command prints, which ends in order."""
    answer = typed(capsys, *words)
    assert answer.code in (0, 2, 4) and "internal error" not in answer.err, (words, answer.err)
    return answer.out + answer.err


def test_no_command_shows_what_a_link_in_place_of_a_log_leads_to(run_dir, capsys):
    secret = run_dir.parent / "id_rsa"
    secret.write_text('{"step": 1, "loss": 31337.0}\na private key\n')
    for name in FILES:
        if name.endswith((".log", ".out", "metrics.jsonl")):
            (run_dir / name).unlink()
            (run_dir / name).symlink_to(secret)
    for words in [*COMMANDS, ["logs", "run", "--rank", "0"]]:
        assert re.search("private key|31337", shown(capsys, *words)) is None, words
    assert "private key" not in Path("page.html").read_text()


@pytest.mark.parametrize("words", [("export", "run", "out"), ("chat", "run")])
def test_a_model_is_neither_written_nor_read_behind_a_link(run_dir, capsys, words):
    """The output of an export, and the export that a chat loads."""
    theirs = run_dir.parent / "theirs"
    theirs.mkdir()
    for link in (run_dir.parent / "out", run_dir / "export"):
        shutil.rmtree(link, ignore_errors=True)
        link.symlink_to(theirs)
    answer = typed(capsys, *words)
    assert answer.code == 2 and "is a link" in answer.err
    assert list(theirs.iterdir()) == []


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
        codec.refuse_foreign(folder, consequence="the ranks would run that code")
