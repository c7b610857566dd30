"""A block is redrawn in place, what is printed goes above it and stays, and no terminal holds anything up."""

import fcntl
import io
import os
import pty
import select
import struct
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from small_terminal import SmallTerminal, TerminalStream

from shardwise.launch.show.screen import Outlet, Screen
from shardwise.launch.show.view import LiveView
from shardwise.launch.terminal import Console

TERMINAL = {"TERM": "xterm-256color"}


def at(step: int, **more: str) -> LiveView:
    return LiveView(title="run", state="training", step=step, incidents=tuple(more.values()))


def test_a_block_is_redrawn_in_place_and_what_is_printed_stays_above():
    stream = TerminalStream()
    console = Console(stream)
    console.line("before")
    with suppress(KeyboardInterrupt), Screen(console, TERMINAL).shown() as screen:
        screen.draw(at(1))
        screen.draw(at(2))
        console.line("[b]printed by the console\x1b[2K[/b]")
        screen.draw(at(3))
        screen.print_line("printed by\x1b[2K the view, hf_" + "a" * 40)
        screen.draw(at(4, incident="one\x1b[2K\nline"))
        raise KeyboardInterrupt
    console.line("after")
    terminal = SmallTerminal()
    terminal.write(stream.getvalue())
    assert terminal.lines == [
        "before", r"[b]printed by the console\u001b[2K[/b]", r"printed by\u001b[2K the view, [redacted]",
        "run: training, step 4", r"incidents  one\u001b[2K line", "after", "",
    ]  # fmt: skip
    assert "\x1b[36m" in stream.getvalue() or "\x1b[33m" in stream.getvalue()


@pytest.mark.parametrize(
    ("changes", "is_terminal", "draws"),
    [
        ({}, True, True), ({}, False, False), ({"TERM": "dumb"}, True, False), ({"TERM": ""}, True, False),
        ({"TERM": "unknown"}, True, False), ({"CI": "true"}, True, False), ({"CI": "false"}, True, True),
        ({"SLURM_JOB_ID": "12"}, True, False), ({"NO_COLOR": "1"}, True, True),
    ],
)  # fmt: skip
def test_a_block_is_drawn_where_it_can_be_redrawn(changes, is_terminal, draws):
    stream = TerminalStream() if is_terminal else io.StringIO()
    screen = Screen(Console(stream), {**TERMINAL, **changes})
    assert screen.is_block is draws
    assert not Screen(Console(TerminalStream()), {}).is_block, "a terminal without a name is a dumb one"
    with screen.shown():
        screen.print_line("a line")
        if draws:
            screen.draw(at(1, incident="one"))
    assert stream.getvalue().startswith("a line\n")
    assert ("\x1b[33m" in stream.getvalue()) is (draws and "NO_COLOR" not in changes)


class Pair:
    """Both ends of a pseudo terminal."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.stream = os.fdopen(self.slave, "w", encoding="utf-8", closefd=False)

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self) -> str:
        """Everything that can be read without waiting for more."""
        text = b""
        while select.select([self.master], [], [], 0.2)[0]:
            text += os.read(self.master, 65536)
        return text.decode().replace("\r\n", "\n")


@pytest.fixture
def pair() -> Iterator[Pair]:
    both = Pair()
    yield both
    for descriptor in (both.master, both.slave):
        os.close(descriptor)


def test_the_size_is_that_of_now(pair: Pair):
    with Screen(Console(pair.stream), TERMINAL).shown() as screen:
        screen.draw(at(1, incident="x" * 100))
        assert "x" * 65 in pair.read(), "80 columns of a terminal that reports none"
        pair.resize(1, 40)
        screen.draw(at(2, incident="x" * 100))
        text = pair.read()
        assert "step 2" in text and "xx" not in text, "the first of two lines"
        pair.resize(24, 40)
        screen.draw(at(3, incident="x" * 100))
        terminal = SmallTerminal(columns=40)
        terminal.write(pair.read().removeprefix("\r"))
        assert terminal.lines[0] == "run: training, step 3" and "xx" in terminal.lines[1]


@pytest.mark.timeout(60)
def test_a_terminal_without_a_reader_delays_nothing_and_continues_once_it_is_read(pair: Pair):
    pair.resize(24, 80)
    console = Console(pair.stream)
    with Screen(console, TERMINAL).shown() as screen:
        for number in range(5000):
            screen.draw(at(number, incident="x" * 60))
        assert not screen.is_closed
        console.line("an error that nobody may miss")
        terminal = SmallTerminal()
        terminal.write(pair.read())
        screen.draw(at(5000))
        terminal.write(pair.read())
    assert terminal.lines == ["an error that nobody may miss", "run: training, step 5000", "incidents  none"]


@pytest.mark.timeout(60)
def test_what_nobody_reads_is_dropped_when_the_block_ends(pair: Pair):
    screen = Screen(Console(pair.stream), TERMINAL)
    with screen.shown():
        for number in range(5000):
            screen.draw(at(number, incident="x" * 60))
    pair.read()
    screen.print_line("next")
    assert pair.read() == "next\n"


@pytest.mark.timeout(60)
def test_a_pipe_without_a_reader_delays_nothing_and_what_waits_for_one_is_bounded():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream, os.fdopen(reader, "rb") as other:
        outlet = Outlet(stream)
        for number in range(50_000):
            outlet.write(f"line {number} " + "x" * 90 + "\n")
        os.set_blocking(other.fileno(), False)
        lines = []
        while content := other.read():
            lines += content.decode().splitlines(keepends=True)
            outlet.flush()
        outlet.close()
    lines = "".join(lines).splitlines()
    assert 10_000 < len(lines) < 50_000 and lines[-1].startswith(f"line {len(lines) - 1} ")


def test_a_closed_terminal_gets_no_more_output_and_letters_that_it_lacks_are_replaced(tmp_path: Path):
    with (tmp_path / "out").open("w", encoding="ascii") as ascii_stream:
        Screen(Console(ascii_stream), TERMINAL).print_line("学 and letters")
    assert (tmp_path / "out").read_text() == "? and letters\n"
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w")
    screen = Screen(Console(stream), TERMINAL)
    screen.print_line("one")
    assert screen.is_closed
    screen.print_line("two")
    with suppress(BrokenPipeError):
        stream.close()
