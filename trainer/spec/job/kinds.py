"""What a setting of the job file may hold: how it is read, how it is written back, and its JSON Schema.

A `Kind` reads one value as a person spells it into the value of `trainer.spec.job.sections` and writes that value back
in a spelling it reads again. Quantities (`64k`, `20 min`, `8GiB`) are in `job_quantities`, the sources of data in
`job_sources`. A job may also come from a program that read it as YAML 1.1, where `off` is False and `1e-4` is text:
both are taken for what was written.

`read` raises ValueError where the value is not of the kind, and its subclass `HintError` where there is more to say
than what was expected. None is a legal spelling only where `auto` or `nullable` wraps the kind.
"""

import json
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from msgspec.structs import replace

from trainer.spec.nearest import close_matches
from trainer.spec.value import Value

_YES, _NO = ("yes", "on", "true"), ("no", "off", "false")


class HintError(ValueError):
    """A sentence that follows "expected ..."."""


class Kind(Value, frozen=True, kw_only=True):
    """One type of setting."""

    expected: str  # completes "expected ..."
    read: Callable[[Any], Any]
    schema: Mapping[str, Any]
    write: Callable[[Any], Any] = lambda value: value
    choices: tuple[str, ...] = ()  # the words it knows, for the nearest one
    is_text: bool = False  # any text is legal, so `key=0123` on the command line stays text


def one_of(words: tuple[str, ...]) -> str:
    """`a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def nearest(word: str, words: tuple[str, ...]) -> str | None:
    """The member of `words` that was probably meant."""
    matches = close_matches(word.lower(), words)
    if matches:
        return matches[0]
    # One wrong letter of two is too far apart for that ratio.
    alike = (known for known in words if len(known) == len(word) == 2 and (known[0] == word[0] or known[1] == word[1]))
    return next(alike, None)


def shown(value: object) -> str:
    """The value as a person would recognise it, on one line of at most 60 characters."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    is_printable = not isinstance(value, str) or value.isprintable()
    written = json.dumps(value, ensure_ascii=not is_printable, default=str)
    return written if len(written) <= 60 else written[:56] + "..." + ('"' if isinstance(value, str) else "")


def flag() -> Kind:
    """true or false, also as yes, no, on, off."""

    def read(value: object) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _YES + _NO:
            return value.lower() in _YES
        raise ValueError

    return Kind(
        expected="true or false",
        read=read,
        schema={"anyOf": [{"type": "boolean"}, {"enum": [*_YES, *_NO]}]},
        choices=("true", "false"),
    )


def choice(members: type[StrEnum]) -> Kind:
    """One member of an enum; False is taken for `off` where that is a member."""
    words = tuple(member.value for member in members)

    def read(value: object) -> StrEnum:
        if value is False and "off" in words:
            return members("off")
        if not isinstance(value, str) or value not in words:
            raise ValueError
        return members(value)

    schema = {"enum": [*words, *([False] if "off" in words else [])]}
    return Kind(expected=one_of(words), read=read, write=str, schema=schema, choices=words)


def choices(members: type[StrEnum]) -> Kind:
    """A list of enum members, each once; `none` is the empty list."""
    words = tuple(member.value for member in members)

    def read(value: object) -> tuple[StrEnum, ...]:
        if value == "none":
            return ()
        entries = [value] if isinstance(value, str) else value
        if not isinstance(entries, list | tuple):
            raise ValueError
        for entry in entries:
            if not isinstance(entry, str) or entry not in words:
                meant = nearest(str(entry), words)
                raise HintError(f"{shown(entry)} is none of them" + (f"; did you mean {meant}?" if meant else ""))
        return tuple(dict.fromkeys(members(entry) for entry in entries))

    return Kind(
        expected=f"a list of {one_of(words)}",
        read=read,
        write=lambda value: [str(entry) for entry in value],
        schema={"anyOf": [{"enum": [*words, "none"]}, {"type": "array", "items": {"enum": list(words)}}]},
        choices=words,
    )


