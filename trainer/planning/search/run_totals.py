"""Totals of a run: hours, GPU hours, energy and money.

Energy is that of the boards at their power limit for the whole run: board watts x GPUs x hours, at a PUE of 1 (no
cooling, no losses), the host not counted. A run that waits for memory or a network draws less.
"""

from trainer.planning.candidates import run_cost, run_hours
from trainer.planning.context import PlanningContext
from trainer.spec.plan import Candidate
from trainer.spec.value import Value

ENERGY_RULE = "board watts x GPUs x hours, PUE 1, host not counted"


class RunTotals(Value, frozen=True, kw_only=True):
    """Of one run; None where a factor is unknown, or there is no GPU."""

    hours: float
    gpu_hours: float | None
    kwh: float | None
    cost: float | None
    tokens_per_s: float  # of the data, by all devices together


def run_totals(context: PlanningContext, candidate: Candidate) -> RunTotals:
    """Totals of the run of `candidate`."""
    hours = run_hours(context, candidate)
    gpu_hours = None if context.is_cpu else hours * context.num_ranks
    watts = context.device.board_watts
    return RunTotals(
        hours=hours,
        gpu_hours=gpu_hours,
        kwh=None if gpu_hours is None or watts is None else gpu_hours * watts / 1000,
        cost=run_cost(context, hours),
        tokens_per_s=candidate.speed.tokens_per_s_per_gpu * context.num_ranks * _filled_share(context, candidate),
    )


def _filled_share(context: PlanningContext, candidate: Candidate) -> float:
    """Rows of a step that hold data: where the global batch does not divide evenly the others are empty."""
    num_rows = candidate.num_ranks * candidate.micro_batch * candidate.accumulation
    return min(1.0, context.schedule.sequences_per_step / num_rows)
