"""`--trial N`: the best N candidates run a few real steps each, and the fastest is chosen.

A short run is an attempt like any other, in a scratch folder of the cache: its cost is the cost of the run. It does not
evaluate, save or export. `shardwise ladder` and `profile` use it too. Measurements of trials rank before predictions
(`trainer.planning.search.choice`) and join the calibration of the device. A candidate that cannot run is reported in
one line and the others continue; a candidate that runs out of memory is removed from the plan.
"""

import io
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwise.launch.attempt.supervisor import StopRequest
from shardwise.launch.engine.operators import build_needed
from shardwise.launch.inputs.prepare_data import prepare_data
from shardwise.launch.inputs.trusted_code import fetch_flash_kernel
from shardwise.launch.job import state_home
from shardwise.launch.plan.calibration_store import store_measurements
from shardwise.launch.plan.gather import PlanInputs, plan_inputs, with_weights
from shardwise.launch.probe.torch_fit import check_torch
from shardwise.launch.run.attempts import run_attempts, stop_code
from shardwise.launch.terminal import Console
from shardwise.slurm.jobs import is_login_node
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError, ShardwiseError
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.plan import Candidate, Plan, RecordSource, TrialResult
from shardwise.trainer.spec.report import Ending, Report
from shardwise.trainer.spec.units import format_bytes, format_seconds

# As a rank counts them: two that allocate and warm up, one whose memory is measured, and the three that are timed.
TRIAL_STEPS = 6


class Trial(NamedTuple):
    """One candidate after its steps; `report` is None if it could not run."""

    candidate: Candidate
    report: Report | None

    @property
    def result(self) -> TrialResult | None:
        """The calibration record for the planner; None if nothing was measured."""
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
    """A stop request arrived: every process has ended, and no candidate was chosen."""

    def __init__(self, stop: StopRequest) -> None:
        super().__init__("stopped in a trial: nothing was trained")
        self.exit_code = stop_code(stop)


class ShortRun(NamedTuple):
    """The report of steps that finished or ran out of memory; else the problem."""

    report: Report | None
    problem: str | None = None

    @property
    def ran_out_of_memory(self) -> bool:
        return self.report is not None and self.report.ending is Ending.OUT_OF_MEMORY


def check_trials_can_run(hardware: Hardware, *, what: str = "--trial") -> None:
    """InputError for a machine that is not this one, EnvironmentFaultError for a login node."""
    if hardware.source != "probe":
        raise InputError(f"{what} runs on this machine, --hardware names another ({hardware.source}); remove one")
    if is_login_node(hardware):
        raise EnvironmentFaultError(f"this is a Slurm login node: {what} belongs on a compute node")


def ready_inputs(
    inputs: PlanInputs, *, console: Console, environment: Mapping[str, str]
) -> tuple[PlanInputs, DataProfile]:
    """The inputs with torch checked and weights downloaded, and the prepared data."""
    inputs = with_weights(inputs._replace(hardware=check_torch(inputs.hardware, environment)))
    return inputs, prepare_data(inputs.request, on_progress=console.line)


def tried_plan(inputs: PlanInputs, num: int, *, console: Console) -> Plan:
    """The plan of a job after trials of its best `num` candidates; prepares the data they need."""
    check_trials_can_run(inputs.hardware)
    inputs, data = ready_inputs(inputs, console=console, environment=os.environ)
    return plan_after_trials(inputs, data, num, console=console)


def plan_after_trials(
    inputs: PlanInputs, data: DataProfile, num: int, *, console: Console, environment: Mapping[str, str] = os.environ
) -> Plan:
    """The plan made again with measurements of its best `num` candidates, which later plans use as well.

    EnvironmentFaultError where none of them could run, TrialsStoppedError after Ctrl-C.
    """
    plan = plan_inputs(inputs, data, environment=environment)
    trials = run_trials(plan, num, cache=inputs.cache, console=console, environment=environment)
    results = tuple(trial.result for trial in trials if trial.result is not None)
    if not results:
        raise EnvironmentFaultError(f"--trial: none of {len(trials)} candidates could run")
    tried = inputs._replace(hardware=plan.hardware)  # perhaps fewer GPUs
    decided = plan_inputs(tried, data, environment=environment, trials=results)
    # Only now: the same predictions have to be ranked with and without the trials.
    _keep(plan, trials, environment, console)
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
            report, outcome = _run_trial(
                short_plan(plan, candidate, num_steps=TRIAL_STEPS),
                run_dir,
                cache=cache,
                console=console,
                stop=stop,
                environment=environment,
            )
            if stop.kind is not None:
                raise TrialsStoppedError(stop)
            console.line(f"{head}: {outcome}")
            trials.append(Trial(candidate, report))
            if report is not None:
                shutil.rmtree(run_dir)
    return tuple(trials)


