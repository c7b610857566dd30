"""Ranking of all strategies for one method: candidates, best first, and rejections with the number or the rule.

Faster ones come before slower ones, by the upper end of their range (`candidates.upper_seconds`): of two strategies
the one whose prediction is less certain must be predicted faster by the difference of their errors, and one that
changes the update, which only a job that allows it has, by 10 % more. Of those within 1 % of the fastest exact ones
come first, then the simplest (`catalogue.LAYOUTS`, state that is not paged), then the one that needs the least memory.
One that fills a card to more than 97 % must be predicted 5 % faster (`candidates.priced`), one that keeps weights or
state in host RAM by the errors of both, and on several cards any that uses it (`candidates.host_price`).
Trials outrank predictions: strategies that ran in one come first, those that ran out of memory are rejected.

`method_rows` is the table of methods: memory and time of full, galore, lora and qlora, even of those that may not run.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import itemgetter

from msgspec.structs import replace

from shardwise.trainer.planning.candidates import (
    candidate_of,
    compared_seconds,
    configuration_of,
    excess,
    priced,
    run_totals,
    start_up_share,
)
from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.rules.rule import may_run, refuse
from shardwise.trainer.planning.search.configurations import (
    SAME_SPEED,
    best_candidate,
    best_configuration,
    bounded_starts,
    least_need,
    starts_of,
    strategy_need,
    with_larger_buckets,
)
from shardwise.trainer.planning.search.fallbacks import memory_remedy
from shardwise.trainer.planning.tables.catalogue import CATALOGUE, LAYOUTS
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.plan import Candidate, MethodRow, Rejection, TrialResult
from shardwise.trainer.spec.strategy import Method, Strategy
from shardwise.trainer.spec.value import Value


class Ranking(Value, frozen=True, kw_only=True):
    """Every strategy of the catalogue, once: a candidate or a rejection.

    `smallest` has the smallest configuration of each strategy that the rules allow and a budget rejects; after a
    `survey`, which has no rejections, of some.
    """

    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    smallest: dict[str, Candidate]


def rank(context: PlanningContext, trials: Sequence[TrialResult] = (), *, is_whole: bool = True) -> Ranking:
    """All strategies for the context's method; `with_remedies` adds the remedies.

    Unless it `is_whole`, strategies that do not fit the device are left out, but for the nearest if nothing fits.
    """
    candidates: list[Candidate] = []
    rejections: list[Rejection] = []
    smallest: dict[str, Candidate] = {}
    unfit: list[Strategy] = []  # without the smallest configuration
    for row in CATALOGUE:
        refusal = refuse(context, row)
        if refusal is not None:
            rejections.append(
                Rejection(strategy=row.name, reason=refusal.reason, remedy=refusal.instead, rule=refusal.rule)
            )
            continue
        candidate = best_candidate(context, row)
        if candidate is None and not is_whole:
            unfit.append(row)
            continue
        candidate = candidate or least_need(context, row)
        rejection = _rejection(context, candidate, trials)
        if rejection is None:
            candidates.append(candidate)
        else:
            rejections.append(rejection)
            smallest[row.name] = candidate
    if unfit and not candidates:
        smallest |= _least_of_all(context, unfit)
    ordered = in_order(context, candidates, trials)
    return Ranking(candidates=ordered, rejections=tuple(rejections), smallest=smallest)


def survey(context: PlanningContext, *, known_seconds: float = math.inf) -> Ranking:
    """The best strategy for the context's method alone: one strategy of each kind is searched.

    With `known_seconds` it is empty if none takes at most so long.
    """
    rows = one_a_kind(CATALOGUE, lambda row: may_run(context, row))
    best, beyond = best_of(context, rows, known_seconds=known_seconds)
    if best is not None or known_seconds < math.inf:
        return Ranking(candidates=() if best is None else (best,), rejections=(), smallest={})
    nearest = _least_of_all(context, [row for row in rows if row.name not in beyond])
    return Ranking(candidates=(), rejections=(), smallest=beyond | nearest)


def _least_of_all(context: PlanningContext, rows: Iterable[Strategy]) -> dict[str, Candidate]:
    """The `least_need` of all, by the name of its strategy: those whose state alone needs more are not searched."""
    found: Candidate | None = None
    for num_bytes, row in sorted(((strategy_need(context, row), row) for row in rows), key=itemgetter(0)):
        if found is not None and num_bytes >= found.memory.need_bytes:
            break
        candidate = least_need(context, row)
        if found is None or candidate.memory.need_bytes < found.memory.need_bytes:
            found = candidate
    return {} if found is None else {found.strategy.name: found}


def best_of(
    context: PlanningContext,
    rows: Iterable[Strategy],
    likely: tuple[Sharding, Offload] | None = None,
    *,
    known_seconds: float = math.inf,
) -> tuple[Candidate | None, dict[str, Candidate]]:
    """The first candidate by `in_order`, and those found before it that fit the device but not the other budgets.

    By branch and bound: a strategy that cannot come within one per cent of the best so far, or of `known_seconds`,
    is not searched, nor one that is no faster than a simpler one. The sooner a good one is found the less is searched,
    so those of the `likely` layout come first.
    """
    bounded = []
    for row in rows:
        starts = bounded_starts(context, row)
        if (fastest := next(starts, None)) is not None:
            factor, once = _correction(context, row)
            bounded.append((fastest.seconds * factor - once, row, chain((fastest,), starts), factor, once))
    found: dict[str, tuple[Configuration, Candidate]] = {}
    beyond: dict[str, Candidate] = {}
    simpler: list[tuple[float, tuple[bool, int, bool]]] = []
    best = known_seconds
    for bound, row, starts, factor, once in sorted(bounded, key=lambda entry: (entry[1].layout != likely, entry[0])):
        longest, machinery = (1 + SAME_SPEED) * best, _machinery(row, is_exact=row.is_exact)
        if bound > longest or any(seconds <= bound and its < machinery for seconds, its in simpler):
            continue
        configuration = best_configuration(context, starts, (longest + once) / factor)
        if configuration is None:
            continue
        candidate = candidate_of(context, configuration)  # larger buffers change neither its time nor its host RAM
        if excess(context, candidate) is not None:
            beyond[row.name] = candidate
            continue
        found[row.name] = configuration, candidate
        seconds = seconds_of(context, candidate)
        simpler.append((seconds, _machinery(row, is_exact=candidate.is_exact)))
        best = min(best, seconds)
    if not found:
        return None, beyond
    first = in_order(context, [candidate for _, candidate in found.values()])[0]
    configuration, _ = found[first.strategy.name]
    larger = with_larger_buckets(context, configuration)
    return first if larger is configuration else candidate_of(context, larger), beyond


def _correction(context: PlanningContext, row: Strategy) -> tuple[float, float]:
    """(factor, seconds): no time of a strategy is below the predicted one times the factor, less these seconds.

    Runs correct the step, not the start-up.
    """
    factor = context.corrections.of(row, context.method).step.value
    if factor <= 1:
        return factor, 0.0
    return factor, (factor - 1) * max(compared_seconds(context, start, 0) for start in starts_of(context, row))


def with_remedies(context: PlanningContext, ranking: Ranking) -> tuple[Rejection, ...]:
    """The rejections; those for memory with the smallest change that would make the strategy fit."""
    return tuple(
        rejection
        if (smallest := ranking.smallest.get(rejection.strategy)) is None or smallest.memory.fits
        else replace(rejection, remedy=memory_remedy(context, smallest))
        for rejection in ranking.rejections
    )


def in_order(
    context: PlanningContext, candidates: Iterable[Candidate], trials: Sequence[TrialResult] = ()
) -> tuple[Candidate, ...]:
    """Best first: by the time that a trial measured and its share of the start-up, then by prediction."""

    def rank_of(candidate: Candidate) -> tuple[bool, float]:
        measured = [trial.step_s for trial in _trials_of(candidate, trials) if trial.step_s is not None]
        if not measured:
            return True, seconds_of(context, candidate)
        return False, min(measured) + start_up_share(context, configuration_of(context, candidate))

    left = sorted(((rank_of(candidate), candidate) for candidate in candidates), key=lambda ranked: ranked[0])
    ordered: list[Candidate] = []
    while left:
        (is_predicted, seconds), _ = left[0]
        longest = (1 + SAME_SPEED) * seconds if is_predicted else seconds
        peers = [
            candidate
            for (its_kind, its_seconds), candidate in left
            if its_kind is is_predicted and its_seconds <= longest
        ]
        ordered += sorted(peers, key=_simplicity)
        left = left[len(peers) :]
    return tuple(ordered)


def seconds_of(context: PlanningContext, candidate: Candidate) -> float:
    """The `compared_seconds` by which candidates are ordered, with the price of a full card."""
    configuration = configuration_of(context, candidate)
    seconds = compared_seconds(context, configuration, candidate.speed.step_s)
    return priced(context, configuration, seconds, candidate.memory.need_bytes)


_POSITIONS = {row.name: position for position, row in enumerate(CATALOGUE)}


def _simplicity(candidate: Candidate) -> tuple[tuple[bool, int, bool], int, int]:
    row = candidate.strategy
    return _machinery(row, is_exact=candidate.is_exact), candidate.memory.need_bytes, _POSITIONS[row.name]


def _machinery(row: Strategy, *, is_exact: bool) -> tuple[bool, int, bool]:
    """The simpler, the smaller."""
    return not is_exact, LAYOUTS.index(row.layout), row.optimizer.facts.is_paged


def one_a_kind(rows: Sequence[Strategy], is_taken: Callable[[Strategy], bool] = lambda _: True) -> tuple[Strategy, ...]:
    """The first strategy of each kind that `is_taken`, in the catalogue's order.

    Strategies of a kind have one layout, precision and update, with state in the same place and of the same width.
    """
    first: dict[tuple[object, ...], Strategy] = {}
    for row in rows:
        if (kind := _kind_of(row)) not in first and is_taken(row):
            first[kind] = row
    return tuple(first.values())


@cache
def _kind_of(row: Strategy) -> tuple[object, ...]:
    facts = row.optimizer.facts
    return (
        row.sharding,
        row.offload,
        row.precision,
        facts.is_paged,
        facts.state,
        facts.num_moments,
        facts.changes_update,
    )


def _rejection(context: PlanningContext, candidate: Candidate, trials: Sequence[TrialResult]) -> Rejection | None:
    name = candidate.strategy.name
    over = excess(context, candidate)
    if over is not None:
        return Rejection(strategy=name, reason=over.reason, remedy=over.remedy)
    if any(trial.ran_out_of_memory for trial in _trials_of(candidate, trials)):
        return Rejection(
            strategy=name,
            reason=f"ran out of memory in a trial at micro batch {candidate.micro_batch}",
            remedy=f"pin.micro_batch: {max(1, candidate.micro_batch // 2)}",
        )
    return None


def _trials_of(candidate: Candidate, trials: Sequence[TrialResult]) -> list[TrialResult]:
    return [
        trial
        for trial in trials
        if trial.strategy == candidate.strategy.name and trial.micro_batch == candidate.micro_batch
    ]


def method_rows(
    contexts: Mapping[Method, PlanningContext], rankings: Mapping[Method, Ranking], taken: Method | None
) -> tuple[MethodRow, ...]:
    """One line for each method, from the most to the least faithful."""
    return tuple(_method_row(contexts[method], rankings[method], is_taken=method is taken) for method in Method)


def _method_row(context: PlanningContext, ranking: Ranking, *, is_taken: bool) -> MethodRow:
    best = ranking.candidates[0] if ranking.candidates else _nearest(ranking)
    if best is None:
        return MethodRow(
            method=context.method,
            memory_bytes=None,
            hours=None,
            gpu_hours=None,
            cost=None,
            verdict="no strategy on this machine supports it",
        )
    over = excess(context, best)
    obstacle = "fits" if over is None else over.reason if best.memory.fits else "does not fit"
    totals = run_totals(context, best) if best.memory.fits else None
    return MethodRow(
        method=context.method,
        memory_bytes=best.memory.need_bytes,
        occupied_bytes=best.memory.occupied_bytes,
        is_within_limits=over is None,
        hours=None if totals is None else totals.hours,
        gpu_hours=None if totals is None else totals.gpu_hours,
        kwh=None if totals is None else totals.kwh,
        cost=None if totals is None else totals.cost,
        verdict="taken" if is_taken else obstacle,
    )


def _nearest(ranking: Ranking) -> Candidate | None:
    return min(ranking.smallest.values(), key=lambda candidate: candidate.memory.need_bytes, default=None)
