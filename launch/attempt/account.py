"""What is told of an attempt that has ended: its record, its incident, and where its memory went."""

import time
from pathlib import Path
from typing import NamedTuple

from launch.attempt.end import AttemptEnd
from launch.attempt.retries import Decision
from trainer.spec.plan import Plan
from trainer.spec.report import AttemptRecord, Fault, Report
from trainer.spec.units import format_bytes


class Begin(NamedTuple):
    """Where an attempt began."""

    moment_s: float
    step: int | None  # None: from the beginning


def record_of(end: AttemptEnd, report: Report, attempt_dir: Path, begin: Begin) -> AttemptRecord:
    """What the report of the run keeps of an attempt that has just ended."""
    candidate, resumed = report.plan, report.resumed_from_step
    return AttemptRecord(
        number=int(attempt_dir.name),
        strategy=candidate.strategy.name,
        num_ranks=candidate.num_ranks,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        resumed_from_step=begin.step if resumed is None else resumed,
        step=max(report.step, begin.step or 0),
        ending=report.ending,
        fault=end.fault,
        cause=None if end.fault is None else report.error,
        duration_s=time.monotonic() - begin.moment_s,
        predicted_peak_bytes=candidate.memory.peak_allocated_bytes,
        measured_peak_bytes=report.measured.memory.peak_allocated_bytes,
    )


def incident_of(end: AttemptEnd, decision: Decision) -> str:
    """What went wrong with an attempt, and what follows, in a line."""
    if end.fault is Fault.OUT_OF_MEMORY:
        return f"{_memory_words(end.report)}; {decision.words}"
    words = (end.report.error or "no reason given").splitlines()[0]
    return f"step {end.report.step} with {end.report.plan.strategy.name}: {words}; {decision.words}"


def memory_report(plan: Plan, attempt_dir: Path, end: AttemptEnd, decision: Decision) -> str:
    """Where the report on an attempt stands that ran out of memory, as the end of a line; empty where there is none."""
    if end.fault is None or not end.fault.is_memory:
        return ""
    from launch.attempt.oom_report import write_oom_report

    candidates = (plan.chosen, *plan.fallbacks)
    following = None if decision.candidate is None else candidates[decision.candidate]
    path = write_oom_report(attempt_dir, plan, end.report, next_candidate=following, decision=decision.words)
    return "" if path is None else f" (what it held: {path})"


def _memory_words(report: Report) -> str:
    candidate = report.plan
    parts = candidate.memory.parts
    largest = max(parts, key=lambda name: parts[name]) if parts else "unknown"
    held = report.measured.memory.peak_allocated_bytes
    return (
        f"out of memory at step {report.step} with {candidate.strategy.name}, micro batch {candidate.micro_batch}: "
        f"predicted {format_bytes(candidate.memory.need_bytes)} of {format_bytes(candidate.memory.usable_bytes)}, "
        + ("" if held is None else f"held {format_bytes(held)}, ")
        + f"largest part {largest.replace('_', ' ')}"
    )
