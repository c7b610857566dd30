"""`shardwise train`: from a job file, or a plan, to a trained model and its report.

Order: read and check everything that is cheap, prepare the data, plan, make the run directory, build operators, run
the attempts, report. Every fault of the input is reported before the run directory exists.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwise.launch.attempt.limits import Deadline, refuse_spent
from shardwise.launch.attempt.retries import refuse_endless_restarts
from shardwise.launch.attempt.supervisor import StoppedEarlyError, StopRequest
from shardwise.launch.engine.launcher import prepare_attempt
from shardwise.launch.engine.operators import build_needed
from shardwise.launch.inputs.staging import with_stages
from shardwise.launch.inputs.trusted_code import fetch_flash_kernel, keep_extension, keep_model_code
from shardwise.launch.job import state_home
from shardwise.launch.job.layers import ResolvedJob, render_resolved
from shardwise.launch.nodes.machines import Machines, machines_of, membership, serve
from shardwise.launch.options import TrainOptions
from shardwise.launch.plan.calibration_store import store_measurements
from shardwise.launch.run.attempts import RunOutcome, run_attempts, stop_code
from shardwise.launch.run.disk_needs import check_disk
from shardwise.launch.run.start import Prepared, check_trial, finished_report, plan_to_resume, prepare, refuse_other_run
from shardwise.launch.rundir import paths as run_dirs
from shardwise.launch.rundir.lock import locked, must_end_at_start
from shardwise.launch.show.recorded_run import read_recorded
from shardwise.launch.show.report import render_report
from shardwise.launch.terminal import Console, show_lines, text_width
from shardwise.trainer.planning.explain.first_screen import first_screen
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError, NothingFitsError, ShardwiseError
from shardwise.trainer.spec.job.sections import without_url
from shardwise.trainer.spec.plan import Plan


def run_train(options: TrainOptions, console: Console) -> ExitCode:
    """`train`, then its report as JSON, or the next commands."""
    notes = Console(sys.stderr) if options.as_json else console
    try:
        outcome = train(options, notes)
    except NothingFitsError as error:
        if options.nodes is not None or "SLURM_JOB_ID" in os.environ or options.job.suffix == ".json":
            raise  # the plan of several machines, or one that was made before
        from shardwise.launch.commands.ways_out import refused

        return refused(error, options, Console(sys.stderr))
    if options.as_json and outcome.report is not None:
        console.json(outcome.report)
    if outcome.exit_code is ExitCode.DONE and outcome.run_dir is not None and outcome.report is not None:
        notes.line()
        notes.line("next:")
        for command in next_commands(outcome.run_dir, str(options.job)):
            notes.line(f"  {command}")
    return outcome.exit_code


def train(options: TrainOptions, console: Console, *, environment: Mapping[str, str] = os.environ) -> RunOutcome:
    """Trains, and returns how it ended; a ShardwiseError means that nothing was started."""
    check_trial(options)
    console.start_recording()
    stop = StopRequest()
    place = membership(nodes=options.nodes, node_rank=options.node_rank, head=options.head, run_dir=options.run_dir)
    if options.run_dir is not None:
        run_dirs.refuse_links(options.run_dir)
    if options.run_dir is not None and must_end_at_start(options.run_dir, environment):
        return _cancelled(options.run_dir, console)
    if place is not None and place.node_rank > 0:
        with stop.listening():
            return RunOutcome(serve(place, stop, on_line=console.line), None)
    with stop.listening(), contextlib.ExitStack() as held:
        try:
            with stop.raising():
                machines = held.enter_context(machines_of(place, on_line=console.line, environment=environment))
                prepared = prepare(options, console, environment, machines)
                if options.dry_run and options.run_dir is None and not options.resume:
                    return _show_alone(options, prepared.plan, console)
                run_place = _find_run_dir(options, prepared.plan)
        except StoppedEarlyError:
            console.line("stopped before the first step: nothing was trained")
            return RunOutcome(stop_code(stop, options.run_dir), None)
        session = _Session(console, stop, environment, machines)
        try:
            outcome = _train_in(options, prepared, run_place, session)
        except ShardwiseError as error:
            console.record(f"shardwise: {error}")
            raise
        finally:
            console.record_in(None)
        ending = "" if outcome.report is None else f": {outcome.report.ending} at step {outcome.report.step}"
        machines.end(outcome.exit_code, f"the run ended{ending}")
        return outcome


class _Session(NamedTuple):
    """Output, stop request, environment and machines of one command."""

    console: Console
    stop: StopRequest
    environment: Mapping[str, str]
    machines: Machines


def _train_in(
    options: TrainOptions, prepared: Prepared, place: tuple[Path, Plan | None], session: _Session
) -> RunOutcome:
    """Locks the run directory, writes the plan there or resumes the earlier one, and runs it."""
    plan, (run_dir, earlier), console = prepared.plan, place, session.console
    with locked(run_dir):
        if must_end_at_start(run_dir, session.environment):
            return _cancelled(run_dir, console)
        if earlier is None:
            plan = keep_model_code(keep_extension(plan, run_dir), run_dir)
            _write_run(run_dir, plan, prepared.resolved)
        else:
            finished = finished_report(run_dir, plan, earlier)
            if finished is not None:
                console.line(render_report(finished, run_dir=run_dir))
                return RunOutcome(ExitCode.DONE, finished, run_dir)
            refuse_spent(run_dir, plan)
            if not run_dirs.committed_checkpoints(run_dir):
                console.line(f"{run_dir} has no checkpoint yet: starting from the beginning")
            plan = plan_to_resume(plan, earlier, run_dir, console, may_choose=options.take == 1)
            plan = keep_extension(plan, run_dir)
            plan = keep_model_code(plan, run_dir)
        show_plan(plan, console)
        if options.dry_run:
            return _stop_before_launch(plan, run_dir, console)
        console.record_in(run_dir / run_dirs.CONSOLE_LOG)
        plan = with_stages(plan, prepared.scratch)
        return _run_and_report(plan, run_dir, session, cache=prepared.cache, resume=earlier is not None)


def show_plan(plan: Plan, console: Console) -> None:
    """Prints the first screen, with which a run begins."""
    show_lines(first_screen(plan, width=text_width(console)), console)
    console.line()


def _show_alone(options: TrainOptions, plan: Plan, console: Console) -> RunOutcome:
    """The plan of a run that leaves nothing behind, and what starts it."""
    check_disk(plan, run_dirs.output_base(plan.job.output, plan.name))
    show_plan(plan, console)
    console.line("nothing was started; the same command without --dry-run trains")
    return RunOutcome(ExitCode.DONE, None)


def _cancelled(run_dir: Path, console: Console) -> RunOutcome:
    console.line(f"{run_dir} was cancelled, and this job with it; to continue the run: --resume")
    return RunOutcome(ExitCode.INTERRUPTED, None, run_dir)


def _find_run_dir(options: TrainOptions, plan: Plan) -> tuple[Path, Plan | None]:
    """The run directory, and, if it is resumed, the plan that it was started with."""
    base = run_dirs.output_base(plan.job.output, plan.name)
    if not options.resume:
        check_disk(plan, options.run_dir or base)
        if options.run_dir is not None:
            return run_dirs.use_run_dir(options.run_dir), None
        return run_dirs.make_run_dir(base, now=datetime.now(UTC)), None
    run_dir = options.run_dir if options.run_dir is not None else run_dirs.find_run_dir(base)
    run_dirs.refuse_links(run_dir)
    if run_dirs.is_before_plan(run_dir):
        check_disk(plan, run_dir)
        return run_dir, None
    if not (run_dir / "plan.json").is_file():
        raise InputError(f"--resume: {run_dir} is not a run directory: it has no plan.json")
    earlier = codec.read(run_dir / "plan.json", Plan)
    refuse_other_run(run_dir, plan, earlier)
    return run_dir, earlier


def _write_run(run_dir: Path, plan: Plan, resolved: ResolvedJob | None) -> None:
    try:
        if resolved is not None and not run_dirs.is_submitted(run_dir):  # else it is the file that was read
            codec.write_bytes(run_dir / "job.yaml", render_resolved(resolved, has_url=False).encode())
        codec.write(run_dir / "hardware.json", plan.hardware)
        codec.write(run_dir / "plan.json", msgspec.structs.replace(plan, job=without_url(plan.job)))
    except OSError as error:
        raise EnvironmentFaultError(f"{run_dir}: cannot be written: {error.strerror}") from error


def _stop_before_launch(plan: Plan, run_dir: Path, console: Console) -> RunOutcome:
    may_resume = bool(run_dirs.committed_checkpoints(run_dir))
    attempt_dir = prepare_attempt(plan, plan.chosen, run_dir=run_dir, resume=may_resume)
    console.line(f"prepared, nothing started: {run_dir}")
    console.line("by hand:")
    console.line(
        f"  accelerate launch --config_file {attempt_dir}/accelerate.yaml -m shardwise.trainer {attempt_dir}/plan.json"
    )
    return RunOutcome(ExitCode.DONE, None)


def _run_and_report(plan: Plan, run_dir: Path, session: _Session, *, cache: Path, resume: bool) -> RunOutcome:
    """Gets the kernels that the ranks load, runs the attempts, prints the report and keeps its calibration."""
    console, stop, environment, machines = session
    fetch_flash_kernel(plan, on_progress=console.line, should_stop=lambda: stop.kind is not None)
    operators = build_needed(
        plan, cache_home=cache, on_progress=console.line, should_stop=lambda: stop.kind is not None
    )
    if stop.kind is not None:
        console.line(f"stopped before the first step: nothing was trained ({run_dir})")
        return RunOutcome(stop_code(stop, run_dir), None, run_dir)
    console.line(f"run directory: {run_dir}")
    if machines.was_restarted:
        refuse_endless_restarts(run_dir)
    left_s = machines.seconds_left()
    with machines.serving(run_dir, cache=cache, on_line=console.line) as cluster:
        outcome = run_attempts(
            plan,
            run_dir=run_dir,
            resume=resume,
            extensions_dir=operators,
            console=console,
            stop=stop,
            environment=environment,
            cluster=cluster,
            deadline=None if left_s is None else Deadline.in_seconds(left_s),
        )
    if outcome.report is not None:
        console.line()
        recommended = () if plan.is_trial else read_recorded(run_dir).recommended
        console.line(render_report(outcome.report, run_dir=run_dir, recommended=recommended))
        store_measurements(state_home(environment), outcome.report, plan, on_line=console.line)
    return outcome


def next_commands(run_dir: Path, job: str) -> list[str]:
    """Three commands that may follow a finished run."""
    return [
        f"shardwise report {run_dir}",
        f"shardwise export {run_dir} my-model",
        f"shardwise plan {job} --hardware 1xRTX-4090 --hardware 8xH100-SXM5-80GB",
    ]
