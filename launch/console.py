"""Where text for a person goes: plain lines, on stdout or, where stdout carries JSON, on stderr."""

import sys
from typing import TextIO


class Console:
    """Writes lines and knows whether it may redraw them."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stdout

    @property
    def is_terminal(self) -> bool:
        return self.stream.isatty()

    def line(self, text: str = "") -> None:
        self.stream.write(text + "\n")
        self.stream.flush()


def write_error(text: str) -> None:
    """One to three lines on stderr."""
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()
