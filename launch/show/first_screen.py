"""Prints the first screen of a plan: in colour, with a bar for the memory, on a terminal; elsewhere as plain text.

`rich` draws it and follows NO_COLOR and TERM. It is imported on a terminal only, and without it the text is plain.
"""

import os
from collections.abc import Sequence

from shardwise.launch.terminal import Console
from shardwise.trainer.planning.explain.first_screen import Line, Tone

WIDEST, NARROWEST = 100, 60
_BAR_COLUMNS = 20
_LABEL_COLUMNS = 10
_STYLES = {
    Tone.TITLE: "bold",
    Tone.FIGURE: "",
    Tone.PLAIN: "",
    Tone.NOTE: "dim",
    Tone.WARNING: "bold yellow",
    Tone.COMMAND: "cyan",
}
_FULL_SHARE = 0.97  # a bar of a card that is nearly full is yellow


def text_width(console: Console) -> int:
    """Columns of a line: those of the terminal, 100 at most and without one."""
    try:
        columns = os.get_terminal_size(console.stream.fileno()).columns if console.is_terminal else WIDEST
    except (OSError, ValueError):
        columns = WIDEST
    return max(NARROWEST, min(columns or WIDEST, WIDEST))


def show_lines(lines: Sequence[Line], console: Console) -> None:
    """Prints the lines."""
    text = "\n".join(line.text for line in lines)
    if console.is_terminal and _draw(lines, console):
        console.record(text)
    else:
        console.line(text)


def _draw(lines: Sequence[Line], console: Console) -> bool:
    """Prints in colour; false without rich, which plans alone do not need."""
    try:
        from rich.console import Console as RichConsole
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    terminal = RichConsole(file=console.stream, highlight=False, soft_wrap=True)
    for line in lines:
        text = Text(line.text, style=_STYLES[line.tone])
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
