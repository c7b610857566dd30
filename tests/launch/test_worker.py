"""`launch.worker`: progress, answers, errors, time limits and the end of a process that runs torch for launch."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hanging_programs import pids_in, wait_until_gone

from shardwise.launch.worker import WorkerTimeoutError, ask
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError, ShardwiseError
from shardwise.trainer.spec.messages.worker_requests import Lines


@pytest.fixture
def module_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a worker module that every Python of the test finds."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(body: str) -> str:
        (tmp_path / "stand_in.py").write_text("import os, pathlib, sys, time\n" + body)
        return "stand_in"

    return write


def lines_of(module: str, **settings: object) -> Lines:
    return ask(module, None, Lines, subject="the work", **settings)  # type: ignore[arg-type]


ANSWER = 'pathlib.Path(sys.argv[2]).write_text(\'{"lines": ["a"]}\')\n'


def test_progress_arrives_in_order_and_the_answer_last(module_of):
    seen: list[str] = []
    body = "print('one'); print('two ä'); sys.stdout.write('three'); sys.stdout.flush()\n" + ANSWER
    assert lines_of(module_of(body), on_line=seen.append) == Lines(lines=("a",))
    assert seen == ["one", "two ä", "three"]


@pytest.mark.parametrize(
    ("body", "kind", "fact"),
    [
        ("sys.stderr.write('noise\\nthe fact\\n'); sys.exit(2)", InputError, "the fact"),
        ("sys.stderr.write('noise\\nthe fact\\n'); sys.exit(4)", EnvironmentFaultError, "the fact"),
        ("sys.stderr.write('noise\\nthe fact\\n'); sys.exit(1)", ShardwiseError, "the fact"),
        ("sys.stderr.write('noise\\nthe fact\\n'); sys.exit(77)", ShardwiseError, "the fact"),
        ("raise MemoryError", EnvironmentFaultError, "the work could not allocate"),
        ("raise ImportError('x.so: failed to map segment from shared object')", EnvironmentFaultError, "not allocate"),
    ],
)
def test_an_exit_code_or_memory_that_is_refused_is_the_error_it_stands_for(module_of, body, kind, fact):
    with pytest.raises(ShardwiseError, match=fact) as raised:
        lines_of(module_of(f"{body}\n"))
    assert type(raised.value) is kind and raised.value.exit_code == kind.exit_code


def test_a_written_error_is_reported_without_the_noise_of_libraries(module_of):
    body = "sys.stderr.write('noise\\n'); pathlib.Path(sys.argv[2]).with_suffix('.error').write_text('a\\nb\\n')\n"
    with pytest.raises(InputError, match=r"^a\nb$"):
        lines_of(module_of(body + "sys.exit(2)\n"))


@pytest.mark.cold
def test_a_worker_that_takes_too_long_is_ended_with_its_children(module_of, tmp_path):
    body = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\ntime.sleep(600)\n"
    )
    with pytest.raises(WorkerTimeoutError, match=r"1\.5 s"):
        lines_of(module_of(body), timeout_s=1.5)
    wait_until_gone(*pids_in(tmp_path / "pid"))


@pytest.mark.cold
def test_a_worker_ends_with_a_killed_parent_also_while_it_imports_libraries(module_of, tmp_path):
    """At a moment when no code of the worker itself could have asked for that."""
    module_of(f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n")
    code = (
        "from shardwise.launch.worker import ask; from shardwise.trainer.spec.messages.worker_requests import Lines\n"
        "ask('stand_in', None, Lines, subject='the work')"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    while not pids_in(tmp_path / "pid"):
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    wait_until_gone(*pids_in(tmp_path / "pid"))
