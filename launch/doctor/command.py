"""`shardwise doctor [JOB]`: the command, the table of its checks, and the check of the job.

The command looks for everything that would make training fail or slow here, and names the remedy. It changes nothing
and trains nothing. Exit code 4 if there is a fault, 0 if there are warnings at most; a job file that is wrong in itself
is exit code 2, as everywhere. docs/doctor.md has a row for each check.
"""

import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwise.launch.doctor.finding import (
    Diagnosis,
    Finding,
    Machine,
    Place,
    diagnosis_of,
    fault,
    fault_of,
    fine,
    place_of,
    read_machine,
    render_diagnosis,
    warning,
)
from shardwise.launch.doctor.network import (
    check_hostname,
    check_hub,
    check_interfaces,
    check_proxies,
    check_slurm,
    check_wandb,
)
from shardwise.launch.doctor.python import check_libraries, check_python, check_shadows, check_variables
from shardwise.launch.doctor.system import (
    check_folders,
    check_home,
    check_hub_cache,
    check_locked_memory,
    check_memory,
    check_mounts,
    check_open_files,
    check_other_limits,
    check_processes,
    check_room,
    check_shared_memory,
    check_speed,
    check_wsl,
    read_memory,
)
from shardwise.launch.doctor.torch import (
    check_build_locks,
    check_collective,
    check_compiled,
    check_compiler,
    check_driver,
    check_libaio,
    check_memory_held,
    check_ninja,
    check_toolkit,
    check_torch,
)
from shardwise.launch.engine.operators import check_toolchain, needed_operators
from shardwise.launch.job import folders
from shardwise.launch.job.layers import ResolvedJob, read_job_layers, read_personal_folders
from shardwise.launch.options import DoctorOptions
from shardwise.launch.plan.asked_nodes import AskedNodes
from shardwise.launch.plan.disk_check import check_disk, needed_disk_bytes
from shardwise.launch.plan.gather import PlanInputs, plan_inputs, profile_data, read_inputs
from shardwise.launch.probe.program import Beside
from shardwise.launch.run.fetch_needs import check_room_of, data_need, data_sources, model_need
from shardwise.launch.rundir.paths import output_base
from shardwise.launch.terminal import Console
from shardwise.launch.track.start import check_trackers
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import ExitCode, ShardwiseError
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.secrets import redact
from shardwise.trainer.spec.strategy import Offload
from shardwise.trainer.spec.units import format_bytes
from shardwise.trainer.spec.value import Value


class RequestedJob(NamedTuple):
    """The job of the command line."""

    path: Path
    overrides: Sequence[str] = ()


def run_doctor(options: DoctorOptions, console: Console, *, environment: Mapping[str, str] = os.environ) -> ExitCode:
    """Looks and tells; InputProblemsError for a job file or a config.yaml that cannot be read."""
    started = time.monotonic()
    resolved = None if options.job is None else _read_job(options, environment)
    named = _personal_folders(environment) if resolved is None else resolved.folders
    output = (
        None if resolved is None else output_base(resolved.job.output, resolved.name).expanduser().absolute().parent
    )
    place = place_of(environment, named=named, output=output, is_quick=options.quick)
    asked = None if options.job is None else RequestedJob(options.job, tuple(options.overrides))
    diagnosis = diagnose(place, asked)
    if options.as_json:
        console.line(codec.encode(diagnosis).decode().rstrip())
    else:
        console.line(render_diagnosis(diagnosis, seconds=time.monotonic() - started))
    return diagnosis.exit_code


def diagnose(place: Place, asked: RequestedJob | None = None) -> Diagnosis:
    """Everything that is found, without a secret of the environment."""
    found = diagnosis_of(run_checks(read_machine(place), checks_for(asked)))
    return replace(found, findings=tuple(
        replace(finding, sentence=redact(finding.sentence, place.environment),
                fix=finding.fix and redact(finding.fix, place.environment))
        for finding in found.findings
    ))  # fmt: skip


def _personal_folders(environment: Mapping[str, str]) -> Mapping[str, str]:
    return read_personal_folders(
        config_home=folders.config_home(environment), site_config=folders.site_config(environment)
    )


def _read_job(options: DoctorOptions, environment: Mapping[str, str]) -> ResolvedJob:
    return read_job_layers(
        options.job,
        options.overrides,
        config_home=folders.config_home(environment),
        site_config=folders.site_config(environment),
    )


DEADLINE_S = 32.0  # of all checks together, after torch has answered


class Check(Value, frozen=True, kw_only=True):
    """A row: `--quick` leaves out what is slow."""

    name: str
    find: Callable[[Machine], Iterable[Finding]]
    is_slow: bool = False


CHECKS = (
    Check(name="driver", find=check_driver),
    Check(name="torch", find=check_torch),
    Check(name="compiled-libraries", find=check_compiled, is_slow=True),
    Check(name="gpu-memory", find=check_memory_held),
    Check(name="collective", find=check_collective, is_slow=True),
    Check(name="python", find=check_python),
    Check(name="libraries", find=check_libraries),
    Check(name="shadowed-modules", find=check_shadows),
    Check(name="variables", find=check_variables),
    Check(name="compiler", find=check_compiler),
    Check(name="libaio", find=check_libaio),
    Check(name="ninja", find=check_ninja),
    Check(name="cuda-toolkit", find=check_toolkit),
    Check(name="build-locks", find=check_build_locks),
    Check(name="memory", find=check_memory),
    Check(name="shared-memory", find=check_shared_memory),
    Check(name="open-files", find=check_open_files),
    Check(name="processes", find=check_processes),
    Check(name="locked-memory", find=check_locked_memory),
    Check(name="other-limits", find=check_other_limits),
    Check(name="wsl", find=check_wsl),
    Check(name="folders", find=check_folders),
    Check(name="home", find=check_home),
    Check(name="room", find=check_room),
    Check(name="mounts", find=check_mounts),
    Check(name="disk-speed", find=check_speed, is_slow=True),
    Check(name="hub-cache", find=check_hub_cache),
    Check(name="hostname", find=check_hostname),
    Check(name="interfaces", find=check_interfaces),
    Check(name="proxies", find=check_proxies, is_slow=True),
    Check(name="hub", find=check_hub, is_slow=True),
    Check(name="wandb", find=check_wandb, is_slow=True),
    Check(name="slurm", find=check_slurm),
)
JOB_CHECK = "job"  # made for the job of the command line