def _run_trial(
    plan: Plan,
    run_dir: Path,
    *,
    cache: Path,
    console: Console,
    stop: StopRequest,
    environment: Mapping[str, str],
) -> tuple[Report | None, str]:
    """The report of a candidate that ran, or ran out of memory, and a line on the outcome."""
    run_dir.mkdir()
    run = run_short(plan, run_dir, cache=cache, console=console, stop=stop, environment=environment)
    if run.report is None:
        return None, f"failed: {run.problem} (logs: {run_dir})"
    return run.report, _outcome_text(run.report)


def _outcome_text(report: Report) -> str:
    if report.ending is Ending.OUT_OF_MEMORY:
        return "ran out of memory"
    measured, predicted = report.measured, report.predicted
    step, peak = measured.speed.step_s, measured.memory.peak_allocated_bytes
    assert step is not None and peak is not None, "a trial that finished has timed its last steps"
    expected = f"predicted {format_seconds(predicted.speed.step_s or 0)}"
    return f"{format_seconds(step)} a step ({expected}), peak {format_bytes(peak)}"


def _keep(plan: Plan, trials: tuple[Trial, ...], environment: Mapping[str, str], console: Console) -> None:
    home = state_home(environment)
    for trial in trials:
        if trial.report is not None:
            store_measurements(home, trial.report, plan, on_line=console.line, source=RecordSource.TRIAL)


def short_plan(plan: Plan, candidate: Candidate, *, num_steps: int) -> Plan:
    """`plan` reduced to a few steps of one candidate, without evaluation, checkpoints and tokenizer."""
    schedule = replace(
        plan.schedule,
        num_steps=num_steps,
        warmup_steps=min(plan.schedule.warmup_steps, num_steps - 1),
        eval_every_steps=None,
        eval_every_s=None,
        checkpoint_every_steps=None,
        checkpoint_every_s=None,
    )
    data = replace(plan.data, num_eval_rows=0, num_eval_tokens=0)
    return replace(
        plan, candidates=(candidate,), fallbacks=(), schedule=schedule, data=data, tokenizer_path=None, is_trial=True
    )


def run_short(
    plan: Plan, run_dir: Path, *, cache: Path, console: Console, stop: StopRequest, environment: Mapping[str, str]
) -> ShortRun:
    """Runs the plan in `run_dir`, an empty folder; its progress is not shown."""

    def should_stop() -> bool:
        return stop.kind is not None

    try:
        fetch_flash_kernel(plan, on_progress=console.line, should_stop=should_stop)
        operators = build_needed(plan, cache_home=cache, on_progress=console.line, should_stop=should_stop)
        if should_stop():
            return ShortRun(None, "stopped")
        report = run_attempts(
            plan,
            run_dir=run_dir,
            resume=False,
            extensions_dir=operators,
            console=Console(io.StringIO()),
            stop=stop,
            environment=environment,
        ).report
    except EnvironmentFaultError as error:
        return ShortRun(None, str(error).splitlines()[0])
    if report is not None and report.ending in (Ending.FINISHED, Ending.OUT_OF_MEMORY):
        return ShortRun(report)
    error_text = (report.error if report else None) or "no report"
    return ShortRun(None, " ".join(error_text.split()))


@contextmanager
def scratch_folder(root: Path) -> Iterator[Path]:
    """A folder under `root`, removed when the block ends unless it contains logs of a run that failed."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=root))
    except OSError as error:
        raise EnvironmentFaultError(f"{root}: cannot be written: {error.strerror}") from error
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if not any(folder.iterdir()):
        folder.rmdir()
