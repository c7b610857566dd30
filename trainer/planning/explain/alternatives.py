"""Other ways to run a job: other settings of it, other facts of the machine, and opt-ins, each as a plan with them.

Each is given with its time and its memory, and only if it is worth a line. Runners-up and other methods, which a plan
has already, are in `first_screen`; changes with which a job fits that does not, in `launch.commands.ways_out`.
"""

import math
import shlex
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from shardwise.trainer.planning.candidates import configuration_of, run_hours
from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.reasons import WORTH_A_LINE
from shardwise.trainer.planning.rules.rule import Rule, broken_by_job, rule_named
from shardwise.trainer.planning.search.choice import best_of, one_a_kind, seconds_of, survey
from shardwise.trainer.planning.search.configurations import starts_of
from shardwise.trainer.planning.speed.rates import rates_of
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.plan import Candidate, Plan, Rejection
from shardwise.trainer.spec.strategy import Strategy
from shardwise.trainer.spec.value import Value, complete

WORTH_OPTING_IN = 1.25  # times the memory


class Alternative(Value, frozen=True, kw_only=True):
    """Another way to run the job."""

    name: str
    effect: str  # what it gains, or changes in the mathematics
    setting: str  # what selects it on the command line, or the whole command; empty: nothing
    seconds: float | None = None  # of the run; None: not known
    need_bytes: int | None = None  # of a card, or of a rank's RAM
    candidate: Candidate | None = None  # that would run
    allowance: Allowance | None = None  # that it needs besides those of the job
    text: str = ""  # the same as a sentence


def _planned(context: PlanningContext, candidate: Candidate, found: Alternative) -> Alternative:
    """The alternative with the time and memory of its candidate."""
    seconds, need = run_hours(context, candidate) * 3600, candidate.memory.need_bytes
    return replace(found, seconds=seconds, need_bytes=need, candidate=candidate)


def gains(context: PlanningContext, plan: Plan) -> Iterator[Alternative]:
    """Other settings, and facts of the machine, with which the plan is worth a line."""
    yield from _measured_copies(context, plan.chosen)
    yield from _larger_batch(context, plan.chosen)


LARGER_BATCH = 8  # times the rows of a step
WORTH_A_BATCH = 1.5  # times as fast; less is not worth fewer updates
LEAST_STEPS = 30  # of a run with the larger batch
_PER_STEP = ("communication_s", "offload_s", "optimizer_s")
_LEAST_PER_STEP = 1 / 3  # share of a step's time in these parts; below it no larger batch is searched


def _larger_batch(context: PlanningContext, chosen: Candidate) -> Iterator[Alternative]:
    """More rows a step, where most of a step is not computing."""
    per_step = sum(chosen.speed.parts[name] for name in _PER_STEP)
    has_steps = context.schedule.num_steps >= LARGER_BATCH * LEAST_STEPS
    if context.is_cpu or not has_steps or per_step < _LEAST_PER_STEP * chosen.speed.step_s:
        return
    larger = _with_larger_batch(context)
    best = next(iter(survey(larger).candidates), None)
    if best is not None and (gain := _rate(best) / _rate(chosen)) >= WORTH_A_BATCH:
        setting = f"train.tokens_per_step={larger.schedule.tokens_per_step}"
        text = (
            f"a larger global batch would be {gain:.1f} times as fast: {setting}, {_rate(best):,.0f} tokens/s by "
            f"{best.strategy.name}; it makes fewer updates, which may need a higher learning rate"
        )
        found = Alternative(name="larger global batch", effect="fewer updates", setting=setting, text=text)
        yield _planned(larger, best, found)


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


def _measured_copies(context: PlanningContext, chosen: Candidate) -> Iterator[Alternative]:
    """All activations in host RAM, which is no candidate until copies of this machine were measured."""
    if context.is_cpu or context.knows_host_copies:
        return
    measured = replace(context, corrections=replace(context.corrections, has_moved_activations=True))
    best, _ = best_of(measured, (chosen.strategy,), known_seconds=seconds_of(context, chosen))
    if best is None or best.speed.step_s * WORTH_A_LINE > chosen.speed.step_s:
        return
    pcie = rates_of(configuration_of(context, best), context.device).pcie
    text = (
        f"all activations in host RAM would be {chosen.speed.step_s / best.speed.step_s:.2f}x as fast, if copies "
        f"reach the assumed {pcie / 1e9:.3g} GB/s: `shardwise probe --measure -o hardware.json` measures them, "
        "and plans with --hardware hardware.json consider it"
    )
    name, effect = "activations in host RAM", "faster, if copies are as assumed"
    found = Alternative(name=name, effect=effect, setting="pin.activation_offload=true", text=text)
    yield _planned(measured, best, found)


