"""The table of methods: what full, galore, lora and qlora would each need and take, whether they may run or not.

A method that this version does not train yet is predicted all the same, so that a person sees what waiting buys.
"""

from collections.abc import Mapping

from trainer.planning.budget import excess
from trainer.planning.candidates import run_cost, run_hours
from trainer.planning.choice import Ranking
from trainer.planning.not_yet import version_that_trains
from trainer.planning.situation import Situation
from trainer.spec.plan import Candidate, MethodRow
from trainer.spec.strategy import Method
from trainer.spec.units import format_bytes


def method_rows(
    situations: Mapping[Method, Situation], rankings: Mapping[Method, Ranking], taken: Method | None
) -> tuple[MethodRow, ...]:
    """One line for each method, from the most to the least faithful."""
    return tuple(_method_row(situations[method], rankings[method], is_taken=method is taken) for method in Method)


def _method_row(situation: Situation, ranking: Ranking, *, is_taken: bool) -> MethodRow:
    version = version_that_trains("method", situation.method)
    later = "" if version is None else f"; trains from shardwise {version} on"
    best = ranking.candidates[0] if ranking.candidates else _nearest(ranking)
    if best is None:
        return MethodRow(
            method=situation.method,
            memory_bytes=None,
            hours=None,
            gpu_hours=None,
            cost=None,
            verdict=f"no strategy of this machine can take it{later}",
        )
    over = excess(situation, best)
    granted = format_bytes(best.memory.usable_bytes)
    obstacle = "fits" if over is None else over.reason if best.memory.fits else f"does not fit {granted}"
    hours = run_hours(situation, best)
    return MethodRow(
        method=situation.method,
        memory_bytes=best.memory.need_bytes,
        hours=hours if best.memory.fits else None,
        gpu_hours=None if situation.is_cpu or not best.memory.fits else hours * situation.num_ranks,
        cost=run_cost(situation, hours) if best.memory.fits else None,
        verdict="taken" if is_taken else obstacle + later,
    )


def _nearest(ranking: Ranking) -> Candidate | None:
    return min(ranking.smallest, key=lambda candidate: candidate.memory.need_bytes, default=None)
