"""Where a view is drawn: a block that is redrawn at the bottom of a terminal, or lines in a log.

The cursor stays at the end of the block's last line. To redraw it goes up as many lines as were drawn, never more: of a
terminal that became narrower an old line may stay, but nothing that was printed above is lost.

Nothing here may hold up the run or end it (`live_outlet`): a frame is left out where nobody reads, and a terminal that
is gone is written to no more.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from launch.show.live.outlet import Outlet
from launch.show.live.text import ASCII, UNICODE, Glyphs
from launch.terminal import Console

_USUAL_SIZE = os.terminal_size((80, 24))
_UNSAID = ("", "0", "false", "no", "off")
_PLAIN_LOCALES = ("C", "POSIX")


def draws_block(console: Console, environment: Mapping[str, str]) -> bool:
    """Whether there is a terminal to redraw; a CI system and Slurm keep what is written, redrawn lines too."""
    is_capable = environment.get("TERM", "dumb") not in ("dumb", "unknown", "")
    is_kept = environment.get("CI", "").lower() not in _UNSAID or bool(environment.get("SLURM_JOB_ID"))
    return is_capable and not is_kept and console.is_terminal


def glyphs_for(encoding: str | None, environment: Mapping[str, str]) -> Glyphs:
    """Block characters where both Python and the locale say UTF-8, else ASCII.

    Python takes the locale `C` for `C.UTF-8` and sets LC_CTYPE to it, so of LANG=C its own answer says nothing.
    """
    if (encoding or "").lower().replace("-", "") != "utf8":
        return ASCII
    everything, characters = environment.get("LC_ALL"), environment.get("LC_CTYPE")
    language = environment.get("LANG", "")
    if not everything and language in _PLAIN_LOCALES and characters in (None, "", "C.UTF-8", "C.utf8", "UTF-8"):
        return ASCII
    named = (everything or characters or language).lower().replace("-", "")
    return UNICODE if "utf8" in named else ASCII


class Screen:
    """A block at the bottom of what a console shows; what is printed meanwhile goes above it."""

    def __init__(self, console: Console, environment: Mapping[str, str]) -> None:
        self._console = console
        self.is_block = draws_block(console, environment)
        self.has_color = not environment.get("NO_COLOR")
        self.glyphs = glyphs_for(getattr(console.stream, "encoding", None), environment)
        self._num_drawn = 0
        self._drawn: Sequence[str] = ()
        self._outlet = Outlet(console.stream)

    @property
    def is_gone(self) -> bool:
        """Whether nobody can read any more."""
        return self._outlet.is_gone

    @contextmanager
    def shown(self) -> Iterator["Screen"]:
        """While the block runs, lines of the console go above what is drawn; what was drawn last stays."""
        self._console.before_line = self.take_away
        try:
            yield self
        finally:
            self._console.before_line = None
            self.leave()
            self._outlet.close()

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines now; of a terminal that does not say, 80 by 24."""
        try:
            size = os.get_terminal_size(self._console.stream.fileno())
        except (OSError, ValueError):
            return _USUAL_SIZE
        return os.terminal_size((size.columns or _USUAL_SIZE.columns, size.lines or _USUAL_SIZE.lines))

    def draw(self, lines: Sequence[str]) -> None:
        """Replaces the block; of a low terminal by its first lines."""
        kept = lines[: max(1, self.size.lines - 1)]
        if self._num_drawn and kept == self._drawn:
            return
        if not kept:
            return
        frame, before = self._erasing() + "\n".join(kept), self._num_drawn
        self._num_drawn = max(before, len(kept))  # Ctrl-C may come right after the write
        if self._outlet.write(frame):
            self._num_drawn, self._drawn = len(kept), kept
        else:
            self._num_drawn = before

    def print_line(self, text: str) -> None:
        """A line above the block; left out where nobody reads."""
        if self._outlet.write(f"{self._erasing()}{text}\n"):
            self._num_drawn = 0

    def take_away(self) -> None:
        """Removes the block, so that a line can be printed in its place; where nobody reads, it is left as it is."""
        self._outlet.settle()
        if self._num_drawn:
            self._outlet.write(self._erasing())
        self._num_drawn = 0

    def leave(self) -> None:
        """Ends the block: it stays as it is, and what follows begins below it."""
        if self._num_drawn and self._outlet.write("\n"):
            self._num_drawn = 0

    def _erasing(self) -> str:
        up = f"\x1b[{self._num_drawn - 1}A" if self._num_drawn > 1 else ""
        return f"\r{up}\x1b[J" if self._num_drawn else ""
