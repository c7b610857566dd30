"""The one decision: from job, machine, model and data to a plan. Pure: the same values give the same plan.

1. Clashes that no machine could train are refused with both numbers (`input_checks`).
2. Every row of the catalogue is refused by a rule or searched for its best setting, and what stays within every
   budget is ranked (`choice`); the rest is rejected with the number or the rule.
3. The method is the job's, or under `auto` the first of full, galore, lora, qlora that runs within the limits.
4. The first candidate is taken; fallbacks and the table of methods are worked out around it.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from trainer.planning.choice import rank
from trainer.planning.device import device_of
from trainer.planning.fallbacks import fallbacks
from trainer.planning.input_checks import check_job, check_pins
from trainer.planning.methods import method_rows
from trainer.planning.not_yet import version_that_trains
from trainer.planning.reasons import notes, reasons
from trainer.planning.remedies import nothing_fits
from trainer.planning.schedule import make_schedule
from trainer.planning.situation import Situation
from trainer.spec.calibration import Calibration
from trainer.spec.data_profile import DataProfile
from trainer.spec.errors import InputError
from trainer.spec.hardware import Hardware
from trainer.spec.job import Job
from trainer.spec.model_shape import ModelShape
from trainer.spec.plan import Candidate, Plan, TrialResult
from trainer.spec.strategy import Method


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
) -> Plan:
    """The plan of `job` on `hardware`.

    InputError where job, model, data and pins cannot go together; NothingFitsError where no row stays within the
    machine and the limits.
    """
    check_job(job, shape, data)
    situations = {method: _situation(job, hardware, shape, data, method) for method in Method}
    wanted = [job.train.method] if job.train.method else [m for m in Method if not version_that_trains("method", m)]
    check_pins(situations[wanted[0]])
    rankings = {
        method: rank(situations[method], trials)
        if method in wanted
        else rank(situations[method], ignoring_version=True, remedies=False)
        for method in Method
    }
    taken = next((method for method in wanted if rankings[method].candidates), None)
    methods = method_rows(situations, rankings, taken)
    if taken is None:
        raise nothing_fits(situations[wanted[0]], rankings[wanted[0]].smallest, methods)
    situation, ranking = situations[taken], rankings[taken]
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
        schedule=situation.schedule,
        candidates=_explained(situation, ranking.candidates),
        rejections=ranking.rejections,
        methods=methods,
        fallbacks=fallbacks(situation, ranking.candidates),
        calibration=calibration,
        versions=versions,
        notes=notes(situation, data, calibration, ranking.candidates),
    )


def take_candidate(plan: Plan, number: int) -> Plan:
    """The plan with its `number`-th candidate (from 1) first, and the fallbacks that follow from it."""
    if not 1 <= number <= len(plan.candidates):
        raise InputError(f"--take {number}: the plan has {len(plan.candidates)} candidates, counted from 1")
    taken = plan.candidates[number - 1]
    others = (candidate for candidate in plan.candidates if candidate is not taken)
    situation = situation_of(plan)
    candidates = _explained(situation, (taken, *others))
    return replace(
        plan,
        candidates=candidates,
        fallbacks=fallbacks(situation, candidates),
        notes=notes(situation, plan.data, plan.calibration, candidates),
    )


def situation_of(plan: Plan) -> Situation:
    """The situation a plan was made in."""
    return _situation(plan.job, plan.hardware, plan.model_shape, plan.data, plan.chosen.method)


def _situation(job: Job, hardware: Hardware, shape: ModelShape, data: DataProfile, method: Method) -> Situation:
    return Situation(
        job=job,
        hardware=hardware,
        device=device_of(hardware),
        shape=shape,
        schedule=make_schedule(job, data, shape, method=method),
        method=method,
        num_eval_tokens=data.num_eval_tokens,
    )


def _explained(situation: Situation, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The candidates, the first with the reasons for its settings."""
    first, *others = candidates
    return (replace(first, reasons=reasons(situation, first)), *others)
