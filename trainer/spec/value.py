"""The base of every value that crosses a module or a process: frozen, keyword-only, strict about unknown fields.

A subclass repeats `frozen=True, kw_only=True`: msgspec does not inherit the second, and type checkers read both.
"""

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An immutable record; equal when its fields are; encoded by `codec`."""
