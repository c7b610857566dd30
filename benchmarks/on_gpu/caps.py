"""Piece `caps`: small cards on a big one. What the planner takes under a cap, beside everything else that runs there.

For each job the first step plans it, with nothing pinned, and lists what it is held against (`caps_contenders`); the
others run one contender each, the choice first. Memory is taken away for real: from the allocator of the GPU, for
paged state from the card itself (`caps_ballast`), on a CPU by a data limit. Host RAM is looked at before anything is
started, as the kernel ends what takes too much of it.
"""

import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from launch.plan_job import plan_inputs
from launch.probe_host import read_host
from on_gpu.bench import Bench
from on_gpu.caps_ballast import held_to
from on_gpu.caps_contenders import (
    MOST,
    MOST_TINY,
    Contender,
    contenders_of,
    context_bytes,
    counts_beside,
    host_bytes,
    words_of,
)
from on_gpu.caps_goals import goals
from on_gpu.caps_jobs import JOBS, CapJob, case_of, longest_rows, shape_of, tiny_cap_bytes, with_rows, without_paths
from on_gpu.caps_rows import CapPlan, CapRun, Entry, MoreMemory, jobs_of, row_of
from on_gpu.caps_tables import tables
from on_gpu.case import Case, CaseResult, Outcome
from on_gpu.pieces import Piece, Row, Step
from trainer.planning.planner import situation_of
from trainer.planning.rules import PAGED
from trainer.planning.settings_search import SAME_SPEED
from trainer.spec.errors import EnvironmentFaultError, ShardwiseError
from trainer.spec.hardware import DeviceKind
from trainer.spec.plan import Candidate, Plan
from trainer.spec.units import GIB, format_bytes

MORE = 1.25  # times the cap, to see whether memory would help
START_S, LOAD_BYTES_PER_S = 30.0, 1e9  # of a run: processes and libraries; weights from disk or its cache
DRAW_BYTES_PER_S = 0.3e9  # weights that are drawn, written and read again
TIMED_SHARE = 1.5  # what is left for a step beside its prediction


class Planned(NamedTuple):
    """A job as it would run: its rows and its cap are settled."""

    case: Case
    plan: Plan


class _Work(NamedTuple):
    """What the steps of a job share: its plan is made once in a call."""

    bench: Bench
    job: CapJob
    planned: dict[str, Planned]


def steps(bench: Bench, done: Mapping[str, Row]) -> Iterator[Step]:
    """For each job its plan, and as soon as that is there, a step for each contender."""
    for job in JOBS:
        work = _Work(bench, job, {})
        name = f"{job.name}: plan"
        draw_s = _weight_bytes(job, bench) / DRAW_BYTES_PER_S
        yield Step(name, partial(_plan_row, work), expected_s=START_S + draw_s)
        known = jobs_of({name: done[name]}) if name in done else ()
        load_s = _weight_bytes(job, bench) / LOAD_BYTES_PER_S
        for entry in known[0].plan.entries if known else ():
            timed_s = TIMED_SHARE * job.num_steps * entry.step_s
            yield Step(f"{job.name}: {entry.key}", partial(_run_row, work, entry), START_S + load_s + timed_s)


def _plan_row(work: _Work) -> Row:
    return row_of(_cap_plan(work))


def _run_row(work: _Work, entry: Entry) -> Row:
    return row_of(_run(work, entry), of=work.job.name)


def _cap_plan(work: _Work) -> CapPlan:
    bench, job = work.bench, work.job
    named = CapPlan(job=job.words, cap_gib=job.cap_gib, is_rehearsal=bench.is_tiny, device=bench.device_name)
    try:
        _check_disk(bench, job)
        found = work.planned[job.name] = _plan(bench, job)
    except ShardwiseError as error:
        return replace(named, outcome="refused", reason=" ".join(str(error).split()))
    plan = found.plan
    contenders, num_left_out = contenders_of(plan, most=_most(bench))
    return replace(
        named,
        cap_bytes=plan.chosen.memory.usable_bytes,
        context_bytes=context_bytes(plan),
        seq_len=plan.chosen.seq_len,
        sequences_per_step=plan.schedule.sequences_per_step,
        num_parameters=plan.model_shape.num_parameters,
        host_granted_bytes=situation_of(plan).host_ram_bytes,
        num_candidates=len(plan.candidates),
        num_left_out=num_left_out,
        why=plan.chosen.reasons,
        more_memory=_with_more(bench, found),
        entries=tuple(_entry(contender, plan.chosen) for contender in contenders),
    )


def _plan(bench: Bench, job: CapJob) -> Planned:
    """The plan of a job under its cap; a ShardwiseError where nothing fits the card, or its host."""
    case = case_of(job, bench)
    if bench.is_tiny:
        unlimited = _plan_case(bench, replace(case, vram_bytes=None))
        case = replace(case, vram_bytes=tiny_cap_bytes(job, situation_of(unlimited), unlimited.chosen))
    plan = _plan_case(bench, case)
    if job.seq_len is None:
        case = with_rows(case, bench, longest_rows(situation_of(plan)), job.rows)
        plan = _plan_case(bench, case)
    return Planned(case, plan)


