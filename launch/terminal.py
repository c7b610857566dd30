"""Output for a person: plain lines on stdout, or on stderr if stdout carries JSON; pages of `--html`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import msgspec

from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.secrets import printable


class Console:
    """Writes lines to a stream, which may be a terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stdout
        self.before_line: Callable[[], None] | None = None  # removes what is redrawn below the last line

    @property
    def is_terminal(self) -> bool:
        return self.stream.isatty()

    def line(self, text: str = "") -> None:
        if self.before_line is not None:
            self.before_line()
        self.stream.write(printable(text) + "\n")
        self.stream.flush()

    def json(self, value: object, *, is_indented: bool = True) -> None:
        """A value as JSON; the bytes of a path that are not UTF-8 as `\\udc80` to `\\udcff`, as Python decodes them."""
        try:
            content = msgspec.json.encode(value)
        except UnicodeEncodeError:
            self.line(json.dumps(msgspec.to_builtins(value), indent=1 if is_indented else None))
            return
        self.line((msgspec.json.format(content, indent=1) if is_indented else content).decode())


def write_error(text: str) -> None:
    """One to three lines on stderr."""
    sys.stderr.write(printable(text.rstrip("\n")) + "\n")
    sys.stderr.flush()


def write_page(path: Path, html: str) -> None:
    """Raises InputError if the folder does not exist, EnvironmentFaultError if the file cannot be written."""
    try:
        path.write_text(printable(html), encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise InputError(f"--html {path}: {error.strerror}; name a file in a folder that exists") from error
    except OSError as error:
        raise EnvironmentFaultError(f"--html {path}: cannot be written: {error.strerror}") from error
