"""`--trial N`: the best N candidates run a few real steps each, and the measured winner is taken.

A trial is an attempt like any other, started by `accelerate launch` and watched by the supervisor, in a scratch folder
of the cache: what a few steps cost is what the run will cost. Nothing is scored, saved or exported. What they measured
ranks before what was predicted (`trainer.planning.search.choice`) and joins the calibration of the device.

A candidate that cannot run is told in one line and the others go on; what ran out of memory is out of the plan.
"""

import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from launch.attempt.supervisor import StopRequest
from launch.inputs.prepare_data import prepare_data
from launch.job import folders
from launch.plan.calibration_store import append_calibration, record_of_run
from launch.plan.gather import PlanInputs, plan_inputs, with_weights
from launch.probe.torch_fit import check_torch
from launch.run.attempts import stop_code
from launch.run.short_run import run_short, scratch_folder, short_plan
from launch.terminal import Console
from slurm.allocation import is_login_node
from trainer.spec.calibration import RecordSource
from trainer.spec.data.profile import DataProfile
from trainer.spec.errors import EnvironmentFaultError, InputError, ShardwiseError
from trainer.spec.hardware import Hardware
from trainer.spec.plan import Candidate, Plan, TrialResult
from trainer.spec.report import Ending, Report
from trainer.spec.units import format_bytes, format_seconds

# As a rank counts them: two that allocate and warm up, one whose memory is measured, and the three that are timed.
TRIAL_STEPS = 6


class Trial(NamedTuple):
    """One candidate after its steps; `report` is None where it could not run."""

    candidate: Candidate
    report: Report | None

    @property
    def result(self) -> TrialResult | None:
        """What the planner is told; None where nothing was learned."""
        if self.report is None:
            return None
        measured = self.report.measured
        return TrialResult(
            strategy=self.candidate.strategy.name,
            micro_batch=self.candidate.micro_batch,
            step_s=measured.speed.step_s,
            peak_allocated_bytes=measured.memory.peak_allocated_bytes,
            ran_out_of_memory=self.report.ending is Ending.OUT_OF_MEMORY,
            predicted_step_s=self.candidate.speed.step_s,
        )


class TrialsStoppedError(ShardwiseError):
    """A stop was asked for: nothing is left running, and nothing was decided."""

    def __init__(self, stop: StopRequest) -> None:
        super().__init__("stopped in a trial: nothing was trained")
        self.exit_code = stop_code(stop)


def check_trials_can_run(hardware: Hardware, *, what: str = "--trial") -> None:
    """InputError for a machine that is not this one, EnvironmentFaultError for a login node."""
    if hardware.source != "probe":
        raise InputError(f"{what} runs on this machine, --hardware names another ({hardware.source}); leave out one")
    if is_login_node(hardware):
        raise EnvironmentFaultError(f"this is a Slurm login node: {what} belongs on a compute node")


def tried_plan(inputs: PlanInputs, num: int, *, console: Console, environment: Mapping[str, str] = os.environ) -> Plan:
    """The plan of a job after trials of its best `num` candidates; prepares the data they need."""
    check_trials_can_run(inputs.hardware)
    inputs = inputs._replace(hardware=check_torch(inputs.hardware, environment))
    inputs = with_weights(inputs)
    data = prepare_data(inputs.request, on_progress=console.line)
    return plan_after_trials(inputs, data, num, console=console, environment=environment)


def plan_after_trials(
    inputs: PlanInputs, data: DataProfile, num: int, *, console: Console, environment: Mapping[str, str] = os.environ
) -> Plan:
    """The plan made again with what its best `num` candidates measured; keeps that for the plans to come.

    EnvironmentFaultError where none of them could run, TrialsStoppedError after Ctrl-C.
    """
    plan = plan_inputs(inputs, data, environment=environment)
    trials = run_trials(plan, num, cache=inputs.cache, console=console, environment=environment)
    results = tuple(trial.result for trial in trials if trial.result is not None)
    if not results:
        raise EnvironmentFaultError(f"--trial: none of {len(trials)} candidates could run")
    decided = plan_inputs(inputs, data, environment=environment, trials=results)
    _keep(plan, trials, environment)  # only now: the same predictions have to be ranked with and without the trials
    return decided


def run_trials(
    plan: Plan, num: int, *, cache: Path, console: Console, environment: Mapping[str, str] = os.environ
) -> tuple[Trial, ...]:
    """Runs the first `num` candidates of `plan` one after the other."""
    candidates = plan.candidates[:num]
    stop = StopRequest()
    trials = []
    with stop.listening(), scratch_folder(cache / "trials") as scratch:
        for number, candidate in enumerate(candidates, start=1):
            head = (
                f"trial {number} of {len(candidates)}: {candidate.strategy.name}, micro batch {candidate.micro_batch}"
            )
            console.line(f"{head} ...")
            run_dir = scratch / str(number)
            report, words = _run_trial(
                trial_plan(plan, candidate), run_dir, cache=cache, console=console, stop=stop, environment=environment
            )
            if stop.kind is not None:
                raise TrialsStoppedError(stop)
            console.line(f"{head}: {words}")
            trials.append(Trial(candidate, report))
            if report is not None:
                shutil.rmtree(run_dir)
    return tuple(trials)


def trial_plan(plan: Plan, candidate: Candidate) -> Plan:
    """`plan` cut down to a few steps of one candidate, with nothing to score, save or decode."""
    return short_plan(plan, candidate, num_steps=TRIAL_STEPS)


def _run_trial(
    plan: Plan,
    run_dir: Path,
    *,
    cache: Path,
    console: Console,
    stop: StopRequest,
    environment: Mapping[str, str],
) -> tuple[Report | None, str]:
    """The report of a candidate that ran, or ran out of memory, and how it went in words."""
    run_dir.mkdir()
    run = run_short(plan, run_dir, cache=cache, console=console, stop=stop, environment=environment)
    if run.report is None:
        return None, f"failed: {run.problem} (logs: {run_dir})"
    return run.report, _words(run.report)


def _words(report: Report) -> str:
    if report.ending is Ending.OUT_OF_MEMORY:
        return "ran out of memory"
    measured, predicted = report.measured, report.predicted
    step, peak = measured.speed.step_s, measured.memory.peak_allocated_bytes
    assert step is not None and peak is not None, "a trial that finished has timed its last steps"
    expected = f"predicted {format_seconds(predicted.speed.step_s or 0)}"
    return f"{format_seconds(step)} a step ({expected}), peak {format_bytes(peak)}"


def _keep(plan: Plan, trials: tuple[Trial, ...], environment: Mapping[str, str]) -> None:
    now = datetime.now(UTC)
    for trial in trials:
        if trial.report is not None and trial.report.ending is Ending.FINISHED:
            record = record_of_run(trial.report, plan, now=now, source=RecordSource.TRIAL)
            if record is not None:
                append_calibration(folders.state_home(environment), record)