def word(*words: str) -> Kind:
    """One of a few words that have no enum."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError
        return value

    return Kind(expected=one_of(words), read=read, schema={"enum": list(words)}, choices=words)


def text(expected: str = "text", *, pattern: str | None = None) -> Kind:
    """Text that is not empty; numbers are refused, because a reader of YAML has already dropped their zeros."""

    def read(value: object) -> str:
        checked = read_text(value)
        if pattern is not None and re.fullmatch(pattern, checked) is None:
            raise ValueError
        return checked

    schema = {"type": "string", **({"pattern": f"^({pattern})$"} if pattern else {"minLength": 1})}
    return Kind(expected=expected, read=read, schema=schema, is_text=True)


def texts(expected: str, *, may_be_empty: bool) -> Kind:
    """One text or a list of them."""

    def read(value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            return (read_text(value),)
        if not isinstance(value, list | tuple) or (not value and not may_be_empty):
            raise ValueError
        return tuple(read_text(entry) for entry in value)

    one = {"type": "string", "minLength": 1}
    return Kind(
        expected=expected,
        read=read,
        write=lambda value: value[0] if len(value) == 1 else list(value),
        schema={"anyOf": [one, {"type": "array", "items": one, "minItems": 0 if may_be_empty else 1}]},
    )


_FLASH_KERNEL = r"[A-Za-z0-9][A-Za-z0-9._-]*/flash-attn2@[0-9a-f]{40}"


def flash_kernel() -> Kind:
    """A FlashAttention 2 kernel of the hub at a commit: its code runs, and a branch or a tag may come to name other."""

    def read(value: object) -> str:
        checked = read_text(value)
        if re.fullmatch(_FLASH_KERNEL, checked):
            return checked
        repository, _, revision = checked.partition("@")
        if re.fullmatch(r"[^/]+/flash-attn2", repository) is None:
            raise HintError("flash is FlashAttention 2, as in kernels-community/flash-attn2")
        what = f"{shown(revision)} may come to name other code" if revision else "the commit is missing"
        raise HintError(f"{what}: a commit is 40 hexadecimal digits")

    return Kind(
        expected="OWNER/flash-attn2@COMMIT",
        read=read,
        schema={"type": "string", "pattern": f"^({_FLASH_KERNEL})$"},
        is_text=True,
    )


def columns(*names: str) -> Kind:
    """A mapping from our name of a field to the column that holds it."""

    def read(value: object) -> dict[str, str]:
        if not isinstance(value, Mapping):
            raise ValueError
        for name in value:
            if name not in names:
                raise HintError(f"{shown(name)} is none of {one_of(names)}")
        return {name: read_text(column) for name, column in value.items()}

    return Kind(
        expected="a mapping such as {prompt: question}",
        read=read,
        write=dict,
        schema={
            "type": "object",
            "properties": {name: {"type": "string", "minLength": 1} for name in names},
            "additionalProperties": False,
        },
    )


def auto(kind: Kind) -> Kind:
    """The kind, or `auto`: None in the value, for whoever decides later."""
    return _or_nothing(kind, words=("auto",), written="auto")


def nullable(kind: Kind) -> Kind:
    """The kind, or null (also `none`): None in the value, nothing set."""
    return _or_nothing(kind, words=("none",), written=None)


def disabled_by_false(kind: Kind) -> Kind:
    """The kind, or false; true is refused."""

    def read(value: object) -> object:
        return None if value is False else nullable(kind).read(value)

    schema = {"anyOf": [{"type": "null"}, {"const": False}, dict(kind.schema)]}
    return replace(
        kind,
        expected=f"false or {kind.expected}",
        read=read,
        write=lambda value: False if value is None else kind.write(value),
        schema=schema,
    )


def read_text(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise HintError("put it in quotes if it is text")
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise HintError("it holds bytes that are not text")
    return value


def _or_nothing(kind: Kind, *, words: tuple[str, ...], written: str | None) -> Kind:
    def read(value: object) -> object:
        return None if value is None or value in words else kind.read(value)

    known = tuple(entry for entry in words if entry not in kind.choices)
    shown_word = written or "null"
    return replace(
        kind,
        expected=f"{shown_word}, {kind.expected}" if kind.choices else f"{shown_word} or {kind.expected}",
        read=read,
        write=lambda value: written if value is None else kind.write(value),
        schema={"anyOf": [{"enum": [None, *words]}, dict(kind.schema)]},
        choices=(*known, *kind.choices) if kind.choices else (),
    )
