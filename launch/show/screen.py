"""Output of a view: a block that is redrawn at the bottom of a terminal, or lines in a log.

The cursor stays at the end of the block's last line. To redraw, it moves up by as many lines as were drawn, never more:
if the terminal became narrower, an old line may stay, but nothing that was printed above is lost.

Output may neither delay the run nor end it. A terminal that was stopped (Ctrl-S), or whose reader hangs, accepts
a few kilobytes and then blocks a writer. So a terminal is opened once more, as a descriptor that does not block: the
rest of a text that it did not accept is written first at the next call, and a text for which there is no room is
dropped. A pipe is polled for room. A terminal that is closed gets no more output.
"""

import os
import select
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from shardwise.launch.show.view import ASCII, UNICODE, Glyphs, LiveView, block_lines, log_line
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.secrets import redact

_SETTLE_S = 1.0


class Outlet:
    """The stream that the view writes to."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._own: int | None = None
        self._is_open = False
        self._rest = b""
        self.is_closed = False  # the reader has closed it

    def write(self, text: str) -> bool:
        """False if the text was dropped, because the reader is stopped or has closed the stream."""
        if self.is_closed:
            return False
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        content = text.encode(encoding, "replace")
        try:
            own = self._descriptor()
            if own is not None:
                return self._write_own(own, content)
            if not self._has_room():
                return False
            self._stream.write(content.decode(encoding))
            self._stream.flush()
            return True
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # the terminal, or the stream, was closed
            self.is_closed = True
            return False

    def settle(self) -> None:
        """Writes the rest of a text that was begun, so that others can write; at most for a second."""
        until = time.monotonic() + _SETTLE_S
        while self._rest and not self.is_closed and time.monotonic() < until:
            if not self.write(""):
                time.sleep(0.02)
        self._rest = b""

    def close(self) -> None:
        """Closes the own descriptor; the stream stays open."""
        if self._own is not None:
            with suppress(OSError):
                os.close(self._own)
        self._own, self._is_open = None, False

    def _descriptor(self) -> int | None:
        """A descriptor of the terminal that does not block; None if the stream is no terminal."""
        if not self._is_open:
            self._is_open = True
            with suppress(OSError, ValueError):  # no file behind the stream, or one that cannot be opened again
                number = self._stream.fileno()
                if os.isatty(number) and stat.S_ISCHR(os.fstat(number).st_mode):
                    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                    self._own = os.open(f"/proc/self/fd/{number}", flags)
        return self._own

    def _write_own(self, own: int, content: bytes) -> bool:
        self._stream.flush()
        self._rest = _rest_after(own, self._rest)
        if self._rest:
            return False
        rest = _rest_after(own, content)
        self._rest = b"" if rest == content else rest  # a text that was not begun is dropped
        return rest != content or not content

    def _has_room(self) -> bool:
        """True if a pipe has room for a line; a stream without a descriptor always has."""
        requested = select.poll()
        try:
            requested.register(self._stream.fileno(), select.POLLOUT)
        except (OSError, ValueError):
            return True
        return bool(requested.poll(0))


def _rest_after(descriptor: int, content: bytes) -> bytes:
    """The rest of `content` that the terminal did not accept."""
    with suppress(BlockingIOError):
        while content:
            content = content[os.write(descriptor, content) :]
    return content


_USUAL_SIZE = os.terminal_size((80, 24))
_FALSE = ("", "0", "false", "no", "off")
_PLAIN_LOCALES = ("C", "POSIX")


def _draws_block(console: Console, environment: Mapping[str, str]) -> bool:
    """True on a terminal that can redraw lines; logs of CI systems and of Slurm keep redrawn lines as well."""
    is_capable = environment.get("TERM", "dumb") not in ("dumb", "unknown", "")
    is_retained = environment.get("CI", "").lower() not in _FALSE or bool(environment.get("SLURM_JOB_ID"))
    return is_capable and not is_retained and console.is_terminal


def glyphs_for(encoding: str | None, environment: Mapping[str, str]) -> Glyphs:
    """Block characters if both Python and the locale use UTF-8, else ASCII.

    With LANG=C, Python uses `C.UTF-8` and sets LC_CTYPE to it, so its encoding does not show the user's locale.
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
    """A block at the bottom of a console; lines that are printed meanwhile go above it."""

    def __init__(self, console: Console, environment: Mapping[str, str]) -> None:
        self._console = console
        self.is_block = _draws_block(console, environment)
        self.has_color = not environment.get("NO_COLOR")
        self.glyphs = glyphs_for(getattr(console.stream, "encoding", None), environment)
        self._num_lines = 0
        self._lines: Sequence[str] = ()
        self._outlet = Outlet(console.stream)

    @property
    def is_closed(self) -> bool:
        """True if the reader has closed the stream."""
        return self._outlet.is_closed

    @contextmanager
    def shown(self) -> Iterator["Screen"]:
        """While the block runs, lines of the console go above what is drawn; what was drawn last stays."""
        self._console.before_line = self.remove
        try:
            yield self
        finally:
            self._console.before_line = None
            self.finish()
            self._outlet.close()

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines now; 80 by 24 if the terminal does not report them."""
        try:
            size = os.get_terminal_size(self._console.stream.fileno())
        except (OSError, ValueError):
            return _USUAL_SIZE
        return os.terminal_size((size.columns or _USUAL_SIZE.columns, size.lines or _USUAL_SIZE.lines))

    def draw(self, lines: Sequence[str]) -> None:
        """Replaces the block, on a low terminal by its first lines."""
        retained = lines[: max(1, self.size.lines - 1)]
        if not retained or (self._num_lines and retained == self._lines):
            return
        frame, before = self._erasing() + redact("\n".join(retained)), self._num_lines
        self._num_lines = max(before, len(retained))  # Ctrl-C may come right after the write
        if self._outlet.write(frame):
            self._num_lines, self._lines = len(retained), retained
        else:
            self._num_lines = before

    def print_line(self, text: str) -> None:
        """A line above the block; dropped if the reader is stopped, but recorded."""
        self._console.record(text)
        if self._outlet.write(f"{self._erasing()}{redact(text)}\n"):
            self._num_lines = 0

    def remove(self) -> None:
        """Removes the block, so that a line can be printed in its place; unchanged if the reader is stopped."""
        self._outlet.settle()
        if self._num_lines:
            self._outlet.write(self._erasing())
        self._num_lines = 0

    def finish(self) -> None:
        """Ends the block: it stays as it is, and what follows begins below it."""
        if self._num_lines and self._outlet.write("\n"):
            self._num_lines = 0

    def _erasing(self) -> str:
        up = f"\x1b[{self._num_lines - 1}A" if self._num_lines > 1 else ""
        return f"\r{up}\x1b[J" if self._num_lines else ""


LOG_EVERY_S = 10.0  # between two lines
DRAW_EVERY_S = 0.25  # between two frames


class ViewOutput:
    """Decides how and how often a view is shown."""

    def __init__(
        self, console: Console, environment: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.screen = Screen(console, environment)
        self._clock = clock
        self._console = console
        self._shown_at = self._recorded_at = float("-inf")
        self._shown_step: int | None = None

    @property
    def is_due(self) -> bool:
        """True if the next view is due."""
        return self._clock() - self._shown_at >= (DRAW_EVERY_S if self.screen.is_block else LOG_EVERY_S)

    def show(self, view: LiveView) -> None:
        """Draws the view; in a log, each step once."""
        screen = self.screen
        if screen.is_block:
            width = screen.size.columns - 1  # a character in the last column would make some terminals wrap
            screen.draw(block_lines(view, width=width, glyphs=screen.glyphs, has_color=screen.has_color))
            if view.step and view.step != self._shown_step and self._clock() - self._recorded_at >= LOG_EVERY_S:
                self._console.record(log_line(view))
                self._recorded_at = self._clock()
        elif view.step == self._shown_step:
            return
        else:
            screen.print_line(log_line(view))
        self._shown_at, self._shown_step = self._clock(), view.step
