"""The base of every value that crosses a module or a process: frozen, keyword-only, strict about unknown fields.

A subclass repeats `frozen=True, kw_only=True`: msgspec does not inherit the second, and type checkers read both.
"""

import sys
from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar

# msgspec prefers typing_extensions, which torch brings and which needs ten milliseconds to load, to what Python 3.11
# has of the same. None is Python's way to say that a module is not there.
_IS_HIDDEN = "typing_extensions" not in sys.modules
if _IS_HIDDEN:
    sys.modules["typing_extensions"] = None  # type: ignore[assignment]
from msgspec import Struct as Struct  # noqa: E402

if _IS_HIDDEN:
    del sys.modules["typing_extensions"]

_Member = TypeVar("_Member", bound=StrEnum)
_Row = TypeVar("_Row")


class Value(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An immutable record; equal when its fields are; encoded by `codec`."""


def complete(members: Iterable[_Member], rows: dict[_Member, _Row], table: str) -> dict[_Member, _Row]:
    """`rows`, the rows of `table`; LookupError if a member has none."""
    missing = [f"{type(member).__name__}.{member.name}" for member in members if member not in rows]
    if missing:
        raise LookupError(f"{table} has no row for {', '.join(missing)}")
    return rows
