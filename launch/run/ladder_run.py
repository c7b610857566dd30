"""Climbs the ladder: plans each rung with its pins, runs it a few steps in processes of its own, reads its report.

Micro batch, global batch, rows and seed are the same on every rung. A rung that is predicted not to fit runs all the
same, so that the prediction is put to the test: on a CPU under a data limit of what is usable, so that it is the rung
that ends and not the machine.
"""

import shutil
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from launch.attempt.supervisor import StopRequest
from launch.job import folders
from launch.job.layers import COMMAND_LINE, read_job_layers
from launch.plan.gather import PlanInputs, plan_inputs
from launch.run.ladder_rungs import GROUND, METHOD, Rung
from launch.run.short_run import ShortRun, run_short, scratch_folder, short_plan
from launch.run.unlimited_plan import plan_regardless, without_limits
from launch.terminal import Console
from trainer.spec.data.profile import DataProfile
from trainer.spec.errors import InputError, NothingFitsError
from trainer.spec.job.sections import Job
from trainer.spec.plan import Candidate, Plan
from trainer.spec.report import Report
from trainer.spec.strategy import Method
from trainer.spec.units import format_bytes, format_seconds
from trainer.spec.value import Value


class Outcome(StrEnum):
    """What became of a rung."""

    RAN = "ran"
    OUT_OF_MEMORY = "out of memory"
    SKIPPED = "skipped"  # there is no such thing here
    FAILED = "failed"


class RungResult(Value, frozen=True, kw_only=True):
    """One rung after its steps; the report is there where it ran, or ran out of memory."""

    rung: Rung
    outcome: Outcome
    candidate: Candidate | None = None
    report: Report | None = None
    reason: str | None = None

    @property
    def is_climbed(self) -> bool:
        """Whether the rungs above stand on it."""
        return self.outcome in (Outcome.RAN, Outcome.OUT_OF_MEMORY)


class Climb(NamedTuple):
    """What every rung has in common."""

    job_path: Path
    overrides: Sequence[str]
    inputs: PlanInputs
    data: DataProfile
    num_steps: int
    console: Console
    stop: StopRequest
    environment: Mapping[str, str]


def climb(around: Climb, rungs: Sequence[Rung]) -> tuple[RungResult, ...]:
    """Runs the rungs from the lowest up; ends early where a stop is asked for."""
    results: list[RungResult] = []
    settings = common_settings(around)
    with scratch_folder(around.inputs.cache / "ladder") as scratch:
        for number, rung in enumerate(rungs, start=1):
            around.console.line(f"rung {number} of {len(rungs)}: {rung.name} ...")
            run_dir = scratch / str(number)
            result = _run_rung(around, rung, settings | rung.settings, run_dir)
            if around.stop.kind is not None:
                shutil.rmtree(run_dir, ignore_errors=True)
                break
            around.console.line(f"rung {number} of {len(rungs)}: {rung.name}: {_words(result)}")
            results.append(result)
            if result.is_climbed:
                settings |= rung.settings
            if result.outcome is not Outcome.FAILED:
                shutil.rmtree(run_dir, ignore_errors=True)
    return tuple(results)


def common_settings(around: Climb) -> dict[str, str]:
    """What all rungs start from: nothing saved, the micro batch and the sharding that the job's own plan has."""
    job, settings = around.inputs.resolved.job, dict(GROUND)
    if job.pin.offload is not None:
        del settings["pin.offload"]
    try:
        chosen = plan_inputs(around.inputs, around.data, environment=around.environment).chosen
    except NothingFitsError:
        return settings | {"pin.micro_batch": str(job.pin.micro_batch or 1)}
    settings["pin.micro_batch"] = str(chosen.micro_batch)
    if around.inputs.hardware.num_devices > 1:
        settings["pin.sharding"] = str(chosen.strategy.sharding)
    return settings


def rung_plan(around: Climb, settings: dict[str, str]) -> Plan:
    """The plan with these settings, whether it fits or not; InputError and NothingFitsError where there is none."""
    inputs = around.inputs
    resolved = replace(inputs.resolved, job=_job_of(around, settings))
    return plan_regardless(inputs._replace(resolved=resolved), around.data, environment=around.environment)


def _job_of(around: Climb, settings: dict[str, str]) -> Job:
    """The job with these settings, read as from the command line; neither time nor money limits a few steps.

    Adapters on weights that are drawn are no training, and refused as such; what they hold is measured all the same.
    """
    method = settings[METHOD]
    is_on_drawn_weights = method in (Method.LORA, Method.QLORA) and around.inputs.resolved.job.model.config is not None
    read = settings | {METHOD: Method.FULL.value} if is_on_drawn_weights else settings
    job = read_job_layers(
        around.job_path,
        [*around.overrides, *(f"{path}={value}" for path, value in read.items())],
        config_home=folders.config_home(around.environment),
        site_config=folders.site_config(around.environment),
    ).job
    train = replace(job.train, method=Method(method)) if is_on_drawn_weights else job.train
    return replace(job, train=train, limits=without_limits(job.limits))


def _run_rung(around: Climb, rung: Rung, settings: dict[str, str], run_dir: Path) -> RungResult:
    try:
        plan = rung_plan(around, settings)
    except (InputError, NothingFitsError) as error:
        reason = " ".join(str(error).replace(f"{COMMAND_LINE}: ", "").split())
        return RungResult(rung=rung, outcome=Outcome.SKIPPED, reason=reason)
    run_dir.mkdir()
    run = run_short(
        short_plan(plan, plan.chosen, num_steps=around.num_steps),
        run_dir,
        cache=around.inputs.cache,
        console=around.console,
        stop=around.stop,
        environment=around.environment,
    )
    return _result_of(rung, plan.chosen, run, run_dir)


def _result_of(rung: Rung, candidate: Candidate, run: ShortRun, run_dir: Path) -> RungResult:
    if run.report is None:
        reason = f"{run.problem} (logs: {run_dir})"
        return RungResult(rung=rung, outcome=Outcome.FAILED, candidate=candidate, reason=reason)
    outcome = Outcome.OUT_OF_MEMORY if run.ran_out_of_memory else Outcome.RAN
    return RungResult(rung=rung, outcome=outcome, candidate=candidate, report=run.report)


def _words(result: RungResult) -> str:
    """How it went, in a line."""
    if result.report is None or result.candidate is None:
        return f"{result.outcome}: {result.reason}"
    memory = result.candidate.memory
    if result.outcome is Outcome.OUT_OF_MEMORY:
        return (
            f"ran out of memory (exit code {result.report.exit_code}); predicted to need "
            f"{format_bytes(memory.need_bytes)} of {format_bytes(memory.usable_bytes)}"
        )
    measured = result.report.measured
    peak, step = measured.memory.peak_allocated_bytes, measured.speed.step_s
    words = f"peak {format_bytes(peak or 0)}, predicted {format_bytes(memory.peak_allocated_bytes)}"
    return words if step is None else f"{words}; {format_seconds(step)} a step"
