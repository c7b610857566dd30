"""Settings that are quantities: counts, numbers, shares, sizes, times and intervals, as people write them.

Each function makes the `Kind` that reads one of them; bounds belong to the kind, so its sentence can name them.
A bare number where a unit decides the meaning (`warmup: 0.03`, `every: 500`) is refused with the likely spelling.
"""

import math
import re
from typing import TypeVar

from trainer.spec.job.kinds import HintError, Kind
from trainer.spec.job.sections import Every, Warmup
from trainer.spec.units import GIB, MIB, parse_bytes, parse_count, parse_seconds, parse_share

LARGEST_WHOLE = 2**53  # the largest that JSON readers agree on
_NUMBER_PATTERN = r"[0-9][0-9_]*(\.[0-9]+)?([eE][+-]?[0-9]+)?|\.[0-9]+"
_TIME_PATTERN = r"(s|sec|seconds?|min|minutes?|h|hours?|d|days?)"

T = TypeVar("T")


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
    """A number within bounds; `1e-4` is one however the YAML reader took it."""
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


def size() -> Kind:
    """Bytes as `8GiB` or `80GB`; a plain number is bytes, and one below a MiB was surely meant otherwise."""

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


def hours() -> Kind:
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


def every(*, allows_time: bool) -> Kind:
    """An interval as `500 steps` or, where wall-clock time makes sense, `20 min`; a bare number says neither."""

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


def warmup() -> Kind:
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
