"""The one decision: from job, machine, model and data to a plan. Pure: the same values give the same plan.

1. Clashes that no machine could train are refused with both numbers (`input_checks`).
2. Every row of the catalogue is refused by a rule or searched for its best setting, and what stays within every
   budget is ranked (`choice`); the rest is rejected with the number or the rule.
3. The method is the job's, or under `auto` the first of full, galore, lora, qlora that runs within the limits.
4. The first candidate is taken; fallbacks and the table of methods are worked out around it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from shardwise.trainer.planning.calibrate import Corrections, after_trials, corrections_of
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.device import device_of
from shardwise.trainer.planning.reasons import notes, reasons
from shardwise.trainer.planning.run import make_schedule
from shardwise.trainer.planning.search.choice import Ranking, method_rows, rank, survey, with_remedies
from shardwise.trainer.planning.search.fallbacks import fallbacks, nothing_fits
from shardwise.trainer.planning.search.input_checks import check_job, check_objective, check_pins, needs_every_row_first
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.messages.extension import Extension, Hook
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import Calibration, Candidate, Fp8Gain, Plan, Schedule, TrialResult
from shardwise.trainer.spec.strategy import Method


def make_plan(
    job: Job,
    *,
    name: str,
    hardware: Hardware,
    shape: ModelShape,
    model_config: dict[str, Any],
    model_path: str | None,
    tokenizer_path: str | None,
    data: DataProfile,
    calibration: Calibration,
    versions: dict[str, str],
    trials: tuple[TrialResult, ...] = (),
    fp8_gain: Fp8Gain | None = None,
    extension: Extension | None = None,
) -> Plan:
    """The plan of `job` on `hardware`.

    InputError where job, model, data and pins cannot go together; NothingFitsError where no row stays within the
    machine and the limits.
    """
    hooks = () if extension is None else extension.hooks
    check_job(job, shape, data)
    check_objective(job, data, hooks)
    wanted = _methods(job, data)
    learned = corrections_of(calibration, shape=shape, hardware=hardware, version=versions.get("shardwise"))
    corrections = after_trials(learned, trials)
    contexts = {
        method: with_fp8_gain(_context(job, hardware, shape, data, method, corrections, hooks), fp8_gain)
        for method in Method
    }
    check_pins(contexts[wanted[0]])
    taken, rankings = _rank_methods(contexts, wanted, trials)
    methods = method_rows(contexts, rankings, taken)
    context, ranking = contexts[taken or wanted[0]], rankings[taken or wanted[0]]
    if taken is None:
        raise nothing_fits(context, tuple(ranking.smallest.values()), methods)
    return Plan(
        name=name,
        job=job,
        hardware=hardware,
        model_shape=shape,
        model_config=model_config,
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        data=data,
        device_kind=hardware.device_kind,
        schedule=schedule_with(ranking.candidates[0], job, data, shape),
        candidates=_explained(context, ranking.candidates),
        rejections=with_remedies(context, ranking),
        methods=methods,
        fallbacks=fallbacks(context, ranking.candidates),
        calibration=calibration,
        versions=versions,
        trials=trials,
        fp8_gain=fp8_gain,
        extension=extension,
        notes=notes(context, data, trials, ranking.candidates),
    )


def take_candidate(plan: Plan, number: int) -> Plan:
    """The plan with its `number`-th candidate (from 1) first, and the fallbacks that follow from it."""
    if not 1 <= number <= len(plan.candidates):
        raise InputError(f"--take {number}: the plan has {len(plan.candidates)} candidates, counted from 1")
    if number == 1:
        return plan  # its fallbacks may be a trial's, or an earlier run's
    taken = plan.candidates[number - 1]
    others = (candidate for candidate in plan.candidates if candidate is not taken)
    context = context_of(plan)
    candidates = _explained(context, (taken, *others))
    return replace(
        plan,
        schedule=schedule_with(taken, plan.job, plan.data, plan.model_shape),
        candidates=candidates,
        fallbacks=fallbacks(context, candidates),
        notes=notes(context, plan.data, plan.trials, candidates),
    )


def schedule_with(chosen: Candidate, job: Job, data: DataProfile, shape: ModelShape) -> Schedule:
    """The steps of the run at the learning rate of what was chosen."""
    return make_schedule(job, data, shape, method=chosen.method, optimizer=chosen.strategy.optimizer)


def open_contexts(
    job: Job,
    *,
    hardware: Hardware,
    shape: ModelShape,
    data: DataProfile,
    calibration: Calibration,
    versions: dict[str, str],
) -> dict[Method, PlanningContext]:
    """Each method that the job leaves open, for questions on what a machine can hold."""
    check_job(job, shape, data)
    corrections = corrections_of(calibration, shape=shape, hardware=hardware, version=versions.get("shardwise"))
    return {method: _context(job, hardware, shape, data, method, corrections) for method in _methods(job, data)}


def context_of(plan: Plan) -> PlanningContext:
    """The context a plan was made in."""
    learned = corrections_of(
        plan.calibration, shape=plan.model_shape, hardware=plan.hardware, version=plan.versions.get("shardwise")
    )
    corrections = after_trials(learned, plan.trials)
    hooks = () if plan.extension is None else plan.extension.hooks
    context = _context(plan.job, plan.hardware, plan.model_shape, plan.data, plan.chosen.method, corrections, hooks)
    return with_fp8_gain(context, plan.fp8_gain)


def with_fp8_gain(context: PlanningContext, gain: Fp8Gain | None) -> PlanningContext:
    """The context once FP8 was timed: its speed is what was measured."""
    if gain is None:
        return context
    return replace(context, fp8_gain=gain, device=replace(context.device, measured_fp8_speedup=gain.speedup))


def _rank_methods(
    contexts: Mapping[Method, PlanningContext], wanted: Sequence[Method], trials: Sequence[TrialResult]
) -> tuple[Method | None, dict[Method, Ranking]]:
    """The first wanted method that has a candidate, and a ranking of each: of those not taken only what is needed."""
    taken: Method | None = None
    rankings: dict[Method, Ranking] = {}
    for method, context in contexts.items():
        is_requested = taken is None and method in wanted
        rankings[method] = rank(context, trials) if is_requested else survey(context)
        if is_requested and rankings[method].candidates:
            taken = method
    return taken, rankings


def _methods(job: Job, data: DataProfile) -> tuple[Method, ...]:
    """The methods that may be taken, the most faithful first."""
    if job.train.method is not None:
        return (job.train.method,)
    needs_frozen = needs_every_row_first(job, data)
    return tuple(method for method in Method if method.freezes_base or not needs_frozen)


def _context(
    job: Job,
    hardware: Hardware,
    shape: ModelShape,
    data: DataProfile,
    method: Method,
    corrections: Corrections,
    hooks: tuple[Hook, ...] = (),
) -> PlanningContext:
    return PlanningContext(
        job=job,
        hardware=hardware,
        device=device_of(hardware),
        shape=shape,
        schedule=make_schedule(job, data, shape, method=method),
        method=method,
        num_eval_tokens=data.num_eval_tokens,
        data=data,
        corrections=corrections,
        hooks=hooks,
    )


def _explained(context: PlanningContext, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates, the first with the reasons for its settings."""
    first, *others = (replace(candidate, reasons=()) if candidate.reasons else candidate for candidate in candidates)
    return (replace(first, reasons=reasons(context, first)), *others)
