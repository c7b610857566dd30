"""Kinds of setting: how a value is read, how it is written back, and its JSON Schema.

A `Kind` reads one value as a person spells it into the value of `trainer.spec.job.sections` and writes that value back
in a spelling that it reads again. A job may also come from a program that read it as YAML 1.1, where `off` is False and
`1e-4` is text: both are accepted. A bare number is refused where a unit decides its meaning (`warmup: 0.03`,
`every: 500`), and the message names the likely spelling. Bounds belong to the kind, so its message can name them.

`read` raises ValueError if the value is not of the kind, and its subclass `HintError` if the message needs more than
what was expected. None is legal only where `or_none` wraps the kind.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, Literal, TypeVar, get_args, get_origin

from msgspec import Struct
from msgspec.structs import replace

from shardwise.trainer.spec.errors import close_matches
from shardwise.trainer.spec.secrets import REDACTED
from shardwise.trainer.spec.units import GIB, MIB, parse_bytes, parse_count, parse_seconds, parse_share
from shardwise.trainer.spec.value import Value

TEXT_SCHEMA = {"type": "string", "minLength": 1}
LARGEST_WHOLE = 2**53  # the largest that JSON readers agree on
_YES, _NO = ("yes", "on", "true"), ("no", "off", "false")
_NUMBER_PATTERN = r"[0-9][0-9_]*(\.[0-9]+)?([eE][+-]?[0-9]+)?|\.[0-9]+"
_TIME_PATTERN = r"(s|sec|seconds?|min|minutes?|h|hours?|d|days?)"
_URL_SCHEMES = ("http://", "https://")
_VARIABLE = r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})"

T = TypeVar("T")
NoneSpelling = Literal["null", "auto", "false"]


class HintError(ValueError):
    """A sentence that follows "expected ..."."""


class Kind(Value, frozen=True, kw_only=True):
    """One type of setting."""

    expected: str  # completes "expected ..."
    read: Callable[[Any], Any]
    schema: Mapping[str, Any]
    write: Callable[[Any], Any] = lambda value: value
    choices: tuple[str, ...] = ()  # names that it accepts, for the nearest one
    is_text: bool = False  # any text is legal, so `key=0123` on the command line stays text


class Setting(Struct, frozen=True):
    """Annotation that makes a field of `trainer.spec.job.sections` a setting of the job file."""

    description: str  # one sentence, for docs and editors
    kind: Kind | None = None  # None: that of the field's type (a bool, an enum, a tuple of an enum's members)
    none: NoneSpelling = "null"  # spelling of None, if the type admits it
    name: str = ""  # in the file, if it is not the field's own
    further_fields: tuple[str, ...] = ()  # of the same value, if the setting fills several


class Every(Value, frozen=True, kw_only=True):
    """An interval; exactly one of the two is set."""

    steps: int | None = None
    seconds: float | None = None


class Warmup(Value, frozen=True, kw_only=True):
    """Steps until the full learning rate: a share of the run or a number; exactly one is set."""

    share: float | None = None
    steps: int | None = None


def one_of(names: tuple[str, ...]) -> str:
    """`a, b or c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def nearest(word: str, names: tuple[str, ...]) -> str | None:
    """The member of `names` that the user probably meant."""
    matches = close_matches(word.lower(), names)
    if matches:
        return matches[0]
    # One wrong letter of two is too far apart for that ratio.
    alike = (known for known in names if len(known) == len(word) == 2 and (known[0] == word[0] or known[1] == word[1]))
    return next(alike, None)


def shown(value: object) -> str:
    """The value as the user wrote it, on one line of at most 60 characters."""
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


def kind_of_type(of_type: object) -> Kind:
    """Kind of a field by its type alone: a bool, an enum or a tuple of an enum's members."""
    if of_type is bool:
        return flag()
    if get_origin(of_type) is tuple:
        return choices(get_args(of_type)[0])
    assert isinstance(of_type, type) and issubclass(of_type, StrEnum), of_type
    return choice(of_type)


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
    """One member of an enum; False means `off` if that is a member."""
    word = one_word(*(member.value for member in members))
    has_off = "off" in word.choices
    return replace(
        word,
        read=lambda value: members(word.read("off" if has_off and value is False else value)),
        write=str,
        schema={"enum": [*word.choices, *([False] if has_off else [])]},
    )


def choices(members: type[StrEnum]) -> Kind:
    """A list of enum members, each once; `none` is the empty list."""
    names = tuple(member.value for member in members)

    def read(value: object) -> tuple[StrEnum, ...]:
        if value == "none":
            return ()
        entries = [value] if isinstance(value, str) else value
        if not isinstance(entries, list | tuple):
            raise ValueError
        for entry in entries:
            if not isinstance(entry, str) or entry not in names:
                meant = nearest(str(entry), names)
                raise HintError(f"{shown(entry)} is none of them" + (f"; did you mean {meant}?" if meant else ""))
        return tuple(dict.fromkeys(members(entry) for entry in entries))

    return Kind(
        expected=f"a list of {one_of(names)}",
        read=read,
        write=lambda value: [str(entry) for entry in value],
        schema={"anyOf": [{"enum": [*names, "none"]}, {"type": "array", "items": {"enum": list(names)}}]},
        choices=names,
    )


def one_word(*names: str) -> Kind:
    """One of a few names without an enum."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return Kind(expected=one_of(names), read=read, schema={"enum": list(names)}, choices=names)


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

    return Kind(
        expected=expected,
        read=read,
        write=lambda value: value[0] if len(value) == 1 else list(value),
        schema={"anyOf": [TEXT_SCHEMA, {"type": "array", "items": TEXT_SCHEMA, "minItems": 0 if may_be_empty else 1}]},
    )


def columns(*names: str) -> Kind:
    """A mapping from the standard name of a field to the name of the column."""

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
            "properties": dict.fromkeys(names, TEXT_SCHEMA),
            "additionalProperties": False,
        },
    )


def whole(what: str = "a whole number", *, minimum: int, maximum: int = LARGEST_WHOLE) -> Kind:
    """A count as `65536`, `64k`, `2G` or `1e6`."""

    def read(value: object) -> int:
        count = _read_count(value)
        if not minimum <= count <= maximum:
            raise ValueError
        return count

    number = {"type": "integer", "minimum": minimum, "maximum": maximum}
    text_form = {"type": "string", "pattern": rf"^\s*({_NUMBER_PATTERN})\s*[kKmMgGbBtT]?\s*$"}
    limits = f"{what} of at least {minimum}" if maximum == LARGEST_WHOLE else f"{what} from {minimum} to {maximum}"
    return Kind(expected=limits, read=read, schema={"anyOf": [number, text_form]})


def number(
    *,
    above: float | None = None,
    minimum: float | None = None,
    below: float | None = None,
    maximum: float | None = None,
) -> Kind:
    """A number within bounds; `1e-4` is one, read as text or as a number."""
    bounds = {"exclusiveMinimum": above, "minimum": minimum, "exclusiveMaximum": below, "maximum": maximum}

    def read(value: object) -> float:
        parsed = _read_number(value)
        is_above_low = (above is None or parsed > above) and (minimum is None or parsed >= minimum)
        is_below_high = (below is None or parsed < below) and (maximum is None or parsed <= maximum)
        if not (is_above_low and is_below_high):
            raise ValueError
        return parsed

    schema = {"type": "number", **{name: bound for name, bound in bounds.items() if bound is not None}}
    text_form = {"type": "string", "pattern": rf"^\s*({_NUMBER_PATTERN})\s*$"}
    return Kind(expected=_bounded(above, minimum, below, maximum), read=read, schema={"anyOf": [schema, text_form]})


def share() -> Kind:
    """A share as `3%`; a bare number is refused, because 1 may mean 1 % or everything."""

    def read(value: object) -> float:
        parsed = read_share(value)
        if parsed > 1:
            raise ValueError
        return parsed

    return Kind(
        expected='a share of at most 100%, such as "3%"',
        read=read,
        write=write_share,
        schema={"type": "string", "pattern": rf"^\s*({_NUMBER_PATTERN})\s*%\s*$"},
    )


def byte_size() -> Kind:
    """Bytes as `8GiB` or `80GB`; a plain number is bytes, and one below a MiB is refused as a probable mistake."""

    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        text_form = _bounded_text(str(value).strip()).removesuffix(".0")
        in_g = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*[gG]?", text_form)
        if in_g is not None and (not text_form.isdigit() or 0 < int(text_form) < MIB):
            raise HintError(f'did you mean "{in_g[1]}GiB"?')
        num_bytes = parse_bytes(text_form)
        if not MIB <= num_bytes <= LARGEST_WHOLE:
            raise ValueError
        return num_bytes

    units = r"\s*(([kKmMgGtT][iI]?)?[bB])?\s*"
    return Kind(
        expected='a size such as "8GiB" or "80GB"',
        read=read,
        write=write_size,
        schema={
            "anyOf": [
                {"type": "integer", "minimum": MIB, "maximum": LARGEST_WHOLE},
                {"type": "string", "pattern": rf"^\s*({_NUMBER_PATTERN}){units}$"},
            ]
        },
    )


def time_in_hours() -> Kind:
    """Hours as a number, or a time with its unit such as `90 min`."""

    def read(value: object) -> float:
        if isinstance(value, str) and re.search(r"[A-Za-z]\s*$", value):
            parsed = parse_seconds(_bounded_text(value)) / 3600
        else:
            parsed = _read_number(value)
        if not 0 < parsed <= 24 * 3660:
            raise ValueError
        return parsed

    pattern = rf"^\s*({_NUMBER_PATTERN})\s*{_TIME_PATTERN}?\s*$"
    schema = {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": pattern}]}
    return Kind(expected='hours above 0, or a time such as "90 min"', read=read, schema=schema)


def interval(*, allows_time: bool) -> Kind:
    """An interval as `500 steps` or, if `allows_time`, `20 min`; a bare number is ambiguous."""

    def read(value: object) -> Every:
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            raise HintError(f'did you mean "{value} step{"" if value == 1 else "s"}"?')
        if not isinstance(value, str):
            raise ValueError
        in_steps = re.fullmatch(r"\s*(.*?)\s*steps?\s*", value)
        if in_steps is not None:
            return Every(steps=int(_positive(_read_count(in_steps[1]))))
        if not allows_time or not re.search(r"[A-Za-z]\s*$", value):
            raise ValueError
        return Every(seconds=_positive(parse_seconds(_bounded_text(value))))

    units = rf"([kKmM]?\s*steps?|{_TIME_PATTERN})" if allows_time else r"[kKmM]?\s*steps?"
    return Kind(
        expected='an interval such as "500 steps"' + (' or "20 min"' if allows_time else ""),
        read=read,
        write=_write_every,
        schema={"type": "string", "pattern": rf"^\s*({_NUMBER_PATTERN})\s*{units}\s*$"},
    )


def warmup_length() -> Kind:
    """A share of the run, or a number of steps."""

    def read(value: object) -> Warmup:
        if isinstance(value, str) and value.strip().endswith("%"):
            return Warmup(share=read_share(value))
        if isinstance(value, float) and 0 < value < 1:
            raise HintError(f'did you mean "{write_share(value)}"?')
        steps = _read_count(re.sub(r"\s*steps?\s*$", "", value) if isinstance(value, str) else value)
        if steps > LARGEST_WHOLE:
            raise ValueError
        return Warmup(steps=steps)

    pattern = rf"^\s*({_NUMBER_PATTERN})\s*(%|[kKmM]?(\s*steps?)?)\s*$"
    return Kind(
        expected='a share such as "3%" or a number of steps',
        read=read,
        write=lambda value: value.steps if value.share is None else write_share(value.share),
        schema={"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": pattern}]},
    )


def notification() -> Kind:
    """Receiver of notices: a URL of http or https, `$NAME` of a variable with a URL, or a command as text or list.

    A command is stored as a list of arguments, so that no shell reads them: text is split as a shell would.
    """

    def read(value: object) -> tuple[str, ...]:
        if isinstance(value, list | tuple):
            argv = tuple(read_text(argument) for argument in value)
        else:
            argv = _split_command(read_text(value))
        if not argv:
            raise ValueError
        if is_url(argv):
            check_url(argv[0])
        elif "://" in argv[0]:
            raise HintError("a URL begins with http:// or https://")
        return argv

    return Kind(
        expected="a URL, $NAME of a variable that holds one, a command or a list of its arguments",
        read=read,
        write=lambda argv: argv[0] if is_url(argv) or variable_of(argv) else list(argv),
        schema={"anyOf": [TEXT_SCHEMA, {"type": "array", "items": TEXT_SCHEMA, "minItems": 1}]},
        is_text=True,
    )


def or_none(kind: Kind, *, spelling: NoneSpelling) -> Kind:
    """The kind, or None in the value: written as null (also `none`), as `auto`, or as false."""
    names = ("auto",) if spelling == "auto" else ("none",)
    written = {"null": None, "auto": "auto", "false": False}[spelling]

    def read(value: object) -> object:
        is_none = value is None or value in names or (spelling == "false" and value is False)
        return None if is_none else kind.read(value)

    none_schema = [{"type": "null"}, {"const": False}] if spelling == "false" else [{"enum": [None, *names]}]
    further = tuple(entry for entry in names if entry not in kind.choices)
    return replace(
        kind,
        expected=f"{spelling}{', ' if kind.choices else ' or '}{kind.expected}",
        read=read,
        write=lambda value: written if value is None else kind.write(value),
        schema={"anyOf": [*none_schema, dict(kind.schema)]},
        choices=(*further, *kind.choices) if kind.choices else (),
    )


def read_share(value: object) -> float:
    """A share from `3%`; `0.03` is refused with the likely spelling."""
    if isinstance(value, float) and 0 < value < 1:
        raise HintError(f'did you mean "{write_share(value)}"?')
    if not isinstance(value, str):
        raise ValueError
    return parse_share(_bounded_text(value))


def write_share(value: float) -> str:
    """`3%`, the shortest text that reads back as the same float."""
    percent = value * 100
    near = (percent, math.nextafter(percent, math.inf), math.nextafter(percent, 0))
    texts = (f"{candidate:.{digits}g}" for digits in (15, 16, 17) for candidate in near)
    return next((text for text in texts if float(text) / 100 == value), f"{percent:.17g}") + "%"


def write_size(num_bytes: int) -> str | int:
    """In GiB or MiB where it is a whole number of them, else in bytes."""
    if num_bytes % GIB == 0:
        return f"{num_bytes // GIB}GiB"
    return f"{num_bytes // MIB}MiB" if num_bytes % MIB == 0 else num_bytes


def read_text(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise HintError("put it in quotes if it is text")
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise HintError("it holds bytes that are not text")
    return value


def is_url(notify: tuple[str, ...]) -> bool:
    """True if the receiver is a URL; otherwise it is a command."""
    return len(notify) == 1 and notify[0].startswith(_URL_SCHEMES)


def variable_of(notify: tuple[str, ...]) -> str | None:
    """The name of the environment variable of the URL, for `$NAME`; None for a URL or a command."""
    match = re.fullmatch(_VARIABLE, notify[0]) if len(notify) == 1 else None
    return None if match is None else match[1]


def without_secret(notify: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The receiver as a run stores it: of a URL, whose path may be its only protection, the scheme and the host."""
    if notify is None or not is_url(notify):
        return notify
    scheme, _, rest = notify[0].partition("://")
    userinfo, _, place = rest.rpartition("@") if "@" in rest.partition("/")[0] else ("", "", rest)
    end = min((found for mark in "/?#" if (found := place.find(mark)) >= 0), default=len(place))
    return (f"{scheme}://{place[:end]}/{REDACTED}",) if userinfo or place[end:].strip("/") else notify


def check_url(url: str) -> None:
    """Raises HintError if it is not a URL of http or https, or has no host."""
    if not url.startswith(_URL_SCHEMES):
        raise HintError("a URL begins with http:// or https://")
    host = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
    if not host or not host.strip(":") or any(letter.isspace() or not letter.isprintable() for letter in url):
        raise HintError("it names no host, or holds a space")


def _bounded(above: float | None, minimum: float | None, below: float | None, maximum: float | None) -> str:
    low = f"above {above:g}" if above is not None else f"of at least {minimum:g}" if minimum is not None else ""
    high = f"below {below:g}" if below is not None else f"at most {maximum:g}" if maximum is not None else ""
    return " ".join(("a number", " and ".join(filter(None, (low, high))))).strip()


def _positive(value: float) -> float:
    if not 0 < value <= LARGEST_WHOLE:
        raise ValueError
    return value


def _bounded_text(value: T) -> T:
    """The value, unless it is text such as 1e999999999 whose exact form would take minutes to compute."""
    if isinstance(value, str) and (len(value) > 60 or re.search(r"[eE][+-]?[0-9]{4,}", value)):
        raise ValueError
    return value


def _read_count(value: object) -> int:
    if not isinstance(value, int | float | str):
        raise ValueError
    return parse_count(_bounded_text(value))


def _read_number(value: object) -> float:
    if isinstance(value, str) and re.fullmatch(rf"\s*[+-]?({_NUMBER_PATTERN})\s*", value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    if abs(value) > LARGEST_WHOLE or not math.isfinite(value):
        raise ValueError
    return float(value)


def _write_every(value: Every) -> str:
    if value.steps is not None:
        return "1 step" if value.steps == 1 else f"{value.steps} steps"
    seconds = value.seconds or 0.0
    if seconds % 60 == 0:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds.is_integer() else f"{seconds!r} s"


def _split_command(text: str) -> tuple[str, ...]:
    text = text.strip()
    if text.startswith(_URL_SCHEMES):
        return (text,)
    variable = re.fullmatch(_VARIABLE, text)
    if variable is not None:
        return (f"${variable[1] or variable[2]}",)
    from shlex import split  # where a job has such a command, and only there

    try:
        return tuple(split(text))
    except ValueError as error:
        raise HintError(f"the command cannot be split into arguments: {str(error).lower()}") from None
