"""The first screen on a terminal: the same lines as in a pipe, with colours unless NO_COLOR is set, and a bar."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
from small_terminal import SmallTerminal

from shardwise.launch.terminal import WIDEST, Console, show_lines, text_width
from shardwise.trainer.planning.explain.first_screen import Line, Tone, text_of

LINES = (
    Line(text="job: LoRA of llama [bold]8B[/bold] on 1 x L4: fits, about 7 h", tone=Tone.TITLE),
    Line(text="  memory  card 21.4 of 22 GiB", tone=Tone.FIGURE, share=0.97),
    Line(text="  WARNING: " + "a warning " * 8, tone=Tone.WARNING),
    Line(text=""),
    Line(text="  start   shardwise train job.yaml " + "train.lr=1e-4 " * 9, tone=Tone.COMMAND),
)


def on_terminal(lines: Sequence[Line]) -> tuple[str, int]:
    """The text that a terminal receives, and the width of a line on it."""
    master, slave = os.openpty()
    found: list[bytes] = []

    def read() -> None:
        try:
            while content := os.read(master, 65536):
                found.append(content)
        except OSError:
            pass

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        width = text_width(Console(stream))
        show_lines(lines, Console(stream))
    reader.join()
    os.close(master)
    return b"".join(found).decode().replace("\r\n", "\n"), width


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_a_terminal_shows_the_lines_of_a_pipe_in_colour() -> None:
    text, width = on_terminal(LINES)
    terminal = SmallTerminal(columns=1000)
    terminal.write(text)
    title, figure, *rest = terminal.lines
    assert "\x1b[1;33m" in text and 60 <= width <= WIDEST
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
