"""Which known names a person may have meant."""

from collections.abc import Iterable


def close_matches(name: str, known: Iterable[str], *, count: int = 1) -> list[str]:
    """Up to `count` of the known names that look like `name`, the most alike first."""
    from difflib import get_close_matches  # a millisecond of every start, for a slip of the pen

    return get_close_matches(name, list(known), n=count)
