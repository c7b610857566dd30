"""The table of methods: what full, galore, lora and qlora would each need and take, whether they may run or not."""

from collections.abc import Mapping

from trainer.planning.context import PlanningContext
from trainer.planning.search.budget import excess
from trainer.planning.search.choice import Ranking
from trainer.planning.search.run_totals import run_totals
from trainer.spec.plan import Candidate, MethodRow
from trainer.spec.strategy import Method


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
            verdict="no strategy of this machine can take it",
        )
    over = excess(context, best)
    obstacle = "fits" if over is None else over.reason if best.memory.fits else "does not fit"
    totals = run_totals(context, best) if best.memory.fits else None
    return MethodRow(
        method=context.method,
        memory_bytes=best.memory.need_bytes,
        hours=None if totals is None else totals.hours,
        gpu_hours=None if totals is None else totals.gpu_hours,
        kwh=None if totals is None else totals.kwh,
        cost=None if totals is None else totals.cost,
        verdict="taken" if is_taken else obstacle,
    )


def _nearest(ranking: Ranking) -> Candidate | None:
    return min(ranking.smallest.values(), key=lambda candidate: candidate.memory.need_bytes, default=None)
