"""Output for a person: plain lines on stdout, or on stderr if stdout carries JSON; pages of `--html`."""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import msgspec

from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.secrets import printable, redact


class Console:
    """Writes lines to a stream, which may be a terminal, and records them in the log of a run."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stdout
        self.before_line: Callable[[], None] | None = None  # removes what is redrawn below the last line
        self._recorded: list[str] | None = None  # until the log exists; None: lines are not recorded
        self._log: Path | None = None

    @property
    def is_terminal(self) -> bool:
        return self.stream.isatty()

    def line(self, text: str = "") -> None:
        if self.before_line is not None:
            self.before_line()
        self.stream.write(printable(text) + "\n")
        self.stream.flush()
        self.record(text)

    def start_recording(self) -> None:
        """Retains lines from now on, until `record_in` names the file for them."""
        self._recorded = []

    def record_in(self, log: Path | None) -> None:
        """Appends the retained lines, and those that follow, to a file; None ends it."""
        retained, self._recorded, self._log = self._recorded, None, log
        if retained:
            self.record("\n".join(retained))

    def record(self, text: str) -> None:
        """A line for the log alone. A log that cannot be written ends no run."""
        if self._recorded is not None:
            self._recorded.append(text)
        elif self._log is not None:
            with suppress(OSError), self._log.open("a", encoding="utf-8") as log:
                log.write(redact(printable(text)) + "\n")

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
