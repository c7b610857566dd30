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
from small_terminal import SmallTerminal

from shardwise.launch.show.screen import Screen, glyphs_for
from shardwise.launch.show.view import ASCII, UNICODE
from shardwise.launch.terminal import Console

TERMINAL = {"TERM": "xterm-256color", "LANG": "C.UTF-8"}


class Shown(io.StringIO):
    """A stream that claims to be a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def shown_by(stream: io.StringIO, columns: int = 80) -> list[str]:
    terminal = SmallTerminal(columns)
    terminal.write(stream.getvalue())
    return terminal.lines


def test_a_block_is_redrawn_in_place_and_what_is_printed_stays_above():
    stream = Shown()
    console = Console(stream)
    console.line("before")
    screen = Screen(console, TERMINAL)
    with screen.shown():
        screen.draw(["step 1", "loss 9"])
        screen.draw(["step 2", "loss 8", "a third line"])
        console.line("printed by the console")
        screen.draw(["step 3"])
        screen.print_line("printed by the view")
        screen.draw(["step 4", "loss 6"])
    console.line("after")
    printed = ("printed by the console", "printed by the view")
    assert shown_by(stream) == ["before", *printed, "step 4", "loss 6", "after", ""]


@pytest.mark.parametrize(
    ("changes", "is_terminal", "draws"),
    [
        ({}, True, True), ({}, False, False), ({"TERM": "dumb"}, True, False), ({"TERM": ""}, True, False),
        ({"TERM": "unknown"}, True, False), ({"CI": "true"}, True, False), ({"CI": "false"}, True, True),
        ({"SLURM_JOB_ID": "12"}, True, False), ({"NO_COLOR": "1"}, True, True),
    ],
)  # fmt: skip
def test_a_block_is_drawn_where_it_can_be_redrawn(changes, is_terminal, draws):
    console = Console(Shown() if is_terminal else io.StringIO())
    assert Screen(console, {**TERMINAL, **changes}).is_block is draws
    assert not Screen(Console(Shown()), {"LANG": "C.UTF-8"}).is_block, "a terminal without a name is a dumb one"
    assert Screen(console, {**TERMINAL, **changes}).has_color is ("NO_COLOR" not in changes)


@pytest.mark.parametrize(
    ("encoding", "environment", "glyphs"),
    [
        ("utf-8", {"LANG": "de_DE.UTF-8"}, UNICODE),
        ("UTF8", {"LC_CTYPE": "C.utf8"}, UNICODE),
        ("utf-8", {"LC_ALL": "C", "LANG": "de_DE.UTF-8"}, ASCII),
        ("utf-8", {"LANG": "C", "LC_CTYPE": "C.UTF-8"}, ASCII),
        ("utf-8", {"LANG": "POSIX"}, ASCII),
        ("utf-8", {"LANG": "C", "LC_CTYPE": "de_DE.UTF-8"}, UNICODE),
        ("utf-8", {"LANG": "de_DE.ISO-8859-1"}, ASCII),
        ("iso-8859-1", {"LANG": "de_DE.UTF-8"}, ASCII),
        (None, {"LANG": "de_DE.UTF-8"}, ASCII),
        ("utf-8", {}, ASCII),
    ],
)
def test_block_characters_need_a_locale_that_has_them(encoding, environment, glyphs):
    assert glyphs_for(encoding, environment) is glyphs


class Pair:
    """Both ends of a pseudo terminal."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.stream = os.fdopen(self.slave, "w", encoding="utf-8", closefd=False)

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self) -> str:
        return os.read(self.master, 65536).decode()


@pytest.fixture
def pair() -> Iterator[Pair]:
    both = Pair()
    yield both
    for descriptor in (both.master, both.slave):
        os.close(descriptor)


def test_the_size_is_that_of_now(pair: Pair):
    screen = Screen(Console(pair.stream), TERMINAL)
    assert screen.size == (80, 24), "of a terminal that does not say"
    pair.resize(30, 40)
    assert screen.size == (40, 30)
    pair.resize(3, 120)
    screen.draw(["one", "two", "three", "four"])
    assert pair.read() == "one\r\ntwo", "two of three lines, or the first would scroll away"
    pair.resize(24, 40)
    screen.draw(["hf_" + "a" * 30])
    assert pair.read() == "\r\x1b[1A\x1b[J[redacted]", "no more is erased than was drawn, and no secret is shown"


def blocked_screen(pair: Pair) -> Screen:
    """A screen that has drawn more than the terminal holds while nobody reads."""
    pair.resize(24, 80)
    screen = Screen(Console(pair.stream), TERMINAL)
    for number in range(5000):
        screen.draw([f"frame {number} " + "x" * 60] * 7)
    return screen


@pytest.mark.timeout(60)
def test_a_terminal_without_a_reader_delays_nothing_and_continues_once_it_is_read(pair: Pair):
    screen = blocked_screen(pair)
    assert not screen.is_closed
    seen = SmallTerminal(80)
    for frame in ("the last but one", "the last"):
        while readable(pair.master):
            seen.write(pair.read().replace("\r\n", "\n"))
        screen.draw([frame])
    seen.write(pair.read().replace("\r\n", "\n"))
    assert seen.lines == ["the last"], "no frame was cut in the middle"


def readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0.2)[0])


@pytest.mark.timeout(60)
def test_the_rest_of_a_frame_that_nobody_read_comes_before_nothing_else(pair: Pair):
    """Once the block is removed: a frame that was begun is dropped after a second without a reader."""
    screen = blocked_screen(pair)
    screen.remove()
    while readable(pair.master):
        pair.read()
    screen.draw(["next"])
    assert pair.read() == "next"


@pytest.mark.timeout(60)
def test_a_pipe_without_a_reader_delays_nothing():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream, os.fdopen(reader, "rb") as other:
        screen = Screen(Console(stream), TERMINAL)
        for number in range(5000):
            screen.print_line(f"line {number} " + "x" * 90)
        os.set_blocking(other.fileno(), False)
        lines = other.read().decode().splitlines()
    assert 10 < len(lines) < 5000 and lines[-1].startswith(f"line {len(lines) - 1} ")


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
    screen.draw(["two"])
    with suppress(BrokenPipeError):
        stream.close()


class InterruptedOnce(Shown):
    """Ctrl-C comes right after the first write."""

    has_come = False

    def write(self, text: str) -> int:
        written = super().write(text)
        if not self.has_come:
            self.has_come = True
            raise KeyboardInterrupt
        return written


def test_what_follows_an_interruption_begins_on_a_line_of_its_own():
    stream = InterruptedOnce()
    console = Console(stream)
    screen = Screen(console, TERMINAL)
    with pytest.raises(KeyboardInterrupt), screen.shown():
        screen.draw(["one", "two"])
    console.line("stopped")
    assert shown_by(stream) == ["one", "two", "stopped", ""]
