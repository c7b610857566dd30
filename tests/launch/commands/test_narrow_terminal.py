"""On a terminal of 80 columns no command prints a wider line; what goes into a pipe stays whole, to be searched in."""

import fcntl
import os
import re
import shlex
import struct
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from run_factory import write_attempt, write_report
from typed_command import in_empty_home

from shardwise.launch.cli import main
from shardwise.trainer.spec.report import Ending

COLUMNS = 80
LONG_WORD = 40  # a path, which is left whole
COMMANDS = {
    "every section of a plan": "plan llama-3.2-1b --hardware 8xH100-SXM5-80GB -v",
    "several plans": "plan llama-3.2-1b --hardware 1xRTX-4090 --hardware 8xH100-SXM5-80GB -v",
    "limits": "plan llama-3.2-1b --hardware 1xRTX-4090 --largest-batch",
    "doctor": "doctor --quick",
    "probe": "probe",
    "a run": "status runs/one",
    "all runs": "status",
}
COLOUR = re.compile(r"\x1b\[[\d;]*m")
Typed = Callable[[str], str]


@pytest.fixture
def typed_on_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    """What a command prints on a terminal, in a folder with a run whose paths and causes are long."""
    in_empty_home(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    for name in ("one", "a-run-with-a-long-name-" + "x" * 30):
        write_attempt(tmp_path / "runs" / name, 1, steps=[1, 2])
        cause = (
            "step 2: a rank was killed by SIGKILL, often out of host memory; the same would happen again: not restarted"
        )
        write_report(tmp_path / "runs" / name, Ending.FAILED, step=2, incidents=(cause,))

    def typed(line: str) -> str:
        master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        found: list[bytes] = []

        def read() -> None:
            with suppress(OSError):  # the end of a terminal
                while content := os.read(master, 65536):
                    found.append(content)

        reader = threading.Thread(target=read)
        reader.start()
        with os.fdopen(slave, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            main(shlex.split(line))
        reader.join()
        os.close(master)
        return COLOUR.sub("", b"".join(found).decode())

    return typed


@pytest.mark.parametrize("line", COMMANDS.values(), ids=COMMANDS.keys())
def test_no_line_is_cut_on_a_terminal_of_80_columns(typed_on_terminal: Typed, line: str) -> None:
    printed = typed_on_terminal(line).splitlines()
    wide = [text for text in printed if len(text) > COLUMNS and max(map(len, text.split())) < LONG_WORD]
    assert printed and not wide, "\n".join(wide)
