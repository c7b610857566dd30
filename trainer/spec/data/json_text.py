"""Decodes the JSON of a row, or gives the reason why it is none."""

import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Collection
from typing import Any

import msgspec


def decode_json(content: bytes | str) -> Any:  # noqa: ANN401 - any JSON
    """The value in `content`; ValueError, whose text completes "the row ...", where it is not JSON."""
    try:
        return msgspec.json.decode(content)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 ({error.reason})") from None
    except RecursionError:
        raise ValueError("is not a row of data: nested too deep") from None
    except msgspec.DecodeError as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise ValueError(f"is not valid JSON: {reason}{_remedy(content, reason)}") from None


def without_nulls(value: Any, but: Collection[str] = ()) -> Any:  # noqa: ANN401 - any JSON
    """A copy in which no object has a key of null, except the keys of `but`."""
    if isinstance(value, dict):
        return {key: without_nulls(each, but) for key, each in value.items() if each is not None or key in but}
    if isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        return [without_nulls(each, but) for each in value]
    return value


def kind_of(value: object) -> str:
    """Name of the kind of a value, for messages."""
    names = {str: "text", bytes: "bytes", list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


def _remedy(content: bytes | str, reason: str) -> str:
    """What to do about usual causes."""
    text = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")
    if text.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or b"\0" in text[:4]:
        return "; the file is UTF-16, save it as UTF-8"
    if text.strip() in (b"{", b"["):
        return "; a row is one line: jq -c . FILE > rows.jsonl"
    if half := re.search(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])", text):
        return f"; {half[0].decode()} is half a character of two, and stands alone"
    place = re.search(r"\(byte (\d+)\)", reason)
    if place and text[int(place[1]) :].startswith((b"NaN", b"Infinity")):
        return "; JSON has no NaN and no infinity, write null"
    return ""
