"""The goals of piece `caps`, each from the jobs as they were measured, with what speaks against it. Pure."""

from collections.abc import Mapping, Sequence

from on_gpu.caps_rows import LEAST_SHARE, MOST_REGRET, Job, jobs_of
from on_gpu.case import Outcome
from on_gpu.goals import Goal, at_most
from on_gpu.pieces import Row

MOST_HOST_BYTES = 10  # a parameter, of seven billion within 8 GiB
_SMALLEST_GIB, _SEVEN_BILLION = 8, "7B, all parameters"


def goals(rows: Mapping[str, Row]) -> tuple[Goal, ...]:
    """What the piece promises, and what that came to."""
    jobs = jobs_of(rows)
    return (_runs(jobs), _fits(jobs), _uses_memory(jobs), _regret(jobs), _within_eight(jobs))


def _runs(jobs: Sequence[Job]) -> Goal:
    goal = Goal(name="the choice under a cap", wanted="runs, for every job")
    tried = [job for job in jobs if job.plan.reason is not None or job.chosen_run is not None]
    failed = [f"{job.plan.name}: {_failure(job)}" for job in tried if _failure(job) is not None]
    if not tried:
        return goal
    return goal._replace(
        figure=f"{len(tried) - len(failed)} of {len(tried)} jobs",
        is_met=not failed,
        reason="; ".join(failed),
        next_step="what the reason names; then the step again",
    )


def _failure(job: Job) -> str | None:
    """Why a job has no choice that ran; None where it has."""
    run = job.chosen_run
    if run is None:
        return job.plan.reason
    if run.outcome is Outcome.RAN:
        return None
    return f"{run.outcome}" + (f", {run.reason}" if run.reason else "")


def _fits(jobs: Sequence[Job]) -> Goal:
    goal = Goal(name="plans under a cap that are said to fit", wanted="none runs out of memory or takes more")
    num_runs = sum(
        1
        for job in jobs
        for entry in job.plan.entries
        if entry.beyond is None
        and (run := job.runs.get(entry.key)) is not None
        and run.outcome in (Outcome.RAN, Outcome.OUT_OF_MEMORY)
    )
    if not num_runs:
        return goal
    broken = [f"{job.plan.name}: {entry.key}" for job in jobs for entry in job.broken]
    return goal._replace(
        figure=f"{len(broken)} of {num_runs} did",
        is_met=not broken,
        reason="; ".join(broken),
        next_step="correct the part of the memory model that its measured parts contradict",
    )


def _uses_memory(jobs: Sequence[Job]) -> Goal:
    goal = Goal(
        name="device bytes of the choice, of the cap", wanted=f"at least {LEAST_SHARE:.0%} where more memory would help"
    )
    known = [job for job in jobs if job.wastes_memory is not None]
    helped = [job for job in known if job.plan.more_memory is not None and job.plan.more_memory.is_better]
    if not known:
        return goal
    wasting = [f"{job.plan.name}: {job.used_share or 0:.0%}" for job in helped if job.wastes_memory]
    least = min((job.used_share or 0 for job in helped), default=None)
    return goal._replace(
        figure="more would help none"
        if least is None
        else f"at least {least:.0%}, of {len(helped)} jobs it would help",
        is_met=not wasting,
        reason="; ".join(wasting),
        next_step="micro batches between the divisors and powers of two of a step's rows, or checkpointing some blocks",
    )


def _regret(jobs: Sequence[Job]) -> Goal:
    goal = Goal(name="regret of the choice, tokens/s", wanted=f"at most {MOST_REGRET:.0%} on every cap")
    known = [(job.regret, job) for job in jobs if job.regret is not None]
    if not known:
        return goal
    largest, worst = max(known, key=lambda pair: pair[0])
    reasons = [
        f"{job.plan.name}: {job.best_other.key} is {regret:.1%} ahead"
        for regret, job in known
        if regret > MOST_REGRET and job.best_other is not None
    ]
    return goal._replace(
        figure=f"at most {largest:.1%} ({worst.plan.name}), of {len(known)} jobs",
        is_met=at_most(largest, MOST_REGRET),
        reason="; ".join(reasons),
        next_step="hold the predictions of both against what they took, and correct the speed model or its handicaps",
    )


def _within_eight(jobs: Sequence[Job]) -> Goal:
    goal = Goal(
        name=f"{_SEVEN_BILLION}, in {_SMALLEST_GIB} GiB",
        wanted=f"runs with at most {MOST_HOST_BYTES} bytes a parameter in host RAM",
    )
    job = next(
        (job for job in jobs if job.plan.cap_gib == _SMALLEST_GIB and job.plan.job.startswith(_SEVEN_BILLION)), None
    )
    if job is None or (job.chosen_run is None and job.plan.reason is None):
        return goal
    failure = _failure(job)
    if failure is not None:
        return goal._replace(is_met=False, figure="did not run", reason=failure, next_step="what the reason names")
    per_parameter = job.plan.choice.host_bytes / job.plan.num_parameters
    tokens_per_s = job.tokens_per_s(job.plan.choice) or 0.0
    return goal._replace(
        figure=f"{tokens_per_s:,.0f} tokens/s, {per_parameter:.1f} bytes a parameter",
        is_met=per_parameter <= MOST_HOST_BYTES and not job.broken,
        reason="it takes more than the card" if job.broken else "it takes more of the host",
        next_step="a recipe that keeps less in host RAM: 8-bit state, or updates inside the backward pass",
    )