def checks_for(asked: RequestedJob | None) -> tuple[Check, ...]:
    """Every check, and the job's where there is one."""
    return CHECKS if asked is None else (*CHECKS, Check(name=JOB_CHECK, find=partial(check_job, asked)))


def run_checks(
    machine: Machine, checks: tuple[Check, ...] = CHECKS, *, deadline_s: float = DEADLINE_S
) -> Iterator[Finding]:
    """Findings of the checks in the order of the table; a check that does not end in time is a finding itself."""
    wanted = [check for check in checks if not (check.is_slow and machine.place.is_quick)]
    until_s = time.monotonic() + deadline_s
    running = [(check, Beside(partial(_findings, check, machine))) for check in wanted]
    for check, beside in running:
        yield from beside.wait(until_s) or (_without_end(check, deadline_s) if beside.is_running else ())


def _findings(check: Check, machine: Machine) -> tuple[Finding, ...]:
    return tuple(replace(finding, check=check.name) for finding in check.find(machine))


def _without_end(check: Check, deadline_s: float) -> tuple[Finding, ...]:
    sentence = (
        f"this check did not come to an end within {deadline_s:g} s: a disk, a server or a driver does not answer"
    )
    return (replace(warning(sentence, "df -h, mount and nvidia-smi show which hangs"), check=check.name),)


NUM_FILES = 1000  # of the data, that are opened


def check_job(asked: RequestedJob, machine: Machine) -> Iterator[Finding]:
    """Findings that keep the job from running on this machine."""
    try:
        inputs = read_inputs(
            asked.path, asked.overrides, nodes=AskedNodes(), describes_models=True, environment=machine.environment
        )
    except ShardwiseError as error:
        yield fault_of(str(error), otherwise=f"shardwise plan {asked.path} says more")
        return
    yield from _unreadable(inputs)
    yield from _asked(lambda: check_trackers(inputs.resolved.job, machine.environment), asked)
    yield from _to_fetch(inputs, asked)
    try:
        plan = plan_inputs(inputs, profile_data(inputs), environment=machine.environment)
    except ShardwiseError as error:
        yield fault_of(str(error), otherwise=f"shardwise plan {asked.path} says more")
        return
    chosen = plan.chosen
    yield fine(f"{asked.path}: {chosen.strategy.name}, micro batch {chosen.micro_batch}, on {chosen.num_ranks} "
               f"rank{'s' if chosen.num_ranks > 1 else ''}")  # fmt: skip
    yield from _of_plan(plan, asked, machine)


def _of_plan(plan: Plan, asked: RequestedJob, machine: Machine) -> Iterator[Finding]:
    output = machine.place.output
    if plan.hardware.source == "probe":
        problems = list(_asked(lambda: check_disk(plan, output), asked))
        yield from problems
        if not problems:
            yield fine(
                f"{output} has room for checkpoints and the exported model ({format_bytes(needed_disk_bytes(plan))})"
            )
        operators = needed_operators(plan.chosen)
        if operators:
            yield from _asked(lambda: check_toolchain(operators, device_kind=plan.device_kind), asked)
    if plan.chosen.strategy.offload is not Offload.NONE and not read_memory(machine.place).swap_bytes:
        yield warning(
            f"the plan offloads ({plan.chosen.strategy.offload}), and there is no swap: RAM that runs out ends the run",
            "sudo fallocate -l 32G /swapfile; sudo chmod 600 /swapfile; sudo mkswap /swapfile; sudo swapon /swapfile",
        )


def _asked(check: Callable[[], None], asked: RequestedJob) -> Iterator[Finding]:
    try:
        check()
    except ShardwiseError as error:
        yield fault_of(str(error), otherwise=f"shardwise train {asked.path} --dry-run says more")


def _unreadable(inputs: PlanInputs) -> Iterator[Finding]:
    files = [file for file in (*inputs.request.files, *inputs.request.eval_files) if not file.is_remote]
    for file in files[:NUM_FILES]:
        try:
            with Path(file.path).open("rb") as stream:
                stream.read(1)
        except OSError as error:
            yield fault(
                f"data: {file.path} cannot be read: {error.strerror}", f"sudo chmod a+r {shlex.quote(str(file.path))}"
            )
            return
    if files:
        yield fine(f"the data's {len(files)} file{'s' if len(files) > 1 else ''} can be read")


def _to_fetch(inputs: PlanInputs, asked: RequestedJob) -> Iterator[Finding]:
    """Weights and data that are not here: the hub has them, and there is room."""
    job, hub_home = inputs.resolved.job, inputs.hub_home
    try:
        model = model_need(job, inputs.model, hub_home)
        needs = [*([] if model is None else [model]), *(data_need(source, hub_home) for source in data_sources(job))]
        check_room_of(needs)
    except ShardwiseError as error:
        yield fault_of(str(error), otherwise=f"fetch it where there is a network: shardwise fetch {asked.path}")
        return
    yield from (fine(need.words) for need in needs)
