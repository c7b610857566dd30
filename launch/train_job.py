"""`shardwise train`: from a job file, or a plan, to a trained model and its report.

Order: read and check everything that is cheap, prepare the data, plan, make the run directory, build operators, run
the attempts, report. Whatever is wrong with the input shows before the run directory exists.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from launch import folders
from launch import run_dir as run_dirs
from launch.attempt_files import prepare_attempt
from launch.attempts import RunOutcome, run_attempts, stop_code
from launch.calibration_store import append_calibration, record_of_run
from launch.cluster import Machines, machines_of, membership, serve
from launch.cluster_hardware import describe_difference
from launch.console import Console
from launch.deadline import Deadline
from launch.disk_check import check_disk
from launch.extension_file import keep_extension
from launch.flash_kernel import fetch_flash_kernel
from launch.job_layers import ResolvedJob, render_resolved
from launch.measure_fp8 import fp8_gain_for
from launch.model_code import keep_model_code
from launch.operators import build_needed
from launch.plan_job import (
    make_request,
    plan_inputs,
    prepared_tokenizer,
    profile_data,
    read_inputs,
    with_weights,
)
from launch.plan_simulate import after_dry_run
from launch.prepare_data import prepare_data
from launch.probe import read_hardware
from launch.report_text import render_report
from launch.resume_run import finished_report, plan_to_resume, refuse_other_run
from launch.run_history import refuse_endless_restarts
from launch.run_mark import must_end_at_start
from launch.staging import with_stages
from launch.supervisor import StoppedEarlyError, StopRequest
from launch.torch_fit import check_torch
from launch.trials import plan_after_trials
from launch.vocabulary import kept_plan_with_new_rows, refuse_frozen_rows, with_new_rows
from slurm.allocation import is_login_node, submit_line
from trainer.planning.explain import explain_plan
from trainer.planning.planner import take_candidate
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError, InputProblemsError
from trainer.spec.hardware import Hardware
from trainer.spec.job_file import later_problems
from trainer.spec.model_shape import ModelShape
from trainer.spec.plan import Plan
from trainer.spec.report import Ending, Report


class TrainOptions(NamedTuple):
    """The command line of `shardwise train`."""

    job: Path
    overrides: Sequence[str] = ()
    gpus: tuple[int, ...] | None = None
    vram_cap_bytes: int | None = None
    run_dir: Path | None = None
    resume: bool = False
    dry_run: bool = False
    take: int = 1
    trial: int | None = None  # real steps for so many candidates, then the fastest
    here: bool = False  # train on a Slurm login node all the same
    nodes: int | None = None  # machines that people start this command on; this one's number, and who is number 0
    node_rank: int | None = None
    head: str | None = None


class Prepared(NamedTuple):
    """A plan whose data is on this machine."""

    plan: Plan
    resolved: ResolvedJob | None  # None where a kept plan was given
    cache: Path

    @property
    def scratch(self) -> Path | None:
        """The folder on a node's own disk that a config.yaml names."""
        named = None if self.resolved is None else self.resolved.folders.get("scratch")
        return None if named is None else Path(named)


def train(options: TrainOptions, console: Console, *, environment: Mapping[str, str] = os.environ) -> RunOutcome:
    """Trains, and returns how it ended; a ShardwiseError means that nothing was started."""
    _check_trial(options)
    stop = StopRequest()
    place = membership(nodes=options.nodes, node_rank=options.node_rank, head=options.head, run_dir=options.run_dir)
    if options.run_dir is not None and must_end_at_start(options.run_dir, environment):
        return _cancelled(options.run_dir, console)
    if place is not None and place.node_rank > 0:
        with stop.listening():
            return RunOutcome(serve(place, stop, on_line=console.line), None)
    with stop.listening(), contextlib.ExitStack() as held:
        try:
            with stop.raising():
                machines = held.enter_context(machines_of(place, on_line=console.line, environment=environment))
                prepared = _prepare(options, console, environment, machines)
                run_place = _find_run_dir(options, prepared.plan)
        except StoppedEarlyError:
            console.line("stopped before the first step: nothing was trained")
            return RunOutcome(stop_code(stop, options.run_dir), None)
        outcome = _train(options, prepared, run_place, console, stop, environment, machines)
        ending = "" if outcome.report is None else f": {outcome.report.ending} at step {outcome.report.step}"
        machines.end(outcome.exit_code, f"the run ended{ending}")
        return outcome


