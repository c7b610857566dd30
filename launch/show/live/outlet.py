"""Writes to a console's stream without waiting for whoever reads it.

A terminal that was stopped (Ctrl-S) or that nobody empties takes a few kilobytes and then lets a writer wait. So a
terminal is opened once more, as a descriptor of our own that does not wait: what it did not take of a text is written
first at the next chance, and a text that finds no room is left out. Of pipes, whether there is room is asked before.
"""

import os
import select
import stat
import time
from contextlib import suppress
from typing import TextIO

from trainer.spec.secrets import redact

_SETTLE_S = 1.0


class Outlet:
    """What the view writes through."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._own: int | None = None
        self._is_open = False
        self._rest = b""
        self.is_gone = False  # nobody can read any more

    def write(self, text: str) -> bool:
        """False where the text was left out, as nobody reads or nobody can."""
        if self.is_gone:
            return False
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        content = redact(text).encode(encoding, "replace")
        try:
            own = self._descriptor()
            if own is not None:
                return self._write_own(own, content)
            return self._has_room() and self._write_stream(content.decode(encoding))
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # the terminal, or the stream, was closed
            self.is_gone = True
            return False

    def settle(self) -> None:
        """Writes what is left of a text that was begun, so that others can write; not for longer than a second."""
        until = time.monotonic() + _SETTLE_S
        while self._rest and not self.is_gone and time.monotonic() < until:
            if not self.write(""):
                time.sleep(0.02)
        self._rest = b""

    def close(self) -> None:
        """Gives the descriptor back; the stream stays open."""
        if self._own is not None:
            with suppress(OSError):
                os.close(self._own)
        self._own, self._is_open = None, False

    def _descriptor(self) -> int | None:
        """Of a terminal, one that does not wait; None where there is none."""
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
        self._rest = b"" if rest == content else rest  # of a text that was not begun, nothing
        return rest != content or not content

    def _write_stream(self, text: str) -> bool:
        self._stream.write(text)
        self._stream.flush()
        return True

    def _has_room(self) -> bool:
        """Of a pipe, whether it takes a line; what has no descriptor always does."""
        asked = select.poll()
        try:
            asked.register(self._stream.fileno(), select.POLLOUT)
        except (OSError, ValueError):
            return True
        return bool(asked.poll(0))


def _rest_after(descriptor: int, content: bytes) -> bytes:
    """What there was no room for."""
    with suppress(BlockingIOError):
        while content:
            content = content[os.write(descriptor, content) :]
    return content
