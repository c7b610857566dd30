"""Preparation of `shardwise train`, before a run directory exists: input, data, and the plan to start or to resume.

Cheap checks come first, and every fault of the input is reported here. A resumed run retains its plan, or uses a new
one that can load its last checkpoint.
"""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from shardwise.launch.attempt.retries import newest_facts, obstacle_to_resume
from shardwise.launch.inputs.model_files import refuse_frozen_rows, retained_plan_with_new_rows, with_new_rows
from shardwise.launch.inputs.prepare_data import prepare_data, refuse_other_stream
from shardwise.launch.job import cache_home
from shardwise.launch.job.layers import ResolvedJob
from shardwise.launch.nodes.machines import Machines, describe_difference
from shardwise.launch.options import TrainOptions
from shardwise.launch.plan.dry_run import after_dry_run
from shardwise.launch.plan.fp8 import fp8_gain_for
from shardwise.launch.plan.gather import (
    PlanInputs,
    make_request,
    plan_inputs,
    prepared_tokenizer,
    profile_data,
    read_inputs,
    refuse_untrainable,
    with_weights,
)
from shardwise.launch.probe.installed import require_libraries_of_training
from shardwise.launch.probe.machine import read_hardware
from shardwise.launch.probe.torch_fit import check_torch
from shardwise.launch.run.trials import plan_after_trials
from shardwise.launch.rundir import paths as run_dirs
from shardwise.launch.terminal import Console
from shardwise.launch.track.start import check_trackers
from shardwise.slurm.jobs import is_login_node, submit_line
from shardwise.trainer.planning.planner import Extent, take_candidate
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.job.fields import job_tree
from shardwise.trainer.spec.job.kinds import shown
from shardwise.trainer.spec.job.sections import Job, without_url
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, Report


class Prepared(NamedTuple):
    """A plan whose data is on this machine."""

    plan: Plan
    resolved: ResolvedJob | None  # None if a plan.json was given
    cache: Path

    @property
    def scratch(self) -> Path | None:
        """The folder on a node's own disk that a config.yaml names."""
        named = None if self.resolved is None else self.resolved.folders.get("scratch")
        return None if named is None else Path(named)


def check_trial(options: TrainOptions) -> None:
    """InputError for --trial together with an option that excludes a choice of the plan."""
    if options.trial is None:
        return
    if options.dry_run:
        raise InputError("--trial runs candidates, --dry-run runs nothing; remove one of them")
    if options.resume:
        raise InputError("--trial chooses a plan, --resume continues one; remove one of them")
    if options.job.suffix == ".json":
        raise InputError(f"--trial chooses a plan and {options.job} is one; give the job file")


def prepare(options: TrainOptions, console: Console, environment: Mapping[str, str], machines: Machines) -> Prepared:
    """The plan of a job file, or a given plan.json, with its data prepared; InputError for every fault of the input."""
    require_libraries_of_training()
    if options.job.suffix == ".json":
        return _prepare_retained_plan(options, console, environment, machines)
    _check_several(options, machines)
    inputs = read_inputs(
        options.job,
        options.overrides,
        gpus=options.gpus,
        vram_cap_bytes=options.vram_cap_bytes,
        hardware_spec=options.spec,
        machines=machines.read_hardware(),
        environment=environment,
    )
    _refuse_other_machine(options, inputs.hardware)
    if options.resume:
        if options.spec is None:
            inputs = inputs._replace(hardware=_as_submitted(inputs.hardware, options.run_dir, console))
        inputs = _with_earlier_defaults(inputs, options.run_dir)
    # A job that cannot fit is refused before any work.
    early = plan_inputs(inputs, profile_data(inputs), environment=environment, extent=Extent.SCREEN)
    _refuse_login_node(options, inputs.hardware)
    check_trackers(inputs.resolved.job, environment)
    inputs = inputs._replace(hardware=check_torch(inputs.hardware, environment))
    inputs = inputs._replace(fp8_gain=fp8_gain_for(early, cache=inputs.cache, console=console))
    inputs = with_weights(inputs)
    given, template = inputs.model, inputs.resolved.job.data.chat_template
    inputs = inputs._replace(model=with_new_rows(given, cache=inputs.cache, on_progress=console.line))
    data = prepare_data(inputs.request, on_progress=console.line)
    if options.trial is None:
        plan = plan_inputs(inputs, data, environment=environment)
    else:
        plan = plan_after_trials(inputs, data, options.trial, console=console, environment=environment)
    plan = take_candidate(after_dry_run(plan, console), options.take)
    refuse_frozen_rows(plan, given, template)  # the data, a trial or --take may have changed the method
    return Prepared(plan, inputs.resolved, inputs.cache)


def _refuse_other_machine(options: TrainOptions, hardware: Hardware) -> None:
    """InputError for --hardware that names anything but ranks on the CPU of this machine."""
    if options.spec is not None and not hardware.is_one_cpu_machine:
        planned = shlex.join(["shardwise", "plan", str(options.job), *options.overrides, "--hardware", options.spec])
        raise InputError(
            f"--hardware {options.spec} is another machine, and train runs on this one; it may be ranks on its CPU, as "
            f"2xCPU.\nTo plan for the other: {planned}"
        )


