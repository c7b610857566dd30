"""Gains of other settings of the job, or of other facts of the machine: each is that of a plan with them."""

import math
from collections.abc import Iterator

from msgspec.structs import replace

from shardwise.trainer.planning.candidates import configuration_of, run_hours
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.reasons import WORTH_A_LINE
from shardwise.trainer.planning.search.choice import best_of, seconds_of, survey
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
    yield from _larger_batch(context, plan.chosen)


LARGER_BATCH = 8  # times the rows of a step
WORTH_A_BATCH = 1.5  # times as fast; less is not worth fewer updates
LEAST_STEPS = 30  # of a run with the larger batch
_PER_STEP = ("communication_s", "offload_s", "optimizer_s")
_LEAST_PER_STEP = 1 / 3  # share of a step's time in these parts; below it no larger batch is searched


def _larger_batch(context: PlanningContext, chosen: Candidate) -> Iterator[Gain]:
    """More rows a step, where most of a step is not computing."""
    per_step = sum(chosen.speed.parts[name] for name in _PER_STEP)
    has_steps = context.schedule.num_steps >= LARGER_BATCH * LEAST_STEPS
    if context.is_cpu or not has_steps or per_step < _LEAST_PER_STEP * chosen.speed.step_s:
        return
    larger = _with_larger_batch(context)
    best = next(iter(survey(larger).candidates), None)
    if best is not None and (gain := _rate(best) / _rate(chosen)) >= WORTH_A_BATCH:
        setting = f"train.tokens_per_step={larger.schedule.tokens_per_step}"
        yield Gain(
            name="larger global batch",
            effect="fewer updates",
            setting=setting,
            candidate=best,
            hours=run_hours(larger, best),
            text=f"a larger global batch would be {gain:.1f} times as fast: {setting}, {_rate(best):,.0f} tokens/s by "
            f"{best.strategy.name}; it makes fewer updates, which may need a higher learning rate",
        )


def _rate(candidate: Candidate) -> float:
    return candidate.speed.tokens_per_s_per_gpu * candidate.num_ranks


def _with_larger_batch(context: PlanningContext) -> PlanningContext:
    """The same job with LARGER_BATCH times the rows a step, on as many tokens in all."""
    schedule, train = context.schedule, context.job.train
    tokens = LARGER_BATCH * schedule.tokens_per_step
    return replace(
        context,
        job=replace(context.job, train=replace(train, tokens_per_step=tokens)),
        schedule=replace(
            schedule,
            sequences_per_step=LARGER_BATCH * schedule.sequences_per_step,
            tokens_per_step=tokens,
            num_steps=math.ceil(schedule.num_steps / LARGER_BATCH),
        ),
    )


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
