"""YAML 1.2, as people mean it: `off` is a word, `1e-4` a number, `24:00:00` and `2024-01-01` text.

PyYAML reads version 1.1, in which those are False, text, 86400 and a date, and `010` is eight. A duplicate key is
refused. Every error is one line with the line and column in the file.
"""

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.expressions import compiled_when_used
from shardwise.trainer.spec.units import MIB

with compiled_when_used():
    import yaml

LARGEST_FILE_BYTES = MIB


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with other scalars."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def check_printable(self, data: str) -> None:
        """Raises ReaderError for a character that is not text; all that Python can print is."""
        if not data.translate(_BLANKS).isprintable():
            super().check_printable(data)


_BLANKS = str.maketrans("\t\n\r", "   ")


def read_yaml_file(path: Path) -> object:
    """Content of the file, None if it is empty; raises InputError with the file and the line."""
    origin = name_of_file(path)
    try:
        with path.open("rb") as stream:
            content = stream.read(LARGEST_FILE_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{origin}: there is no such file") from None
    except IsADirectoryError:
        raise InputError(f"{origin}: is a folder, not a file") from None
    except (OSError, ValueError) as error:  # ValueError: the name holds a null byte
        raise InputError(f"{origin}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > LARGEST_FILE_BYTES:
        raise InputError(f"{origin}: is larger than 1 MiB; this is no settings file")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{origin}: line {line}: is not UTF-8 text") from None
    return read_yaml(text, origin=origin)


def read_yaml(text: str, *, origin: str) -> object:
    """The one document in `text`."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of SafeLoader
    except yaml.MarkedYAMLError as error:
        raise InputError(f"{origin}: {_place(error)}{_sentence(error)}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InputError(f"{origin}: line {line}: contains a character that is not text") from None
    except RecursionError:
        raise InputError(f"{origin}: is nested too deeply") from None


def write_scalar(value: object) -> str:
    """A value on one line, which `read_yaml` and any YAML 1.1 reader read as the same value."""
    if isinstance(value, list):
        return f"[{', '.join(write_scalar(entry) for entry in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{write_scalar(key)}: {write_scalar(entry)}' for key, entry in value.items())}}}"
    if not isinstance(value, str):
        return json.dumps(value)
    is_plain = re.fullmatch(r"[A-Za-z0-9_./][A-Za-z0-9_./+%@ -]*(?<! )", value) is not None
    if is_plain and read_yaml(value, origin="") == value == yaml.safe_load(value):
        return value
    return yaml.safe_dump(value, default_style='"', width=math.inf, allow_unicode=True).strip()


def name_of_file(path: Path) -> str:
    """The path as typed, on one line."""
    return str(path) if str(path).isprintable() else repr(str(path))


def _place(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "


def _sentence(error: yaml.MarkedYAMLError) -> str:
    parts = [part for part in (error.problem, error.context) if part]
    return " ".join(" ".join(parts).split()) or "is not YAML"


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value!r} appears twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


def _number(loader: _Loader, node: yaml.ScalarNode, kind: type[int] | type[float]) -> float:
    text = loader.construct_scalar(node)
    try:
        return kind(re.sub(r"\.(inf|nan)$", r"\1", text, flags=re.IGNORECASE))
    except ValueError:
        raise yaml.constructor.ConstructorError(
            problem=f"{text!r} is not a number", problem_mark=node.start_mark
        ) from None


_SCALARS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("merge", r"<<", ["<"]),
    ("int", r"[-+]?[0-9][0-9_]{0,30}", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9][0-9_]*\.[0-9]*)([eE][-+]?[0-9]{1,4})?", list("-+.0123456789")),
    ("float", r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]{1,4}|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.0123456789")),
)
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
for _tag, _kind in (("int", int), ("float", float)):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", partial(_number, kind=_kind))
