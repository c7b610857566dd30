"""Output for a person: plain lines on stdout, or on stderr if stdout carries JSON; pages of `--html`.

On a terminal, lines of the first screen of a plan have colours, and a bar for the memory. `rich` draws them and follows
NO_COLOR and TERM. It is imported on a terminal only, and without it the text is plain.
"""

import json
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import msgspec

from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.secrets import printable, redact

if TYPE_CHECKING:
    from shardwise.trainer.planning.explain.first_screen import Line


WIDEST, NARROWEST = 100, 60
_BAR_COLUMNS = 20
_LABEL_COLUMNS = 10
_FULL_SHARE = 0.97  # a bar of a card that is nearly full is yellow


class Console:
    """Writes lines to a stream, which may be a terminal, and records them in the log of a run."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stdout
        self.print_above: Callable[[str], None] | None = None  # prints a line above what is redrawn
        self._recorded: list[str] | None = None  # until the log exists; None: lines are not recorded
        self._log: Path | None = None

    @property
    def is_terminal(self) -> bool:
        return self.stream.isatty()

    def line(self, text: str = "") -> None:
        if self.print_above is not None:
            self.print_above(text)
        else:
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


def text_width(console: Console) -> int:
    """Columns of a line: those of the terminal, 100 at most and without one."""
    try:
        columns = os.get_terminal_size(console.stream.fileno()).columns if console.is_terminal else WIDEST
    except (OSError, ValueError):
        columns = WIDEST
    return max(NARROWEST, min(columns or WIDEST, WIDEST))


def terminal_columns(console: Console) -> int | None:
    """Columns at which lines are wrapped on a terminal; None where the output goes elsewhere, to be searched in."""
    return text_width(console) if console.is_terminal else None


def wrapped(start: str, text: str, width: int | None) -> list[str]:
    """`start` and the text, wrapped at spaces below its own beginning; a longer word is left whole."""
    if width is None or len(start) + len(text) <= width:
        return [start + text]
    indent = " " * min(len(start), width // 2)
    wrapper = textwrap.TextWrapper(
        width, initial_indent=start, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text)


def folded(text: str, width: int | None) -> str:
    """The text with each line wrapped at `width` columns, two columns deeper; as it is without a width."""
    if width is None:
        return text
    lines: list[str] = []
    for line in text.splitlines():
        start = " " * (len(line) - len(line.lstrip()))
        first, *more = [line] if len(line) <= width else wrapped(start, line.lstrip(), width - 2)
        lines += [first, *("  " + each for each in more)]
    return "\n".join(lines)


def show_lines(lines: Sequence["Line"], console: Console) -> None:
    """Prints the lines."""
    text = "\n".join(line.text for line in lines)
    if console.is_terminal and _draw(lines, console):
        console.record(text)
    else:
        console.line(text)


def _draw(lines: Sequence["Line"], console: Console) -> bool:
    """Prints in colour; false without rich, which plans alone do not need."""
    try:
        from rich.console import Console as RichConsole
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    from shardwise.trainer.planning.explain.first_screen import Tone

    styles = {Tone.TITLE: "bold", Tone.FIGURE: "", Tone.PLAIN: "", Tone.NOTE: "dim"}
    styles |= {Tone.WARNING: "bold yellow", Tone.COMMAND: "cyan"}
    terminal = RichConsole(file=console.stream, highlight=False, soft_wrap=True)
    for line in lines:
        text = Text(line.text, style=styles[line.tone])
        if line.tone is Tone.FIGURE:
            text.stylize("bold", 0, _LABEL_COLUMNS)
        if line.share is None or len(line.text) + _BAR_COLUMNS + 2 > terminal.width:
            terminal.print(text)
            continue
        colour = "yellow" if line.share > _FULL_SHARE else "green"
        bar = ProgressBar(completed=100 * line.share, width=_BAR_COLUMNS, complete_style=colour, finished_style=colour)
        row = Table.grid(padding=(0, 2))
        row.add_row(text, bar)
        terminal.print(row)
    return True
