"""The ranking of every row for one method: what can run, best first, and what cannot, with the number or the rule.

Exact rows come before those that change the update, the faster before the slower, and of two that are as fast the
one with less machinery (`catalogue.LAYOUTS`), then the one that needs less. A row whose runs this version cannot
resume must be faster by `UNSAVED_HANDICAP` to be taken before one that it can: a killed run costs more than that. A
trial that was run counts more than a prediction: what it measured ranks first, what ran out of memory in it is out.
"""

from collections.abc import Sequence

from trainer.planning.budget import excess
from trainer.planning.catalogue import CATALOGUE, LAYOUTS
from trainer.planning.not_yet import version_that_trains
from trainer.planning.remedies import memory_remedy
from trainer.planning.rules import refuse
from trainer.planning.settings_search import best_candidate, least_need, time_class
from trainer.planning.situation import Situation
from trainer.spec.plan import Candidate, Rejection, TrialResult
from trainer.spec.strategy import Strategy
from trainer.spec.value import Value

UNSAVED_HANDICAP = 1.25


class Ranking(Value, frozen=True, kw_only=True):
    """Every row of the catalogue, once: a candidate or a rejection.

    `smallest` holds the least setting of each row that the rules allow and a budget forbids.
    """

    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    smallest: tuple[Candidate, ...]


def rank(
    situation: Situation, trials: Sequence[TrialResult] = (), *, ignoring_version: bool = False, remedies: bool = True
) -> Ranking:
    """All rows for the situation's method."""
    candidates: list[Candidate] = []
    rejections: list[Rejection] = []
    smallest: list[Candidate] = []
    for row in CATALOGUE:
        refusal = refuse(situation, row, ignoring_version=ignoring_version)
        if refusal is not None:
            rejections.append(
                Rejection(strategy=row.name, reason=refusal.reason, remedy=refusal.instead, rule=refusal.rule)
            )
            continue
        candidate = best_candidate(situation, row)
        rejection = _rejection(situation, row, candidate, trials, remedies=remedies)
        if rejection is None and candidate is not None:
            candidates.append(candidate)
        elif rejection is not None:
            rejections.append(rejection)
            smallest.append(candidate or least_need(situation, row))
    candidates.sort(key=lambda candidate: _order(candidate, trials))
    return Ranking(candidates=tuple(candidates), rejections=tuple(rejections), smallest=tuple(smallest))


def handicap(candidate: Candidate) -> float:
    """What a candidate's time is multiplied by when it is ranked."""
    return UNSAVED_HANDICAP if version_that_trains("saved_sharding", candidate.strategy.sharding) else 1.0


def _rejection(
    situation: Situation,
    row: Strategy,
    candidate: Candidate | None,
    trials: Sequence[TrialResult],
    *,
    remedies: bool,
) -> Rejection | None:
    tried = candidate or least_need(situation, row)
    over = excess(situation, tried)
    if over is not None:
        does_not_fit = not tried.memory.fits and remedies
        remedy = memory_remedy(situation, tried) if does_not_fit else over.remedy
        return Rejection(strategy=row.name, reason=over.reason, remedy=remedy)
    if any(trial.ran_out_of_memory for trial in _trials_of(tried, trials)):
        return Rejection(
            strategy=row.name,
            reason=f"ran out of memory in a trial at micro batch {tried.micro_batch}",
            remedy=f"pin.micro_batch: {max(1, tried.micro_batch // 2)}",
        )
    return None


def _trials_of(candidate: Candidate, trials: Sequence[TrialResult]) -> list[TrialResult]:
    return [
        trial
        for trial in trials
        if trial.strategy == candidate.strategy.name and trial.micro_batch == candidate.micro_batch
    ]


def _order(candidate: Candidate, trials: Sequence[TrialResult]) -> tuple[int, ...]:
    row = candidate.strategy
    measured = [trial.step_s for trial in _trials_of(candidate, trials) if trial.step_s is not None]
    return (
        not row.is_exact,
        not measured,
        time_class(min(measured, default=candidate.speed.step_s) * handicap(candidate)),
        LAYOUTS.index((row.sharding, row.offload)),
        candidate.memory.need_bytes,
        CATALOGUE.index(row),
    )
