"""Output of a view: a block that rich redraws at the bottom of a terminal, or lines in a log.

Output may neither delay the run nor end it. A terminal that was stopped (Ctrl-S), or whose reader hangs, accepts
a few kilobytes and then blocks a writer. So a terminal or a pipe is opened once more, as a descriptor that does not
block. What the reader does not accept yet is retained and written first, up to a limit; no frame is drawn meanwhile.
A terminal that is closed gets no more output.

rich is imported on a terminal only; without it there are lines.
"""

import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, TextIO

from shardwise.launch.show.view import LiveView, block, log_line
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.secrets import printable, redact

if TYPE_CHECKING:
    from rich.live import Live

_SETTLE_S = 1.0
_MOST_WAITING_BYTES = 2**20


class Outlet:
    """The stream of a console as a text file that never waits for its reader."""

    def __init__(self, stream: TextIO) -> None:
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self._stream = stream
        self._own: int | None = None
        self._is_open = False
        self._rest = b""
        self.is_closed = False  # the reader has closed it

    @property
    def is_waiting(self) -> bool:
        """True if the reader has not accepted everything."""
        self.flush()
        return bool(self._rest)

    def write(self, text: str) -> int:
        if len(self._rest) < _MOST_WAITING_BYTES:
            self._rest += text.encode(self.encoding, "replace")
        self.flush()
        return len(text)

    def flush(self) -> None:
        """Writes what the reader accepts."""
        if self.is_closed:
            self._rest = b""
            return
        try:
            own = self._descriptor()
            if own is None:
                content, self._rest = self._rest, b""
                self._stream.write(content.decode(self.encoding))
            self._stream.flush()
            while self._rest and own is not None:
                self._rest = self._rest[os.write(own, self._rest) :]
        except BlockingIOError:
            return
        except (OSError, ValueError):  # the terminal, or the stream, was closed
            self.is_closed = True

    def close(self) -> None:
        """Waits at most for a second until the reader has accepted everything; the stream stays open."""
        until = time.monotonic() + _SETTLE_S
        while self.is_waiting and time.monotonic() < until:
            time.sleep(0.02)
        self._rest = b""
        if self._own is not None:
            with suppress(OSError):
                os.close(self._own)
        self._own, self._is_open = None, False

    def _descriptor(self) -> int | None:
        """A descriptor that does not block; None if the stream is neither a terminal nor a pipe."""
        if not self._is_open:
            self._is_open = True
            with suppress(OSError, ValueError):  # no file behind the stream, or one that cannot be opened again
                number = self._stream.fileno()
                mode = os.fstat(number).st_mode
                if stat.S_ISFIFO(mode) or (stat.S_ISCHR(mode) and os.isatty(number)):
                    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                    self._own = os.open(f"/proc/self/fd/{number}", flags)
        return self._own


_USUAL_SIZE = os.terminal_size((80, 24))
_FALSE = ("", "0", "false", "no", "off")


def _draws_block(console: Console, environment: Mapping[str, str]) -> bool:
    """True on a terminal that can redraw lines; logs of CI systems and of Slurm keep redrawn lines as well."""
    is_capable = environment.get("TERM", "dumb") not in ("dumb", "unknown", "")
    is_retained = environment.get("CI", "").lower() not in _FALSE or bool(environment.get("SLURM_JOB_ID"))
    return is_capable and not is_retained and console.is_terminal and find_spec("rich") is not None


class Screen:
    """A block at the bottom of a console; lines that are printed meanwhile go above it."""

    def __init__(self, console: Console, environment: Mapping[str, str]) -> None:
        self._console, self._environment = console, environment
        self.is_block = _draws_block(console, environment)
        self._outlet = Outlet(console.stream)
        self._live: Live | None = None

    @property
    def is_closed(self) -> bool:
        """True if the reader has closed the stream."""
        return self._outlet.is_closed

    @contextmanager
    def shown(self) -> Iterator["Screen"]:
        """While the block runs, lines of the console go above what is drawn; what was drawn last stays."""
        if self.is_block:
            self._console.print_above = self._print_above
        try:
            yield self
        finally:
            self._console.print_above = None
            if self._live is not None:
                self._live.stop()
            self._live = None
            self._outlet.close()

    def _started(self) -> "Live":
        from rich.console import Console as RichConsole
        from rich.live import Live

        terminal = RichConsole(
            file=self._outlet,  # type: ignore[arg-type] # it has what rich calls
            force_terminal=True,
            highlight=False,
            _environ=self._environment,
        )
        live = Live(console=terminal, auto_refresh=False, redirect_stdout=False, redirect_stderr=False,
                    vertical_overflow="crop")  # fmt: skip
        live.start()
        terminal.show_cursor()  # or it would stay hidden after the process is killed
        return live

    def draw(self, view: LiveView) -> None:
        """Replaces the block, on a low terminal by its first lines; not while the reader is stopped."""
        if self._outlet.is_waiting:
            return
        self._live = self._live or self._started()
        terminal = self._live.console
        try:
            size = os.get_terminal_size(self._console.stream.fileno())
        except (OSError, ValueError):
            size = _USUAL_SIZE
        columns = (size.columns or _USUAL_SIZE.columns) - 1  # a character in the last would make some terminals wrap
        terminal.width, terminal.height = columns, size.lines or _USUAL_SIZE.lines
        is_ascii = terminal.options.ascii_only
        self._live.update(block(view, width=columns, is_ascii=is_ascii), refresh=True)

    def print_line(self, text: str) -> None:
        """A line above the block."""
        self._console.record(text)
        self._print_above(text)

    def _print_above(self, text: str) -> None:
        text = redact(printable(text))
        if self._live is None:
            self._outlet.write(f"{text}\n")
            return
        from rich.text import Text

        self._live.console.print(Text(text), soft_wrap=True)


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
            screen.draw(view)
            if view.step and view.step != self._shown_step and self._clock() - self._recorded_at >= LOG_EVERY_S:
                self._console.record(log_line(view))
                self._recorded_at = self._clock()
        elif view.step == self._shown_step:
            return
        else:
            screen.print_line(log_line(view))
        self._shown_at, self._shown_step = self._clock(), view.step