def _check_several(options: TrainOptions, machines: Machines) -> None:
    """InputError for what one machine alone can do."""
    if machines.num_nodes == 1:
        return
    if options.gpus is not None:
        raise InputError("--gpus names cards of one machine; on several, set CUDA_VISIBLE_DEVICES on each")
    if options.spec is not None:
        raise InputError(f"--hardware states ranks on one machine, this run has {machines.num_nodes}; remove it")
    if options.trial is not None:
        raise InputError(f"--trial runs on one machine, this run has {machines.num_nodes}; remove it")


def _as_submitted(found: Hardware, run_dir: Path | None, console: Console) -> Hardware:
    """The hardware found here, with the run's number of ranks on a CPU; reports differences from the plan."""
    if run_dir is None or not (run_dir / "hardware.json").is_file():
        return found
    planned = codec.read(run_dir / "hardware.json", Hardware)
    if not planned.gpus and not found.gpus:
        found = msgspec.structs.replace(found, num_cpu_devices=planned.num_cpu_devices)
    difference = describe_difference(planned, found) if run_dirs.is_submitted(run_dir) else None
    if difference is not None:
        console.line(f"the nodes are not as they were planned for: {difference}; planning for what was found")
    return found


def _with_earlier_defaults(inputs: PlanInputs, run_dir: Path | None) -> PlanInputs:
    """The inputs with the batch and length that the resumed run has, where the job leaves them open.

    On another number of ranks the defaults could be others.
    """
    resolved = inputs.resolved
    folder = run_dir or run_dirs.find_run_dir(run_dirs.output_base(resolved.job.output, resolved.name))
    if not (folder / "plan.json").is_file():
        return inputs
    earlier = codec.read(folder / "plan.json", Plan)
    return inputs._replace(resolved=replace(resolved, job=with_earlier_length(resolved.job, earlier)))


def with_earlier_length(job: Job, earlier: Plan) -> Job:
    """The job with the batch and the length of an earlier plan, where it states none."""
    train, before = job.train, earlier.job.train
    if train.tokens_per_step is None:
        train = replace(train, tokens_per_step=earlier.schedule.tokens_per_step)
    if train.epochs is None and train.tokens is None and train.steps is None:
        is_open = before.epochs is None and before.tokens is None
        steps = earlier.schedule.num_steps if is_open else None
        train = replace(train, epochs=before.epochs, tokens=before.tokens, steps=steps)
    return replace(job, train=train)


def _prepare_retained_plan(
    options: TrainOptions, console: Console, environment: Mapping[str, str], machines: Machines
) -> Prepared:
    if options.spec is not None:
        raise InputError(f"{options.job}: is a plan for its own machine; remove --hardware, or give the job file")
    if options.overrides:
        raise InputError(
            f"{options.job}: a plan cannot be overridden; give the job file to change {options.overrides[0]}"
        )
    plan = take_candidate(codec.read(options.job, Plan), options.take)
    refuse_untrainable(plan.model_shape, str(options.job))
    _check_several(options, machines)
    here = machines.read_hardware() or read_hardware()
    _refuse_login_node(options, here)
    hardware = check_torch(_hardware_of_run(plan, here), environment)
    difference = None if plan.hardware.num_nodes == 1 else describe_difference(plan.hardware, here)
    if difference is not None:
        raise InputError(f"{options.job}: is a plan for other machines: {difference}; give the job file to plan anew")
    expanding = msgspec.structs.replace(plan.hardware, can_expand_segments=hardware.can_expand_segments)
    plan = msgspec.structs.replace(plan, hardware=expanding)
    check_trackers(plan.job, environment)
    cache = cache_home(environment)
    plan = retained_plan_with_new_rows(plan, cache=cache, on_progress=console.line)
    return Prepared(_with_data(plan, console, cache), None, cache)


def _hardware_of_run(plan: Plan, here: Hardware) -> Hardware:
    """The machine with the cards that a given plan names; those found here if it names none."""
    if plan.hardware.source != "probe" or plan.hardware.num_nodes > 1:
        return here
    return msgspec.structs.replace(plan.hardware, gpus=plan.hardware.gpus[: plan.chosen.num_ranks])


def _with_data(plan: Plan, console: Console, cache: Path) -> Plan:
    """A given plan with its data on this machine; its schedule and its candidates are unchanged."""
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
        "to train here nevertheless, add --here"
    )


