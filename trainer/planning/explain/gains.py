"""What other settings of the job, or facts of the machine, would gain: each from a plan with them."""

from collections.abc import Iterator

from msgspec.structs import replace

from shardwise.trainer.planning.candidates import configuration_of, run_hours
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.reasons import WORTH_A_LINE
from shardwise.trainer.planning.search.choice import best_of, seconds_of
from shardwise.trainer.planning.speed.rates import rates_of
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.value import Value


class Gain(Value, frozen=True, kw_only=True):
    """A plan with another setting, for a row of the first screen, and as a sentence."""

    name: str
    effect: str
    setting: str
    candidate: Candidate
    hours: float
    text: str


def gains(context: PlanningContext, plan: Plan) -> Iterator[Gain]:
    """Those that are worth a line."""
    yield from _measured_copies(context, plan.chosen)


def _measured_copies(context: PlanningContext, chosen: Candidate) -> Iterator[Gain]:
    """All activations in host RAM, which is no candidate until copies of this machine were measured."""
    if context.is_cpu or context.knows_host_copies:
        return
    measured = replace(context, corrections=replace(context.corrections, has_moved_activations=True))
    best, _ = best_of(measured, (chosen.strategy,), known_seconds=seconds_of(context, chosen))
    if best is None or best.speed.step_s * WORTH_A_LINE > chosen.speed.step_s:
        return
    pcie = rates_of(configuration_of(context, best), context.device).pcie
    yield Gain(
        name="activations in host RAM",
        effect="faster, if copies are as assumed",
        setting="pin.activation_offload=true",
        candidate=best,
        hours=run_hours(measured, best),
        text=f"all activations in host RAM would be {chosen.speed.step_s / best.speed.step_s:.2f}x as fast, if copies "
        f"reach the assumed {pcie / 1e9:.3g} GB/s: `shardwise probe --measure -o hardware.json` measures them, "
        "and plans with --hardware hardware.json consider it",
    )
