"""Values as JSON with a text planted wherever their type lets it be anything."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec


def leaves(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(content, dict | list):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from leaves(value, (*at, key))
    else:
        yield at, content


def planted(value: Any, plant: Callable[[str | None], str | None]) -> Any:
    """`value` as JSON, with what `plant` makes of each text that the type lets be anything."""
    content = msgspec.json.decode(msgspec.json.encode(value))
    for place, old in list(leaves(content)):
        if not isinstance(old, str | None):
            continue
        *path, last = place
        inside = content
        for key in path:
            inside = inside[key]
        inside[last] = plant(old)
        try:
            msgspec.convert(content, type(value))
        except (msgspec.ValidationError, ValueError):
            inside[last] = old
    return content
