"""Sizes, counts, shares and times, read as people write them and written as people read them.

GiB = 2**30 bytes and GB = 10**9; the tool prints GiB and means it. `8G` alone is refused for bytes, because
half of its readers mean the other one. Counts (tokens, steps) are decimal: 2G tokens are 2 * 10**9.
Every `parse_` raises ValueError with what was expected; the caller adds where the value stood.
"""

import re
from collections.abc import Mapping
from decimal import ROUND_DOWN, Context, Decimal

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_BYTE_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
}  # fmt: skip
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_SECOND_UNITS = {
    "": 1, "s": 1, "sec": 1, "second": 1, "seconds": 1, "min": 60, "minute": 60, "minutes": 60,
    "h": 3600, "hour": 3600, "hours": 3600, "d": 86400, "day": 86400, "days": 86400,
}  # fmt: skip
_NUMBER = r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)"

_EXACT = Context(prec=200, rounding=ROUND_DOWN, Emax=300)  # more is an error; a float has 308


def _scaled(text: str, units: Mapping[str, int]) -> Decimal:
    """The number times its unit; ValueError if it is none, KeyError if there is no such unit."""
    match = re.fullmatch(rf"\s*{_NUMBER}\s*([A-Za-z]*)\s*", text)
    if match is None:
        raise ValueError("a number with a unit")
    return _EXACT.multiply(Decimal(match[1].replace("_", "")), units[match[2].lower()])


def parse_bytes(value: str | int) -> int:
    """Bytes of `8GiB`, `80 GB`, `512MiB` or a plain number of bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    expected = 'a size such as "8GiB" or "80GB"'
    try:
        return int(_scaled(str(value), _BYTE_UNITS))
    except (ArithmeticError, ValueError, KeyError):
        raise ValueError(expected) from None


def parse_count(value: str | int | float) -> int:
    """A whole count from `65536`, `64k`, `2G` or `1e6`; units are decimal."""
    expected = 'a count such as 65536, "64k" or "2G"'
    if isinstance(value, bool):
        raise ValueError(expected)
    try:
        scaled = _scaled(str(value), _COUNT_UNITS)
    except (ArithmeticError, ValueError, KeyError):
        raise ValueError(expected) from None
    if scaled != scaled.to_integral_value():
        raise ValueError(expected)
    return int(scaled)


def parse_share(value: str) -> float:
    """A share between 0 and 1 from `3%`."""
    match = re.fullmatch(rf"\s*{_NUMBER}\s*%\s*", value)
    if match is None or not 0 <= float(match[1]) <= 100:
        raise ValueError('a share such as "3%"')
    return float(match[1]) / 100


def parse_seconds(value: str | int | float) -> float:
    """Seconds from `20 min`, `24h` or a plain number of seconds."""
    expected = 'a time such as "20 min" or "24h"'
    if isinstance(value, bool):
        raise ValueError(expected)
    try:
        return float(_scaled(str(value), _SECOND_UNITS))
    except (ArithmeticError, ValueError, KeyError):
        raise ValueError(expected) from None


def format_bytes(num_bytes: int) -> str:
    """`23.5 GiB`, in the unit that keeps one to four digits before the point."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            scaled = num_bytes / unit
            return f"{scaled:.0f} {name}" if abs(scaled) >= 1000 else f"{scaled:.3g} {name}"
    return f"{num_bytes} B"


def format_count(count: float) -> str:
    """`8.03B`, `65.5k` or `512`: three significant digits, decimal."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(count) >= 0.9995 * unit:  # what rounds to 1000 of the smaller unit is 1 of this one
            scaled = count / unit
            return f"{scaled:.0f}{name}" if abs(scaled) >= 999.5 else f"{scaled:.3g}{name}"
    return f"{count:.3g}"


def format_seconds(seconds: float) -> str:
    """`1 h 12 min`, `2 min 05 s`, `3.2 s` or `45 ms`; days from two days on."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 2 * 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole / 86400:.1f} days"
