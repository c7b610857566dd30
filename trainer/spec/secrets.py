"""Removes secrets of the environment from everything that is written or printed.

What counts: values of variables that are named like one (HF_TOKEN, WANDB_API_KEY, TEAM_WEBHOOK_URL), the token
that `hf auth login` stored, anything of the form `hf_...`, and what stands before the `@` of a URL. Shown is
`[redacted]`.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TextIO, cast

_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(?:API|ACCESS|PRIVATE)_?KEY|WEBHOOKS?|HOOK_URL)(?:$|_)"
)
_NO_VALUE = ("_PATH", "_FILE", "_DIR", "_ID")  # such a variable holds a secret's path or owner
_LEAST_CHARACTERS = 8  # shorter ones would occur in ordinary text
_FORMS = re.compile(r"\bhf_[A-Za-z0-9]{20,}\b|(?<=://)[^/\s@\"']+:[^/\s@\"']+(?=@)")
REDACTED = "[redacted]"


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with every secret of the environment replaced; without one, of this process's."""
    values = _own_values() if environment is None else secret_values(environment)
    for value in values:
        text = text.replace(value, REDACTED)
    return _FORMS.sub(REDACTED, text)


def secret_values(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Values that must not be shown, plain and JSON-encoded, the longest first."""
    found = {value.strip() for name, value in environment.items() if names_secret(name)}
    found.add(_stored_token(environment))
    long = [value for value in found if len(value) >= _LEAST_CHARACTERS]
    return tuple(sorted({*long, *(json.dumps(value)[1:-1] for value in long)}, key=len, reverse=True))


def names_secret(name: str) -> bool:
    """True if a variable of this name holds a secret."""
    return _NAME.search(name.upper()) is not None and not name.upper().endswith(_NO_VALUE)


@contextmanager
def redacted_output() -> Iterator[None]:
    """Redacts what Python prints in this block."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", RedactedStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class RedactedStream:
    """A text stream that shows no secret; everything but `write` is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Returns the length of `text`; the written text may be shorter."""
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

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
