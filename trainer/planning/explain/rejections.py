"""Every row that was not taken, with the number or the rule that decided, and the smallest change where there is one.

Rejections that share a rule stand in one line with the members it ruled out, since one rule takes many rows; rows
that a number ruled out stand together only where their numbers and remedies are the same.
"""

from collections.abc import Iterable, Iterator, Sequence

from trainer.planning.page.content import Section, Sentence
from trainer.planning.tables.catalogue import CATALOGUE
from trainer.spec.plan import Rejection

_MEMBERS = frozenset(
    str(member) for row in CATALOGUE for member in (row.sharding, row.offload, row.optimizer, row.precision)
)


def rejections_section(rejections: Sequence[Rejection]) -> Section | None:
    """Rejected strategies with their reasons."""
    if not rejections:
        return None
    lines = (*_by_number(rejections), *_by_rule(rejections))
    return Section(
        title=f"rejected ({len(rejections)} rows of the catalogue)",
        blocks=tuple(Sentence(text=text) for text in lines),
    )


def nearest_rejections(rejections: Sequence[Rejection], most: int) -> tuple[str, ...]:
    """At most so many lines, rows that a number ruled out before the rules, and how many lines are left out."""
    lines = (*_by_number(rejections), *_by_rule(rejections))
    more = len(lines) - most
    return (*lines[:most], *([f"and {more} more reasons: shardwise plan names them all"] if more > 0 else []))


def _by_number(rejections: Iterable[Rejection]) -> Iterator[str]:
    groups: dict[tuple[str, str | None], list[str]] = {}
    for rejection in rejections:
        if rejection.rule is None:
            groups.setdefault((rejection.reason, rejection.remedy), []).append(rejection.strategy)
    for (reason, remedy), names in groups.items():
        yield f"{', '.join(names)}: {reason}" + (f"; would fit with {remedy}" if remedy else "")


def _by_rule(rejections: Iterable[Rejection]) -> Iterator[str]:
    for (_, tail, instead), (heads, num_rows) in _rule_groups(rejections).items():
        rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
        what = f"{', '.join(heads)} ({rows})" if heads else rows
        yield f"{what}: {tail}" + (f"; instead: {instead}" if instead else "")


def _rule_groups(
    rejections: Iterable[Rejection],
) -> dict[tuple[str, str, str | None], tuple[list[str], int]]:
    """Rejections of one rule with one wording; what opens the sentence (`adamw_8bit`) is collected."""
    groups: dict[tuple[str, str, str | None], tuple[list[str], int]] = {}
    for rejection in rejections:
        if rejection.rule is None:
            continue
        head, _, tail = rejection.reason.partition(" ")
        if head not in _MEMBERS:
            head, tail = "", rejection.reason
        key = (rejection.rule, tail, _shared_remedy(rejection, head))
        heads, num_rows = groups.setdefault(key, ([], 0))
        if head and head not in heads:
            heads.append(head)
        groups[key] = (heads, num_rows + 1)
    return groups


def _shared_remedy(rejection: Rejection, head: str) -> str | None:
    """A remedy that names the row's own member would split the group."""
    return None if head and rejection.remedy and head in rejection.remedy.split() else rejection.remedy
