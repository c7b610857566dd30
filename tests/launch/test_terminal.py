"""On a terminal: the lines of a pipe, with colours and a bar, and of no command a line wider than 80 columns."""

import fcntl
import os
import re
import shlex
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest
from run_factory import write_attempt, write_report
from small_terminal import SmallTerminal
from typed_command import in_empty_home

from shardwise.launch.cli import main
from shardwise.launch.terminal import Console, show_lines, text_width
from shardwise.trainer.planning.explain.first_screen import Line, Tone, text_of
from shardwise.trainer.spec.report import Ending

COLUMNS = 80
LINES = (
    Line(text="job: LoRA of llama [bold]8B[/bold] on 1 x L4: fits, about 7 h", tone=Tone.TITLE),
    Line(text="  memory  card 21.4 of 22 GiB", tone=Tone.FIGURE, share=0.97),
    Line(text="  WARNING: " + "a warning " * 8, tone=Tone.WARNING),
    Line(text=""),
    Line(text="  start   shardwise train job.yaml " + "train.lr=1e-4 " * 9, tone=Tone.COMMAND),
)


def on_terminal(write: Callable[[TextIO], object]) -> str:
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    found: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the end of a terminal
            while content := os.read(master, 65536):
                found.append(content)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        write(stream)
    reader.join()
    os.close(master)
    return b"".join(found).decode().replace("\r\n", "\n")


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_a_terminal_shows_the_lines_of_a_pipe_in_colour() -> None:
    widths: list[int] = []

    def write(stream: TextIO) -> None:
        widths.append(text_width(Console(stream)))
        show_lines(LINES, Console(stream))

    text = on_terminal(write)
    terminal = SmallTerminal(columns=1000)
    terminal.write(text)
    title, figure, *rest = terminal.lines
    assert "\x1b[1;33m" in text and widths == [COLUMNS]
    assert title == LINES[0].text, "user text is no markup"
    assert figure.startswith(LINES[1].text) and len(figure) > len(LINES[1].text) + 10, "a bar"
    assert rest[:3] == [line.text.rstrip() for line in LINES[2:]]


def test_a_pipe_gets_plain_text_and_loads_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "import sys; from shardwise.launch.terminal import Console, show_lines; "
        "from shardwise.trainer.planning.explain.first_screen import Line; "
        "show_lines([Line(text='a'), Line(text='b')], Console()); sys.exit('rich' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "a\nb\n"
    show_lines(LINES, Console())
    assert capsys.readouterr().out == text_of(LINES) + "\n"


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
CAUSE = "step 2: a rank was killed by SIGKILL, often out of host memory; the same would happen again: not restarted"


@pytest.mark.parametrize("line", COMMANDS.values(), ids=COMMANDS.keys())
def test_no_line_is_cut_on_a_terminal_of_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    in_empty_home(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("one", "a-run-with-a-long-name-" + "x" * 30):
        write_attempt(tmp_path / "runs" / name, 1, steps=[1, 2])
        write_report(tmp_path / "runs" / name, Ending.FAILED, step=2, incidents=(CAUSE,))

    def typed(stream: TextIO) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            main(shlex.split(line))

    printed = re.sub(r"\x1b\[[\d;]*m", "", on_terminal(typed)).splitlines()
    wide = [text for text in printed if len(text) > COLUMNS and max(map(len, text.split())) < LONG_WORD]
    assert printed and not wide, "\n".join(wide)
