"""Opt-ins: what each entry missing from `allow` would gain, if it is worth a line."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.rules.rule import Rule, may_run, rule_named
from shardwise.trainer.planning.search.choice import best_of, one_a_layout
from shardwise.trainer.planning.search.settings import takes_tf32
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.plan import Candidate, Plan, Rejection
from shardwise.trainer.spec.strategy import Strategy
from shardwise.trainer.spec.value import Value

WORTH_A_LINE = 1.10  # times as fast
WORTH_LEAVE = 1.25  # times the memory


class Leave(Value, frozen=True, kw_only=True):
    """The best candidate that an entry of `allow` would open."""

    allowance: Allowance
    candidate: Candidate


def leaves(context: PlanningContext, plan: Plan) -> tuple[Leave, ...]:
    """Opt-ins that are missing from `allow` and would be faster or need less memory than the chosen candidate."""
    waiting = list(_waiting(plan.rejections))
    found = (
        (allowance, _opened_by(context, allowance, waiting, plan.chosen.strategy))
        for allowance in Allowance
        if allowance not in context.job.allow
    )
    return tuple(
        Leave(allowance=allowance, candidate=candidate)
        for allowance, candidate in found
        if candidate is not None and _is_worth_leave(candidate, plan.chosen)
    )


def _waiting(rejections: Sequence[Rejection]) -> Iterator[tuple[Strategy, Rule]]:
    """The rows that a rule on leave refuses."""
    rows = {row.name: row for row in CATALOGUE}
    for rejection in rejections:
        rule = None if rejection.rule is None else rule_named(rejection.rule)
        if rule is not None and rule.asks_leave:
            yield rows[rejection.strategy], rule


def _opened_by(
    context: PlanningContext, allowance: Allowance, waiting: Sequence[tuple[Strategy, Rule]], chosen: Strategy
) -> Candidate | None:
    """The best of the rows, each with the rule it breaks first, which this leave would open; TF32 speeds up any row."""
    allowed = replace(context, job=replace(context.job, allow=(*context.job.allow, allowance)))
    opened = [row for row, rule in waiting if not rule.is_broken(allowed, row) and may_run(allowed, row)]
    if allowance is Allowance.TF32 and takes_tf32(allowed, chosen.precision):
        opened = [chosen]
    best, _ = best_of(allowed, one_a_layout(opened))
    return best


def _is_worth_leave(candidate: Candidate, chosen: Candidate) -> bool:
    gains_time = chosen.speed.step_s > WORTH_A_LINE * candidate.speed.step_s
    return gains_time or candidate.memory.need_bytes < chosen.memory.need_bytes / WORTH_LEAVE