def _train(
    options: TrainOptions,
    prepared: Prepared,
    place: tuple[Path, Plan | None],
    console: Console,
    stop: StopRequest,
    environment: Mapping[str, str],
    machines: Machines,
) -> RunOutcome:
    plan, (run_dir, earlier) = prepared.plan, place
    with run_dirs.locked(run_dir):
        if must_end_at_start(run_dir, environment):
            return _cancelled(run_dir, console)
        if earlier is None:
            plan = keep_model_code(keep_extension(plan, run_dir), run_dir)
            _write_run(run_dir, plan, prepared.resolved)
        else:
            finished = finished_report(run_dir, plan, earlier)
            if finished is not None:
                console.line(render_report(finished, run_dir=run_dir))
                return RunOutcome(ExitCode.DONE, finished, run_dir)
            if not run_dirs.committed_checkpoints(run_dir):
                console.line(f"{run_dir} was stopped before its first step: starting from the beginning")
            plan = plan_to_resume(plan, earlier, run_dir, console, may_choose=options.take == 1)
            plan = keep_extension(plan, run_dir)
            plan = keep_model_code(plan, run_dir)
        if options.dry_run:
            return _stop_before_launch(plan, run_dir, console, resume=earlier is not None)
        plan = with_stages(plan, prepared.scratch)
        return _run(
            plan, run_dir, console, stop, environment, machines, cache=prepared.cache, resume=earlier is not None
        )


def _cancelled(run_dir: Path, console: Console) -> RunOutcome:
    console.line(f"{run_dir} was cancelled, and this job with it; to go on with the run: --resume")
    return RunOutcome(ExitCode.INTERRUPTED, None, run_dir)


def _check_trial(options: TrainOptions) -> None:
    """InputError where --trial meets what leaves nothing to choose."""
    if options.trial is None:
        return
    if options.dry_run:
        raise InputError("--trial runs candidates, --dry-run runs nothing; leave out one of them")
    if options.resume:
        raise InputError("--trial chooses a plan, --resume goes on with one; leave out one of them")
    if options.job.suffix == ".json":
        raise InputError(f"--trial chooses a plan and {options.job} is one; give the job file")


def _prepare(options: TrainOptions, console: Console, environment: Mapping[str, str], machines: Machines) -> Prepared:
    if options.job.suffix == ".json":
        return _prepare_kept_plan(options, console, environment, machines)
    _check_several(options, machines)
    inputs = read_inputs(
        options.job,
        options.overrides,
        gpus=options.gpus,
        vram_cap_bytes=options.vram_cap_bytes,
        describes_models=True,
        machines=machines.read_hardware(),
        environment=environment,
    )
    if options.resume:
        inputs = inputs._replace(hardware=_as_submitted(inputs.hardware, options.run_dir, console))
    _refuse_untrainable(inputs.shape, inputs.model.config_origin)
    # Whatever cannot fit is refused before any work.
    early = plan_inputs(inputs, profile_data(inputs), environment=environment)
    _refuse_login_node(options, inputs.hardware)
    problems = later_problems(inputs.resolved.job)
    if problems:
        raise InputProblemsError(problems)
    check_torch(inputs.hardware)
    inputs = inputs._replace(fp8_gain=fp8_gain_for(early, cache=inputs.cache, console=console))
    inputs = with_weights(inputs)
    given, template = inputs.model, inputs.resolved.job.data.chat_template
    refuse_frozen_rows(early, given, template)
    inputs = inputs._replace(model=with_new_rows(given, cache=inputs.cache, on_progress=console.line))
    data = prepare_data(inputs.request, on_progress=console.line)
    if options.trial is None:
        plan = plan_inputs(inputs, data, environment=environment)
    else:
        plan = plan_after_trials(inputs, data, options.trial, console=console, environment=environment)
    plan = take_candidate(after_dry_run(plan, console), options.take)
    refuse_frozen_rows(plan, given, template)  # the data, a trial or --take may have changed the method
    console.line(explain_plan(plan))
    console.line()
    return Prepared(plan, inputs.resolved, inputs.cache)


def _refuse_untrainable(shape: ModelShape, origin: str) -> None:
    """InputError for a model whose loss is more than the cross entropy that is computed here."""
    if shape.loss_obstacle is not None:
        raise InputError(f"{origin}: {shape.model_type} cannot be trained: {shape.loss_obstacle}")


def _check_several(options: TrainOptions, machines: Machines) -> None:
    """InputError for what one machine alone can do."""
    if machines.num_nodes == 1:
        return
    if options.gpus is not None:
        raise InputError("--gpus names cards of one machine; on several, set CUDA_VISIBLE_DEVICES on each")
    if options.trial is not None:
        raise InputError(f"--trial runs on one machine, this run has {machines.num_nodes}; leave it out")


def _as_submitted(found: Hardware, run_dir: Path | None, console: Console) -> Hardware:
    """The hardware that was found, with as many ranks on its CPU as the run had; tells what was planned otherwise."""
    if run_dir is None or not (run_dir / "hardware.json").is_file():
        return found
    planned = codec.read(run_dir / "hardware.json", Hardware)
    if not planned.gpus and not found.gpus:
        found = msgspec.structs.replace(found, num_cpu_devices=planned.num_cpu_devices)
    difference = describe_difference(planned, found) if run_dirs.is_submitted(run_dir) else None
    if difference is not None:
        console.line(f"the nodes are not as they were planned for: {difference}; planning for what was found")
    return found


