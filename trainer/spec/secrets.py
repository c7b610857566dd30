"""Text as it may be shown: without secrets of the environment, and without characters that a terminal obeys.

What counts as a secret: values of variables that are named like one (HF_TOKEN, MYSQL_PWD, AZURE_SAS, TEAM_WEBHOOK_URL),
the token that `hf auth login` stored, anything of the form `hf_...`, keys and signatures within a connection string,
and what stands before the `@` of a URL. `[redacted]` is shown instead.
"""

import errno
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TextIO, cast

from shardwise.trainer.spec.errors import EnvironmentFaultError

_NAME = re.compile(
    r"(?:^|_)(?:TOKENS?|SECRETS?|PASSPHRASE|CREDENTIALS?|(?:API|ACCESS|PRIVATE)_?KEYS?|WEBHOOKS?|(?:HOOK|NOTIFY)_URL)(?:$|_)"
    r"|(?:^|_)(?:JWTS?|DSN|SAS|COOKIES?|PWD|CONN(?:ECTION)?_?STR(?:ING)?)(?:$|_)|(?<=[A-Z])TOKEN$|SSHPASS$|^SLACK_URL$"
    r"|PASSWORDS?(?:$|_)|PASSWD(?:$|_)|_(?:KEYS?|PASS|PAT)$"
)
_NO_VALUE = ("_PATH", "_FILE", "_DIR", "_ID")  # such a variable holds a secret's path or owner
_LEAST_CHARACTERS = 8  # shorter ones would occur in ordinary text
_FORMS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}\b|(?<=://)[^/\s@\"']+:[^/\s@\"']+(?=@)"
    r"|(?<=AccountKey=)[A-Za-z0-9+/=]{8,}|(?<=SharedAccessKey=)[A-Za-z0-9+/=]{8,}|(?<=[?&]sig=)[A-Za-z0-9%+/=]{8,}"
)
REDACTED = "[redacted]"
# Control characters but newline and tab, marks that reverse or hide text, and halves of characters, which a name of
# bytes that are not UTF-8 has.
_OBEYED = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff]"
)

_NOT_ASCII = r"[^\x00-\x7f]"


def printable(text: str) -> str:
    """The text with characters that a terminal would obey as JSON writes them: `\\u001b`. JSON keeps its meaning."""
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text  # nearly all text, without compiling that class of a million characters
    return re.sub(_OBEYED, _as_json, text)


def _as_json(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with every secret of the environment replaced; without one, of this process's."""
    values = _own_values() if environment is None else secret_values(environment)
    for value in values:
        text = text.replace(value, REDACTED)
    return _FORMS.sub(REDACTED, text)


def secret_values(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Values that must not be shown, plain and JSON-encoded, the longest first."""
    named = ((name, value.strip()) for name, value in environment.items() if names_secret(name))
    found = {value for name, value in named if not _is_folder(name, value)}
    found.add(_stored_token(environment))
    long = [value for value in found if len(value) >= _LEAST_CHARACTERS]
    return tuple(sorted({*long, *(json.dumps(value)[1:-1] for value in long)}, key=len, reverse=True))


def names_secret(name: str) -> bool:
    """True if a variable of this name holds a secret."""
    return _NAME.search(name.upper()) is not None and not name.upper().endswith(_NO_VALUE)


def _is_folder(name: str, value: str) -> bool:
    """True for a working directory, which a variable that ends with PWD holds as well (PWD, INIT_PWD)."""
    return name.upper().endswith("PWD") and value.startswith("/")


@contextmanager
def redacted_output() -> Iterator[None]:
    """Redacts what Python prints in this block. A stream that fails is dropped, so that no run ends with its output."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", RedactedStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class RedactedStream:
    """A text stream that shows no secret; everything but writing is the stream's own.

    A stream that was closed, or whose disk is full, accepts no more: the rest goes to /dev/null, and `problem` is the
    error. If `is_needed` is set, the error is raised: BrokenPipeError, or EnvironmentFaultError.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """The stream is None if it was closed before Python started."""
        self.is_needed = False
        self.problem = None if stream is not None else OSError(errno.EBADF, os.strerror(errno.EBADF))
        self._since_s: float | None = None  # when the stream was called, while it has not returned
        self._stream = stream if stream is not None else open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123  # as long as the process

    def write(self, text: str) -> int:
        """Returns the length of `text`; the written text may be shorter."""
        self._or_drop(lambda: self._stream.write(self._encodable(redact(text))))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._or_drop(self._stream.flush)

    def drop_if_unread(self, seconds: float) -> None:
        """Drops the stream if a write has waited so long for a reader; for a signal handler, which interrupts it."""
        if self._since_s is not None and time.monotonic() - self._since_s >= seconds:
            self.problem = OSError(errno.EAGAIN, "it is not read")
            self._discard()  # the write that waits is repeated, and goes to /dev/null

    def _encodable(self, text: str) -> str:
        """The text, of a stream that cannot encode it in ASCII, as JSON writes it."""
        try:
            text.encode(getattr(self._stream, "encoding", None) or "utf-8")
        except UnicodeEncodeError:
            return re.sub(_NOT_ASCII, _as_json, text)
        return text

    def _or_drop(self, act: Callable[[], object]) -> None:
        if self.problem is None:
            self._since_s = time.monotonic()
            try:
                act()
            except OSError as error:
                self.problem = error
                self._discard()
            finally:
                self._since_s = None
        if self.is_needed and self.problem is not None:
            if isinstance(self.problem, BrokenPipeError):
                raise BrokenPipeError
            raise EnvironmentFaultError(f"the output cannot be written: {self.problem.strerror}")

    def _discard(self) -> None:
        """Sends what is buffered to /dev/null, or it fails again when Python closes the stream."""
        try:
            number = self._stream.fileno()
        except (OSError, ValueError):
            return
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, number)
        os.close(null)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any attribute of the stream
        return getattr(self._stream, name)


def _stored_token(environment: Mapping[str, str]) -> str:
    """The token of `hf auth login`, which is in a file; empty where there is none."""
    default = Path(environment.get("HF_HOME") or Path(environment.get("HOME", "/nonexistent"), ".cache/huggingface"))
    try:
        return Path(environment.get("HF_TOKEN_PATH") or default / "token").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


@cache
def _own_values() -> tuple[str, ...]:
    return secret_values(os.environ)
