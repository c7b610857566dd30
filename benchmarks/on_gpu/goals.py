"""Goals: what each piece holds itself to, and the table of docs/benchmarks.md that says which are met.

A piece says its goals from its rows (`Piece.goals`). One that its rows cannot judge yet is not measured, and a
rehearsal judges none: what a CPU came to is no answer for a card.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from written_page import markdown_table

REHEARSED, REHEARSED_NEXT = "only rehearsed: no GPU was at hand", "`make bench-gpu` on a machine with a GPU"
HEAD = ("goal", "wanted", "came to", "", "reason", "next step")


class Standing(StrEnum):
    """Whether a goal is met."""

    MET = "met"
    NOT_MET = "**not met**"
    NOT_MEASURED = "not measured"


class Goal(NamedTuple):
    """One thing that was promised, and what it came to. All of it is said in words, as a table shows it."""

    name: str  # "peak allocated, median absolute error"
    wanted: str  # "at most 3 %"
    figure: str | None = None  # "2.1 % of 58 cases"
    is_met: bool | None = None  # None: not measured
    reason: str = ""  # why it is not met, or not measured
    next_step: str = ""

    @property
    def standing(self) -> Standing:
        if self.is_met is None:
            return Standing.NOT_MEASURED
        return Standing.MET if self.is_met else Standing.NOT_MET


def goals_table(goals: Mapping[str, Sequence[Goal]], *, is_rehearsal: bool) -> str:
    """Markdown for the place `goals`, from the goals by the name of their piece."""
    judged = [_of_rehearsal(goal) if is_rehearsal else goal for each in goals.values() for goal in each]
    if not judged:
        return "Nothing was run yet.\n"
    counts = [f"{sum(goal.standing is each for goal in judged)} {each.strip('*')}" for each in Standing]
    heading = f"Of {len(judged)} goals: {', '.join(counts)}."
    if is_rehearsal:
        heading += " This was a rehearsal on a CPU, which judges none: its figures are of tiny models."
    return f"{heading}\n\n{markdown_table(HEAD, [_cells(goal) for goal in judged])}"


def at_most(value: float | None, limit: float) -> bool | None:
    """Whether a figure keeps to its limit; None where there is no figure."""
    return None if value is None else value <= limit


def at_least(value: float | None, limit: float) -> bool | None:
    """Whether a figure reaches its limit; None where there is no figure."""
    return None if value is None else value >= limit


def _of_rehearsal(goal: Goal) -> Goal:
    figure = None if goal.figure is None else f"{goal.figure} (rehearsal)"
    return goal._replace(is_met=None, figure=figure, reason=REHEARSED, next_step=REHEARSED_NEXT)


def _cells(goal: Goal) -> tuple[str, ...]:
    is_met = goal.standing is Standing.MET
    return (
        goal.name,
        goal.wanted,
        goal.figure or "-",
        goal.standing,
        "" if is_met else goal.reason,
        "" if is_met else goal.next_step,
    )
