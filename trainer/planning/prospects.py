"""What a later version of shardwise would take in place of this one's choice, where it gains enough to be worth a line.

The choice of this version stands: a person who starts today gets the fastest that runs today. But a person who may
wait, or who compares machines, should know that the figures will change.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from trainer.planning.candidates import run_hours
from trainer.planning.catalogue import CATALOGUE
from trainer.planning.choice import best_of, one_a_layout
from trainer.planning.not_yet import late_members, version_needed
from trainer.planning.rules import Rule, broken_rule, may_run, rule_named
from trainer.planning.situation import Situation
from trainer.spec.job import Allowance
from trainer.spec.plan import Candidate, Plan, Rejection
from trainer.spec.strategy import Strategy
from trainer.spec.units import format_bytes, format_seconds
from trainer.spec.value import Value

WORTH_A_LINE = 1.10  # times as fast
WORTH_LEAVE = 1.25  # times the memory


def prospect_notes(situation: Situation, chosen: Candidate, late: Sequence[Strategy]) -> Iterator[str]:
    """At most one sentence: what a later version would take, and what it gains."""
    if situation.ignores_version:
        return
    ahead = replace(situation, ignores_version=True)
    best, _ = best_of(ahead, (chosen.strategy, *one_a_layout(late)))
    version = version_needed(best) if best is not None else None
    if best is None or version is None or chosen.strategy.is_exact > best.strategy.is_exact:
        return
    gain = chosen.speed.step_s / best.speed.step_s
    if gain >= WORTH_A_LINE or best.strategy.is_exact > chosen.strategy.is_exact:
        need, hours = format_bytes(best.memory.need_bytes), format_seconds(run_hours(ahead, best) * 3600)
        what = f"{best.strategy.name} with {', '.join(late_members(best))}"
        yield f"from shardwise {version} on it would take {what}: {gain:.2f}x as fast, {need}, {hours} in all"


class Leave(Value, frozen=True, kw_only=True):
    """The best candidate that an entry of `allow` would open."""

    allowance: Allowance
    candidate: Candidate


def leaves(situation: Situation, plan: Plan) -> tuple[Leave, ...]:
    """What each entry that `allow` leaves out would open, where it is faster or needs less than what was chosen."""
    ahead = replace(situation, ignores_version=True)
    waiting = list(_waiting(ahead, plan.rejections))
    found = (
        (allowance, _opened_by(ahead, allowance, waiting))
        for allowance in Allowance
        if allowance not in situation.job.allow
    )
    return tuple(
        Leave(allowance=allowance, candidate=candidate)
        for allowance, candidate in found
        if candidate is not None and _is_worth_leave(candidate, plan.chosen)
    )


def _waiting(ahead: Situation, rejections: Sequence[Rejection]) -> Iterator[tuple[Strategy, Rule]]:
    """The rows that a rule on leave refuses, or would were every later version here."""
    rows = {row.name: row for row in CATALOGUE}
    for rejection in rejections:
        row, rule = rows[rejection.strategy], None if rejection.rule is None else rule_named(rejection.rule)
        if rule is not None and rule.is_version:  # stands before the rules on leave
            rule = broken_rule(ahead, row, ignoring_version=True)
        if rule is not None and rule.asks_leave:
            yield row, rule


def _opened_by(ahead: Situation, allowance: Allowance, waiting: Sequence[tuple[Strategy, Rule]]) -> Candidate | None:
    """The best of the rows, each with the rule it breaks first, which this leave would open, whatever the version."""
    allowed = replace(ahead, job=replace(ahead.job, allow=(*ahead.job.allow, allowance)))
    opened = [
        row
        for row, rule in waiting
        if not rule.is_broken(allowed, row) and may_run(allowed, row, ignoring_version=True)
    ]
    best, _ = best_of(allowed, one_a_layout(opened))
    return best


def _is_worth_leave(candidate: Candidate, chosen: Candidate) -> bool:
    gains_time = chosen.speed.step_s > WORTH_A_LINE * candidate.speed.step_s
    return gains_time or candidate.memory.need_bytes < chosen.memory.need_bytes / WORTH_LEAVE
