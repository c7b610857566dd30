"""Regular expressions that other packages compile when they are imported, compiled when they are used instead.

Most never are: those of PyYAML, argparse, json and msgspec were an eighth of all that `shardwise plan` did.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_compile = re.compile


class _Expression:
    """Has every member of a compiled expression; functions of `re` accept its members' results, not itself."""

    def __init__(self, pattern: Any, flags: int = 0) -> None:  # noqa: ANN401  # of text or bytes
        self._arguments = pattern, flags

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any member
        return getattr(_compile(*self._arguments), name)


@contextmanager
def compiled_when_used() -> Iterator[None]:
    """Imports inside it compile no expression; for modules that call methods of their expressions alone."""
    before = re.compile
    re.compile = _Expression  # type: ignore[assignment]
    try:
        yield
    finally:
        re.compile = before
