"""The best row by branch and bound is the one that trying every row finds."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import context_for, job_of, trial_of

from shardwise.trainer.planning import candidates
from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.rules.rule import may_run
from shardwise.trainer.planning.search import choice, configurations
from shardwise.trainer.planning.search.choice import best_of, in_order, one_a_kind, seconds_of, survey
from shardwise.trainer.planning.search.configurations import SAME_SPEED, Bounded, best_candidate, best_configuration
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.strategy import Method, Strategy
from shardwise.trainer.spec.units import GIB

MACHINES = [
    ("tiny", "2xCPU"), ("1b", "1xRTX-4090"), ("8b", "2xRTX-3090"), ("8b", "4xA100-SXM4-80GB"),
    ("8b", "8xH100-SXM5-80GB"), ("70b", "8xH100-SXM5-80GB"),
]  # fmt: skip
EVERYTHING = tuple(Allowance)


def rows_of(context: PlanningContext) -> tuple[Strategy, ...]:
    runnable = [row for row in CATALOGUE if may_run(context, row)]
    return one_a_kind(runnable)


def best_of_all(context: PlanningContext, rows: tuple[Strategy, ...]) -> Candidate | None:
    found = [candidate for row in rows if (candidate := best_candidate(context, row)) is not None]
    return next(iter(in_order(context, [each for each in found if candidates.excess(context, each) is None])), None)


@pytest.mark.parametrize("usable", [1.0, 0.4])
@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize(("model", "spec"), MACHINES)
def test_no_row_that_is_passed_over_would_have_been_taken(model: str, spec: str, method: Method, usable: float) -> None:
    allowed = () if model == "tiny" else EVERYTHING  # a job of which all is asked, or nothing
    facts: dict[str, Any] = {"seq_len": 512, "tokens_per_step": 8192} if model == "tiny" else {}
    context = context_for(model, spec, method=method, job=job_of(allow=allowed, **facts))
    device = replace(context.device, usable_bytes=int(usable * context.device.usable_bytes))
    context = replace(context, device=device)
    rows = rows_of(context)
    assert best_of(context, rows)[0] == best_of_all(context, rows)


def test_rows_are_passed_over_and_one_that_is_slower_than_what_is_known_is_not_taken(monkeypatch):
    """Otherwise the test above would compare a thing with itself."""
    context = context_for("8b", "8xH100-SXM5-80GB", method=Method.LORA)
    rows, searched, limits = rows_of(context), [], []

    def counted(context: PlanningContext, starts: Iterable[Bounded], longest: float) -> Configuration | None:
        first, *_ = starts = list(starts)
        searched.append(first.start.strategy)
        limits.append(longest)
        return best_configuration(context, starts, longest)

    monkeypatch.setattr(choice, "best_configuration", counted)
    best, _ = best_of(context, rows)
    assert 0 < len(searched) < len(rows)
    assert limits[0] == math.inf and all(math.isfinite(limit) for limit in limits[1:])
    seconds = seconds_of(context, best)
    assert best_of(context, rows, known_seconds=seconds)[0] == best
    assert best_of(context, rows, known_seconds=seconds / (1 + 3 * SAME_SPEED))[0] is None


def test_a_row_that_takes_too_long_is_not_searched_to_its_end() -> None:
    context = context_for("8b", "8xH100-SXM5-80GB")
    found = {
        row: best
        for row in rows_of(context)
        if (best := best_configuration(context, configurations.bounded_starts(context, row)))
    }
    assert found
    for row, best in found.items():
        seconds = candidates.compared_seconds(context, best, candidates.relative_seconds(context, best))
        seconds = candidates.priced(context, best, seconds, candidates.predicted_need(context, best))
        assert best_configuration(context, configurations.bounded_starts(context, row), seconds) == best
        assert (
            best_configuration(context, configurations.bounded_starts(context, row), seconds / (1 + 3 * SAME_SPEED))
            is None
        )


@pytest.mark.parametrize(("model", "spec"), [("70b", "1xRTX-4090"), ("8b", "8xH100-SXM5-80GB")])
def test_where_nothing_fits_the_row_with_the_least_need_is_there(model: str, spec: str) -> None:
    context = context_for(model, spec)
    context = replace(context, device=replace(context.device, usable_bytes=4 * GIB))
    ranking = survey(context)
    assert not ranking.candidates
    least = min(configurations.least_need(context, row).memory.need_bytes for row in rows_of(context))
    assert min(candidate.memory.need_bytes for candidate in ranking.smallest.values()) == least > 4 * GIB


def test_a_strategy_that_a_trial_measured_is_charged_its_start_up() -> None:
    """The steps of a trial are timed after torch.compile has compiled them."""
    context = context_for("1b", "2xRTX-4090")
    either = [each for row in rows_of(context) if (each := best_candidate(context, row)) is not None][:2]
    eager, compiled = (
        candidates.candidate_of(context, replace(candidates.configuration_of(context, candidate), compile=is_compiled))
        for candidate, is_compiled in zip(either, (False, True), strict=True)
    )
    share = candidates.start_up_share(context, candidates.configuration_of(context, compiled))

    def first(gain_s: float) -> Candidate:
        return in_order(context, [compiled, eager], [trial_of(eager, 10.0), trial_of(compiled, 10.0 - gain_s)])[0]

    assert share > 0
    assert first(0.9 * share) == eager
    assert first(1.1 * share) == compiled


@pytest.mark.parametrize("sharding", [Sharding.ZERO1, Sharding.ZERO2])
def test_the_update_alone_tells_what_a_strategy_needs_at_least(sharding: Sharding) -> None:
    """DeepSpeed copies the gradients of a rank's partition to fp32 for it."""
    context = context_for("8b", "2xRTX-3090", method=Method.FULL)
    row = next(row for row in rows_of(context) if row.sharding is sharding and row.offload is Offload.NONE)
    least = configurations.least_need(context, row)
    assert least.memory.peak_event == "optimizer_step"
    assert 0 <= least.memory.need_bytes - configurations.strategy_need(context, row) <= 1, "rounded"