_OPT_INS = complete(
    Allowance,
    {
        Allowance.OFFLOAD_CPU: "state in host RAM",
        Allowance.OFFLOAD_NVME: "state on NVMe",
        Allowance.OPTIMIZER_8BIT: "optimizer state in 8 bit",
        Allowance.OPTIMIZER_APPROX: "another optimizer",
        Allowance.BF16_WEIGHTS: "weights in bf16",
        Allowance.BF16_REDUCTION: "gradients summed over ranks in bf16",
        Allowance.FP8: "matrix products in fp8",
        Allowance.TF32: "matrix products in tf32",
        Allowance.UNCLIPPED: "updates in the backward",
        Allowance.COMPILE: "torch.compile",
    },
    "the names of opt-ins",
)


def opt_ins(context: PlanningContext, plan: Plan) -> Iterator[Alternative]:
    """Opt-ins that are missing from `allow` and would lead to a faster plan, or one as fast in less memory."""
    waiting = list(_waiting(plan.rejections))
    starts = list(starts_of(context, plan.chosen.strategy))
    for allowance in Allowance:
        if allowance not in context.job.allow:
            candidate = _opened_by(context, allowance, waiting, plan.chosen, starts)
            if candidate is not None and _is_worth_opting_in(candidate, plan.chosen):
                allowed = ",".join((*plan.job.allow, allowance))
                setting, effect = shlex.quote(f"allow=[{allowed}]"), _effect(allowance, candidate)
                found = Alternative(name=_OPT_INS[allowance], effect=effect, setting=setting, allowance=allowance)
                yield _planned(context, candidate, found)


def _effect(allowance: Allowance, candidate: Candidate) -> str:
    """Effect of an opt-in on the mathematics."""
    if allowance is Allowance.BF16_REDUCTION:
        return "rounds sums over ranks"
    if candidate.is_exact:
        return "exact"
    if candidate.tf32 or allowance is Allowance.FP8:
        return "rounds products"
    return "does not clip" if candidate.strategy.is_exact else "changes the update"


def _waiting(rejections: Sequence[Rejection]) -> Iterator[tuple[Strategy, Rule]]:
    """Strategies that a missing opt-in refuses, each with its rule; they break none but rules of the job."""
    rows = {row.name: row for row in CATALOGUE}
    for rejection in rejections:
        rule = None if rejection.rule is None else rule_named(rejection.rule)
        if rule is not None and rule.needs_opt_in:
            yield rows[rejection.strategy], rule


def _opened_by(
    context: PlanningContext,
    allowance: Allowance,
    waiting: Sequence[tuple[Strategy, Rule]],
    chosen: Candidate,
    starts: Sequence[Configuration],
) -> Candidate | None:
    """The best that this opt-in adds: one of the `waiting` strategies, or the chosen one with a setting of it.

    `starts` are those of the chosen one without it. None if a plan with the opt-in would not prefer what it adds.
    """
    allowed = replace(context, job=replace(context.job, allow=(*context.job.allow, allowance)))
    opened = [
        row
        for row, rule in waiting
        if not rule.is_broken(allowed, row)
        and broken_by_job(allowed, row) is None
        and _may_be_faster(row, chosen.strategy)
    ]
    changed = (chosen.strategy,) if list(starts_of(allowed, chosen.strategy)) != starts else ()
    rows = (*one_a_kind(opened), *changed)
    return best_of(allowed, rows, chosen.strategy.layout, known_seconds=seconds_of(context, chosen))[0]


def _may_be_faster(row: Strategy, chosen: Strategy) -> bool:
    """False if `row` shards more than a strategy with all state on the devices, which was faster without an opt-in.

    Opt-ins save memory, for which more sharding is the dearer way, unless the state moves to the host.
    """
    is_more = row.sharding.facts.zero_stage > chosen.sharding.facts.zero_stage
    moves = row.optimizer.facts.is_paged or row.offload is not Offload.NONE or chosen.offload is not Offload.NONE
    return not is_more or moves


def _is_worth_opting_in(candidate: Candidate, chosen: Candidate) -> bool:
    gains_time = chosen.speed.step_s > WORTH_A_LINE * candidate.speed.step_s
    return gains_time or candidate.memory.need_bytes < chosen.memory.need_bytes / WORTH_OPTING_IN
