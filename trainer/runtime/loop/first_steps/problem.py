"""A difference between a run and its plan that its first steps show."""

from typing import NamedTuple


class Problem(NamedTuple):
    """One line for the user, and whether the run is to end with it.

    A problem is certain where the compared values are equal in every run in order: rows, counts, a number that was
    computed twice. It is named, and the run goes on, where a rare model or very few tokens could explain it as well.
    """

    text: str
    is_certain: bool
