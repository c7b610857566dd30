"""Budgets of a candidate besides device memory: host RAM, pinned memory, NVMe, hours and money.

A plan that the kernel would kill for its host RAM does not fit, and neither does a week of swapping in a day. Each
answer is a sentence with both numbers, and the setting that would lift the limit.

Totals of a run: hours, GPU hours, energy and money.

Energy is that of the boards at their power limit for the whole run: board watts x GPUs x hours, at a PUE of 1 (no
cooling, no losses), the host not counted. A run that waits for memory or a network draws less.
"""

import math

from shardwise.trainer.planning.candidates import run_cost, run_hours
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.spec.plan import Candidate, MemoryEstimate
from shardwise.trainer.spec.units import GIB, format_bytes, format_seconds
from shardwise.trainer.spec.value import Value

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


class Excess(Value, frozen=True, kw_only=True):
    """A budget that a candidate exceeds."""

    reason: str
    remedy: str
    is_host: bool = False  # host RAM, pinned or not


def excess(context: PlanningContext, candidate: Candidate) -> Excess | None:
    """The first budget that `candidate` exceeds, or None where it stays within all of them."""
    return (
        device_excess(context, candidate.memory)
        or _host_excess(context, candidate)
        or _nvme_excess(context, candidate.memory)
        or _time_excess(context, run_hours(context, candidate))
    )


def device_excess(context: PlanningContext, memory: MemoryEstimate) -> Excess | None:
    """More than the device grants."""
    if memory.fits:
        return None
    return Excess(
        reason=f"needs {format_bytes(memory.need_bytes)} {_each(context)}; {context.device_text}",
        remedy=f"a device with {whole_gib(memory.need_bytes)} usable",
    )


def whole_gib(num_bytes: int) -> str:
    """Rounded up, so that what is named does suffice."""
    return f"{math.ceil(num_bytes / GIB)} GiB"


def _each(context: PlanningContext) -> str:
    return "a rank" if context.is_cpu else "a GPU"


def _host_excess(context: PlanningContext, candidate: Candidate) -> Excess | None:
    memory, host = candidate.memory, context.hardware.host
    need, granted = memory.pinned_bytes + memory.host_bytes, context.host_ram_bytes
    if context.is_cpu or granted is None:
        return None  # a CPU's memory is its host RAM; where the RAM is unknown a rule has refused offload
    is_capped = granted == context.job.limits.host_ram
    if need > granted:
        return Excess(
            reason=f"needs {format_bytes(need)} of host RAM a node; {format_bytes(granted)} are granted",
            remedy=f"limits.host_ram: {whole_gib(need)}" if is_capped else f"nodes with {whole_gib(need)} of RAM",
            is_host=True,
        )
    if host.pinned_limit_bytes is not None and memory.pinned_bytes > host.pinned_limit_bytes:
        return Excess(
            reason=f"needs {format_bytes(memory.pinned_bytes)} of pinned host RAM; the limit is "
            f"{format_bytes(host.pinned_limit_bytes)}",
            remedy=f"ulimit -l of {whole_gib(memory.pinned_bytes)}",
            is_host=True,
        )
    return None


def _nvme_excess(context: PlanningContext, memory: MemoryEstimate) -> Excess | None:
    if not memory.nvme_bytes:
        return None
    granted = context.nvme_bytes
    if granted is not None and memory.nvme_bytes <= granted:
        return None
    known = "its free space is unknown" if granted is None else f"{format_bytes(granted)} are granted"
    return Excess(
        reason=f"needs {format_bytes(memory.nvme_bytes)} under limits.nvme.path; {known}",
        remedy=f"limits.nvme.size: {whole_gib(memory.nvme_bytes)}, where the disk has it",
    )


def _time_excess(context: PlanningContext, hours: float) -> Excess | None:
    limits, cost = context.job.limits, run_cost(context, hours)
    if hours > limits.hours:
        return Excess(
            reason=f"takes {format_seconds(hours * 3600)}; limits.hours is {limits.hours:g}",
            remedy=f"limits.hours: {math.ceil(hours)}",
        )
    if cost is None or limits.cost is None or cost <= limits.cost:
        return None
    return Excess(reason=f"costs {cost:.2f}; limits.cost is {limits.cost:g}", remedy=f"limits.cost: {math.ceil(cost)}")
