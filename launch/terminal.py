"""Output for a person: plain lines on stdout, or on stderr if stdout carries JSON."""

import sys
from collections.abc import Callable
from typing import TextIO


class Console:
    """Writes lines to a stream, which may be a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stdout
        self.before_line: Callable[[], None] | None = None  # takes away what is redrawn below the last line

    @property
    def is_terminal(self) -> bool:
        return self.stream.isatty()

    def line(self, text: str = "") -> None:
        if self.before_line is not None:
            self.before_line()
        self.stream.write(text + "\n")
        self.stream.flush()


def write_error(text: str) -> None:
    """One to three lines on stderr."""
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()