def refuse_other_run(run_dir: Path, plan: Plan, earlier: Plan) -> None:
    """InputError where the run trained another model, on other data, or with another seed or batch."""
    refuse_other_stream(run_dir, plan.data, earlier.data)
    changed = [
        f"--resume: {run_dir} was trained with another {what}: {then}, this job has {now}; "
        "undo the change, or start a new run without --resume"
        for what, then, now in (
            ("model", _model_name(earlier), _model_name(plan)),
            ("dataset", earlier.data.fingerprint, plan.data.fingerprint),
            ("train.seed", earlier.job.train.seed, plan.job.train.seed),
            ("train.tokens_per_step", earlier.schedule.tokens_per_step, plan.schedule.tokens_per_step),
        )
        if then != now
    ]
    if not changed and earlier.model_config != plan.model_config:
        keys = sorted(
            key
            for key in earlier.model_config.keys() | plan.model_config.keys()
            if earlier.model_config.get(key) != plan.model_config.get(key)
        )
        then, now = shown(earlier.model_config.get(keys[0])), shown(plan.model_config.get(keys[0]))
        changed = [
            f"--resume: {run_dir} was trained with another model: {keys[0]} was {then}, this job has {now}; start it "
            "without --resume"
        ]
    if changed:
        raise InputError("\n".join(changed))


def _model_name(plan: Plan) -> str:
    return plan.job.model.name or plan.job.model.config or "unnamed"


def finished_report(run_dir: Path, plan: Plan, earlier: Plan) -> Report | None:
    """The report of a run that has nothing left to do."""
    path = run_dir / "report.json"
    if not path.is_file():
        return None
    report = codec.read(path, Report)
    is_done = report.ending is Ending.FINISHED and report.step >= plan.schedule.num_steps
    return report if is_done and earlier.schedule == plan.schedule else None


def plan_to_resume(plan: Plan, earlier: Plan, run_dir: Path, console: Console, *, may_choose: bool) -> Plan:
    """The earlier plan while job and hardware are unchanged; otherwise the new one, and what changed.

    If the chosen candidate of the new plan cannot load the run's last checkpoint, the best one that can is chosen;
    InputError if there is none, or none may be chosen.
    """
    changes = describe_changes(plan, earlier)
    if not changes:
        can_expand = plan.hardware.can_expand_segments  # as tried just now: an update of the driver may change it
        return replace(
            earlier,
            hardware=replace(earlier.hardware, can_expand_segments=can_expand),
            job=replace(earlier.job, log=replace(earlier.job.log, notify=plan.job.log.notify)),  # a URL is not stored
            data=replace(earlier.data, cache_dir=plan.data.cache_dir),  # another cache, or the run was moved
            model_path=plan.model_path,
            tokenizer_path=plan.tokenizer_path,
        )
    console.line("resuming with a new plan, because " + "; ".join(changes))
    saved = newest_facts(run_dir)
    if saved is not None and saved.step > plan.schedule.num_steps:
        raise InputError(
            f"--resume: {run_dir} is saved at step {saved.step}, this job has {plan.schedule.num_steps} steps: use "
            f"train.steps={saved.step} or more, or export the checkpoint: shardwise export {run_dir} my-model"
        )
    obstacles = [obstacle_to_resume(saved, candidate) for candidate in plan.candidates]
    if obstacles[0] is None:
        return plan
    name = plan.chosen.strategy.name
    if may_choose and None in obstacles:
        number = obstacles.index(None) + 1
        console.line(f"{name} {obstacles[0]}; continuing with candidate {number}")
        return take_candidate(plan, number)
    of_all = "" if not may_choose else f", nor can another of the {len(plan.candidates)} candidates"
    raise InputError(
        f"--resume: {run_dir}: {name} {obstacles[0]}{of_all};\n"
        "undo the change, pin what was saved, or export the run and start from that model without --resume"
    )


def describe_changes(plan: Plan, earlier: Plan) -> list[str]:
    """Differences between the jobs and machines of two plans; free memory does not count."""
    now, then = without_url(plan.job), without_url(earlier.job)
    if now != then:
        now, then = with_earlier_length(now, earlier), with_earlier_length(then, earlier)
    before, after = (dict(_settings(job_tree(job))) for job in (then, now))
    changes = [
        f"{path} was {before.get(path, 'not set')}, is {after.get(path, 'not set')}"
        if path.startswith("train.")
        else f"{path} changed in the job"
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path)
    ]
    if _extension_key(plan) != _extension_key(earlier):
        changes.append("the extensions file changed")
    if _code_key(plan) != _code_key(earlier):
        changes.append("the model's code changed")
    there, here = _machine_key(earlier.hardware), _machine_key(plan.hardware)
    return changes + [f"{name} was {there[name]}, is {here[name]}" for name in here if there[name] != here[name]]


def _settings(tree: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, object]]:
    """Every setting of a job and its value, by path."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{section}{name}.")
        else:
            yield f"{section}{name}", value


def _extension_key(plan: Plan) -> str | None:
    return None if plan.extension is None else plan.extension.sha256


def _code_key(plan: Plan) -> dict[str, str] | None:
    return None if plan.model_code is None else plan.model_code.files


def _machine_key(hardware: Hardware) -> dict[str, object]:
    return {
        "number of nodes": hardware.num_nodes,
        "GPUs": ", ".join(gpu.name for gpu in hardware.gpus) or "none",
        "number of CPU devices": hardware.num_cpu_devices,
        "memory cap": hardware.vram_cap_bytes,
        "RAM": hardware.host.ram_bytes,
        "cores": hardware.host.num_cores,
    }