def _plan_case(bench: Bench, case: Case) -> Plan:
    """As a user's job is planned: what does not fit is an error here, unlike elsewhere in the benchmark."""
    inputs, data = bench.inputs_of(case)
    return plan_inputs(inputs, data, environment=bench.environment)


def _with_more(bench: Bench, planned: Planned) -> MoreMemory | None:
    """What would be taken if the card were larger by a quarter."""
    cap, context = planned.case.vram_bytes, context_bytes(planned.plan)
    assert cap is not None, "every job has a cap"
    case = replace(planned.case, vram_bytes=context + round(MORE * (cap - context)))
    larger, chosen = _plan_case(bench, case).chosen, planned.plan.chosen
    is_faster = larger.speed.step_s * (1 + SAME_SPEED) < chosen.speed.step_s
    is_truer = larger.strategy.is_exact and not chosen.strategy.is_exact
    return MoreMemory(
        cap_bytes=case.vram_bytes or 0,
        key=words_of(larger),
        step_s=larger.speed.step_s,
        is_better=is_truer or (is_faster and counts_beside(larger, chosen)),
        is_truer=is_truer,
    )


def _entry(contender: Contender, choice: Candidate) -> Entry:
    candidate = contender.candidate
    return Entry(
        key=contender.key,
        is_choice=contender.is_choice,
        is_setting=contender.is_setting,
        beyond=contender.beyond,
        is_beyond_host=contender.is_beyond_host,
        is_faithful=counts_beside(candidate, choice),
        need_bytes=candidate.memory.need_bytes,
        host_bytes=host_bytes(candidate),
        step_s=candidate.speed.step_s,
        tokens_per_s=candidate.speed.tokens_per_s_per_gpu,
    )


def _run(work: _Work, entry: Entry) -> CapRun:
    bench, job = work.bench, work.job
    if job.name not in work.planned:
        work.planned[job.name] = _plan(bench, job)
    case, plan = work.planned[job.name]
    contenders, _ = contenders_of(plan, most=_most(bench))
    candidate = next((each.candidate for each in contenders if each.key == entry.key), None)
    reason = "the plan that is made now no longer has it" if candidate is None else _host_lack(bench, candidate)
    if candidate is None or reason is not None:
        return CapRun(outcome=Outcome.REFUSED, key=entry.key, reason=reason)
    case = replace(case, name=f"{job.name}: {entry.key}")
    try:
        result = _run_held(bench, case, plan, candidate)
    except EnvironmentFaultError as error:
        return CapRun(outcome=Outcome.REFUSED, key=entry.key, reason=str(error))
    result = replace(result, case=without_paths(result.case))
    return CapRun(outcome=result.outcome, key=entry.key, reason=result.reason, result=result)


def _run_held(bench: Bench, case: Case, plan: Plan, candidate: Candidate) -> CaseResult:
    """Runs a candidate under its cap; EnvironmentFaultError where what it pages cannot be held to that."""
    if candidate.strategy.optimizer not in PAGED or plan.device_kind is DeviceKind.CPU:
        return bench.run_planned(case, plan, candidate)
    with held_to(candidate.memory.usable_bytes) as used_bytes:
        result = bench.run_planned(case, plan, candidate)
    measured = result.measured
    if measured.memory.device_bytes is None:
        return result
    device_bytes = measured.memory.device_bytes - used_bytes
    return replace(result, measured=replace(measured, memory=replace(measured.memory, device_bytes=device_bytes)))


def _most(bench: Bench) -> int:
    return MOST_TINY if bench.is_tiny else MOST


def _host_lack(bench: Bench, candidate: Candidate) -> str | None:
    """Why the host cannot hold a candidate just now, with both numbers; a CPU's own memory is what is capped."""
    if not bench.hardware.gpus:
        return None
    host = read_host()
    need, there = host_bytes(candidate), host.ram_available_bytes or host.ram_bytes
    if there is None or need <= there:
        return None
    return f"needs {format_bytes(need)} of host RAM; {format_bytes(there)} are free"


def _check_disk(bench: Bench, job: CapJob) -> None:
    """A ShardwiseError where the model's weights would not go onto the disk."""
    need, folder = _weight_bytes(job, bench), bench.work / "models" / job.model
    bench.work.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(bench.work).free
    if not bench.is_tiny and not (folder / "model.safetensors").is_file() and need + GIB > free:
        raise ShardwiseError(f"{job.model} takes {format_bytes(need)} of disk; {format_bytes(free)} are free")


def _weight_bytes(job: CapJob, bench: Bench) -> int:
    """Of the weights on disk, in bf16."""
    return 2 * shape_of(job, is_tiny=bench.is_tiny).num_parameters


PIECE = Piece(
    name="caps", about="small cards on a big one: the choice under a cap", steps=steps, tables=tables, goals=goals
)
