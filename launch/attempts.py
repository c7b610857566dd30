"""The attempts of a run: one launcher each, the next one after an out-of-memory with the plan's next fallback.

The global batch stays: a fallback differs in micro batch, accumulation or mechanism, never in what a step learns from.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

from launch import run_dir as run_dirs
from launch.accelerate_config import accelerate_config
from launch.command import launch_command, launch_environment
from launch.console import Console
from launch.deepspeed_config import deepspeed_config
from launch.nvme_folder import check_nvme, held_folder, nvme_folder
from launch.operators import remove_stale_locks
from launch.progress import MetricsTail, Progress
from launch.supervisor import AttemptCutShortError, StopKind, StopRequest, run_attempt
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, ExitCode
from trainer.spec.plan import Candidate, Plan
from trainer.spec.report import Ending, Report
from trainer.spec.units import format_bytes


class RunOutcome(NamedTuple):
    """How a run ended, and the report where there is one."""

    exit_code: ExitCode
    report: Report | None
    run_dir: Path | None = None


def prepare_attempt(plan: Plan, candidate: Candidate, *, run_dir: Path, resume: bool) -> Path:
    """Writes the next `attempts/N/` with everything its ranks read; returns it."""
    number = run_dirs.next_attempt(run_dir)
    attempt_dir = run_dir / "attempts" / str(number)
    try:
        (attempt_dir / "logs").mkdir(parents=True)
        attempt_plan = msgspec.structs.replace(plan, candidates=(candidate,), resume=resume)
        codec.write(attempt_dir / "plan.json", attempt_plan)
        if candidate.strategy.sharding.uses_deepspeed:
            folder = nvme_folder(attempt_plan, run_dir, number)
            config = deepspeed_config(attempt_plan, nvme_path=None if folder is None else str(folder))
            filled = msgspec.json.format(msgspec.json.encode(config), indent=1)
            codec.write_bytes(attempt_dir / "ds_config.json", filled + b"\n")
        settings = accelerate_config(attempt_plan, attempt_dir=attempt_dir)
        codec.write_bytes(attempt_dir / "accelerate.yaml", yaml.safe_dump(settings, sort_keys=False).encode())
    except OSError as error:
        raise EnvironmentFaultError(f"{attempt_dir}: cannot be written: {error.strerror}") from error
    return attempt_dir


def run_attempts(
    plan: Plan,
    *,
    run_dir: Path,
    resume: bool,
    extensions_dir: Path,
    console: Console,
    stop: StopRequest,
    environment: Mapping[str, str] = os.environ,
) -> RunOutcome:
    """Runs the chosen candidate, then the fallbacks, until one ends in order."""
    incidents: list[str] = []
    started = time.monotonic()
    first_attempt = run_dirs.next_attempt(run_dir)
    candidates = (plan.chosen, *plan.fallbacks)
    for number, candidate in enumerate(candidates):
        may_resume = resume or (number > 0 and bool(run_dirs.committed_checkpoints(run_dir)))
        attempt_dir = prepare_attempt(plan, candidate, run_dir=run_dir, resume=may_resume)
        try:
            report = _run_one(plan, attempt_dir, run_dir, extensions_dir, console, stop, environment)
        except AttemptCutShortError as cut:
            console.line(str(cut))
            return RunOutcome(stop_code(stop), None, run_dir)
        report = _with_ending(report, stop)
        is_out = report.ending is Ending.OUT_OF_MEMORY and stop.kind is None
        told = report.incidents
        if is_out:
            told = (*told, _memory_incident(candidate, report, is_last=number == len(candidates) - 1))
        report = msgspec.structs.replace(
            report,
            incidents=(*incidents, *told),
            attempts=run_dirs.next_attempt(run_dir) - first_attempt,
            duration_s=time.monotonic() - started,
        )
        codec.write(run_dir / "report.json", report)
        if not is_out:
            return RunOutcome(ExitCode(report.exit_code), report, run_dir)
        incidents.append(told[-1])
        console.line(told[-1])
    return RunOutcome(ExitCode.OUT_OF_MEMORY, report, run_dir)


def _run_one(
    plan: Plan,
    attempt_dir: Path,
    run_dir: Path,
    extensions_dir: Path,
    console: Console,
    stop: StopRequest,
    environment: Mapping[str, str],
) -> Report:
    attempt_plan = codec.read(attempt_dir / "plan.json", Plan)
    tail = MetricsTail(run_dir / "metrics.jsonl", from_end=True)
    progress = Progress(console, attempt_dir=attempt_dir, metrics=tail, num_steps=plan.schedule.num_steps)
    argv = launch_command(attempt_dir, log_dir=attempt_dir / "logs", python=sys.executable)
    cores = plan.hardware.host.num_cores or 1
    remove_stale_locks(extensions_dir, on_progress=console.line)  # a rank of the attempt before may have left one
    check_nvme(attempt_plan)
    try:
        with held_folder(nvme_folder(attempt_plan, run_dir, int(attempt_dir.name))):
            return run_attempt(
                argv,
                attempt_dir=attempt_dir,
                environment=launch_environment(environment, attempt_plan, extensions_dir=extensions_dir, cores=cores),
                stop=stop,
                on_tick=progress.tick,
            )
    finally:
        progress.close()


def _with_ending(report: Report, stop: StopRequest) -> Report:
    """The report with the exit code of `shardwise`; a stop asked for by TERM or USR1 is a preemption."""
    ending = report.ending
    if ending is Ending.STOPPED and stop.kind is StopKind.REQUEUE:
        ending = Ending.PREEMPTED
    code = {
        Ending.FINISHED: ExitCode.DONE,
        Ending.STOPPED: ExitCode.INTERRUPTED,
        Ending.PREEMPTED: ExitCode.REQUEUE,
        Ending.OUT_OF_MEMORY: ExitCode.OUT_OF_MEMORY,
        Ending.FAILED: ExitCode.ENVIRONMENT,
    }[ending]
    return msgspec.structs.replace(report, ending=ending, exit_code=int(code))


def stop_code(stop: StopRequest) -> ExitCode:
    """The exit code of a run that was stopped by request."""
    return ExitCode.REQUEUE if stop.kind is StopKind.REQUEUE else ExitCode.INTERRUPTED


def _memory_incident(candidate: Candidate, report: Report, *, is_last: bool) -> str:
    parts = candidate.memory.parts
    largest = max(parts, key=lambda name: parts[name]) if parts else "unknown"
    return (
        f"out of memory at step {report.step} with {candidate.strategy.name}, micro batch {candidate.micro_batch}: "
        f"predicted {format_bytes(candidate.memory.need_bytes)} of {format_bytes(candidate.memory.usable_bytes)}, "
        f"largest part {largest.replace('_', ' ')}; "
        + ("no fallback is left" if is_last else "going on with the next fallback at the same global batch")
    )
