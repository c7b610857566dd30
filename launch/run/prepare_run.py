"""What `shardwise train` does before a run directory exists: reads, checks, prepares the data and plans.

Whatever is cheap comes first; whatever is wrong with the input shows here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from launch.inputs.model_files import kept_plan_with_new_rows, refuse_frozen_rows, with_new_rows
from launch.inputs.prepare_data import prepare_data
from launch.job import folders
from launch.job.layers import ResolvedJob
from launch.nodes.hardware import describe_difference
from launch.nodes.machines import Machines
from launch.plan.fp8_timing import fp8_gain_for
from launch.plan.gather import (
    make_request,
    plan_inputs,
    prepared_tokenizer,
    profile_data,
    read_inputs,
    with_weights,
)
from launch.plan.simulated import after_dry_run
from launch.probe.machine import read_hardware
from launch.probe.torch_fit import check_torch
from launch.run.trials import plan_after_trials
from launch.rundir import paths as run_dirs
from launch.terminal import Console
from launch.track.checks import check_sinks
from slurm.allocation import is_login_node, submit_line
from trainer.planning.explain.plan_page import explain_plan
from trainer.planning.planner import take_candidate
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.hardware import Hardware
from trainer.spec.model.shape import ModelShape
from trainer.spec.plan import Plan


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


def check_trial(options: TrainOptions) -> None:
    """InputError where --trial meets what leaves nothing to choose."""
    if options.trial is None:
        return
    if options.dry_run:
        raise InputError("--trial runs candidates, --dry-run runs nothing; leave out one of them")
    if options.resume:
        raise InputError("--trial chooses a plan, --resume goes on with one; leave out one of them")
    if options.job.suffix == ".json":
        raise InputError(f"--trial chooses a plan and {options.job} is one; give the job file")


def prepare(options: TrainOptions, console: Console, environment: Mapping[str, str], machines: Machines) -> Prepared:
    """The plan of a job file, or one that was kept, with its data prepared; InputError for whatever is wrong."""
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
    check_sinks(inputs.resolved.job, environment)
    inputs = inputs._replace(hardware=check_torch(inputs.hardware, environment))
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
    hardware = check_torch(_hardware_of_run(plan, here), environment)
    difference = None if plan.hardware.num_nodes == 1 else describe_difference(plan.hardware, here)
    if difference is not None:
        raise InputError(f"{options.job}: is a plan for other machines: {difference}; give the job file to plan anew")
    expanding = msgspec.structs.replace(plan.hardware, can_expand_segments=hardware.can_expand_segments)
    plan = msgspec.structs.replace(plan, hardware=expanding)
    check_sinks(plan.job, environment)
    cache = folders.cache_home(environment)
    plan = kept_plan_with_new_rows(plan, cache=cache, on_progress=console.line)
    return Prepared(_with_data(plan, console, cache), None, cache)


def _hardware_of_run(plan: Plan, here: Hardware) -> Hardware:
    """The machine with the cards that a kept plan names; those found here where it was made for cards of no machine."""
    if plan.hardware.source != "probe" or plan.hardware.num_nodes > 1:
        return here
    return msgspec.structs.replace(plan.hardware, gpus=plan.hardware.gpus[: plan.chosen.num_ranks])


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