def _prepare_kept_plan(
    options: TrainOptions, console: Console, environment: Mapping[str, str], machines: Machines
) -> Prepared:
    if options.overrides:
        raise InputError(
            f"{options.job}: a plan cannot be overridden; give the job file to change {options.overrides[0]}"
        )
    plan = take_candidate(codec.read(options.job, Plan), options.take)
    _refuse_untrainable(plan.model_shape, str(options.job))
    _check_several(options, machines)
    here = machines.read_hardware() or read_hardware()
    _refuse_login_node(options, here)
    check_torch(here)
    difference = None if plan.hardware.num_nodes == 1 else describe_difference(plan.hardware, here)
    if difference is not None:
        raise InputError(f"{options.job}: is a plan for other machines: {difference}; give the job file to plan anew")
    problems = later_problems(plan.job)
    if problems:
        raise InputProblemsError(problems)
    cache = folders.cache_home(environment)
    plan = kept_plan_with_new_rows(plan, cache=cache, on_progress=console.line)
    return Prepared(_with_data(plan, console, cache), None, cache)


def _with_data(plan: Plan, console: Console, cache: Path) -> Plan:
    """A plan that was kept, with its data on this machine; its schedule and its candidates stay as they were."""
    request = make_request(
        plan.job,
        shape=plan.model_shape,
        tokenizer_path=plan.tokenizer_path,
        cache_root=cache,
    )
    data = prepare_data(request, on_progress=console.line)
    if plan.data.source == "prepared" and data.fingerprint != plan.data.fingerprint:
        raise InputError(
            f"data.train: the data changed since this plan was made: {plan.data.fingerprint} then, "
            f"{data.fingerprint} now; make a new plan"
        )
    return msgspec.structs.replace(plan, data=data, tokenizer_path=prepared_tokenizer(data) or plan.tokenizer_path)


def _refuse_login_node(options: TrainOptions, hardware: Hardware) -> None:
    if options.here or not is_login_node(hardware):
        return
    raise EnvironmentFaultError(
        "this is a Slurm login node: training belongs on a compute node. Submit it with:\n"
        f"  {submit_line(str(options.job), options.overrides)}\n"
        "to train here all the same, add --here"
    )


def _find_run_dir(options: TrainOptions, plan: Plan) -> tuple[Path, Plan | None]:
    """The run directory, and the plan it was started with where this is a resumption."""
    base = run_dirs.output_base(plan.job.output, plan.name)
    if not options.resume:
        check_disk(plan, options.run_dir or base)
        if options.run_dir is not None:
            return run_dirs.use_run_dir(options.run_dir), None
        return run_dirs.make_run_dir(base, now=datetime.now(UTC)), None
    run_dir = options.run_dir if options.run_dir is not None else run_dirs.find_run_dir(base)
    if run_dirs.is_submitted(run_dir):
        check_disk(plan, run_dir)
        return run_dir, None
    if not (run_dir / "plan.json").is_file():
        raise InputError(f"--resume: {run_dir} is not a run directory: it has no plan.json")
    earlier = codec.read(run_dir / "plan.json", Plan)
    refuse_other_run(run_dir, plan, earlier)
    if not run_dirs.committed_checkpoints(run_dir) and run_dirs.has_trained(run_dir):
        raise InputError(f"--resume: {run_dir} has no checkpoint to resume from; start it without --resume")
    return run_dir, earlier


def _write_run(run_dir: Path, plan: Plan, resolved: ResolvedJob | None) -> None:
    try:
        if resolved is not None and not run_dirs.is_submitted(run_dir):  # else it is the file that was read
            codec.write_bytes(run_dir / "job.yaml", render_resolved(resolved).encode())
        codec.write(run_dir / "hardware.json", plan.hardware)
        codec.write(run_dir / "plan.json", plan)
    except OSError as error:
        raise EnvironmentFaultError(f"{run_dir}: cannot be written: {error.strerror}") from error


def _stop_before_launch(plan: Plan, run_dir: Path, console: Console, *, resume: bool) -> RunOutcome:
    attempt_dir = prepare_attempt(plan, plan.chosen, run_dir=run_dir, resume=resume)
    console.line(f"prepared, nothing started: {run_dir}")
    console.line("by hand:")
    console.line(f"  accelerate launch --config_file {attempt_dir}/accelerate.yaml -m trainer {attempt_dir}/plan.json")
    return RunOutcome(ExitCode.DONE, None)


def _run(
    plan: Plan,
    run_dir: Path,
    console: Console,
    stop: StopRequest,
    environment: Mapping[str, str],
    machines: Machines,
    *,
    cache: Path,
    resume: bool,
) -> RunOutcome:
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
        console.line(render_report(outcome.report, run_dir=run_dir))
        _keep_calibration(plan, outcome.report, environment)
    return outcome


def _keep_calibration(plan: Plan, report: Report, environment: Mapping[str, str]) -> None:
    if report.ending is not Ending.FINISHED:
        return
    record = record_of_run(report, plan, now=datetime.now(UTC))
    if record is not None:
        append_calibration(folders.state_home(environment), record)


def next_commands(run_dir: Path, job: str) -> list[str]:
    """Three things worth trying after a finished run."""
    return [
        f"shardwise report {run_dir}",
        f"shardwise export {run_dir} my-model",
        f"shardwise plan {job} --hardware 1xRTX-4090 --hardware 8xH100-SXM5-80GB",
    ]
