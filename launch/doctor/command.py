"""`shardwise doctor [JOB]`: the command, the table of its checks, and the check of the job.

The command checks for everything that would make training fail or slow on this machine, and prints the remedy. It
changes nothing and trains nothing. Exit code 4 if there is a fault, 0 if there are warnings at most, 2 for an
invalid job file. docs/install.md has a row for each check.
"""

import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwise.launch.doctor import checks
from shardwise.launch.doctor.checks import Machine
from shardwise.launch.doctor.finding import (
    Diagnosis,
    Finding,
    Level,
    diagnosis_of,
    explained,
    fault,
    fine,
    render_diagnosis,
    warning,
)
from shardwise.launch.engine.operators import check_toolchain, needed_operators
from shardwise.launch.inputs.hub import hub_cache
from shardwise.launch.job import cache_home, config_home, site_config
from shardwise.launch.job.layers import read_job_layers, read_personal_folders
from shardwise.launch.options import DoctorOptions
from shardwise.launch.plan.gather import NodeOptions, PlanInputs, plan_inputs, profile_data, read_inputs
from shardwise.launch.probe.program import BackgroundCall
from shardwise.launch.run.disk_needs import (
    check_disk,
    check_room_of,
    data_need,
    data_sources,
    model_need,
    needed_disk_bytes,
)
from shardwise.launch.rundir.paths import output_base
from shardwise.launch.terminal import Console, terminal_columns
from shardwise.launch.track.start import check_trackers
from shardwise.trainer.planning.planner import Extent
from shardwise.trainer.spec.errors import ExitCode, ShardwiseError
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.secrets import redact
from shardwise.trainer.spec.units import format_bytes


class RequestedJob(NamedTuple):
    """The job of the command line."""

    path: Path
    overrides: Sequence[str]


def run_doctor(options: DoctorOptions, console: Console, *, environment: Mapping[str, str] = os.environ) -> ExitCode:
    """Prints the diagnosis; InputProblemsError for a job file or a config.yaml that cannot be read."""
    started, requested, output = time.monotonic(), None, Path.cwd()
    home, site = config_home(environment), site_config(environment)
    if options.job is None:
        named = read_personal_folders(config_home=home, site_config=site)
    else:
        resolved = read_job_layers(options.job, options.overrides, config_home=home, site_config=site)
        named, requested = resolved.folders, RequestedJob(options.job, tuple(options.overrides))
        output = output_base(resolved.job.output, resolved.name).expanduser().absolute().parent
    hub_home = named.get("huggingface")
    folders = {
        checks.OUTPUT: output,
        checks.CACHE: cache_home(environment, configured=named.get("cache")),
        checks.HUB_CACHE: hub_cache(Path(hub_home) if hub_home else None, environment),
    }
    machine = checks.read_machine(environment, folders, loads_torch=not options.quick)
    job_check = () if requested is None else (Check(JOB_CHECK, partial(check_job, requested)),)
    wanted = [check for check in (*CHECKS, *job_check) if not (check.is_slow and options.quick)]
    diagnosis = without_secrets(diagnosis_of(run_checks(machine, wanted)), environment)
    if options.as_json:
        console.json(diagnosis)
    else:
        width = terminal_columns(console)
        console.line(render_diagnosis(diagnosis, seconds=time.monotonic() - started, width=width))
    return diagnosis.exit_code


def without_secrets(diagnosis: Diagnosis, environment: Mapping[str, str]) -> Diagnosis:
    """The findings without a secret of the environment."""
    shown = partial(redact, environment=environment)
    return replace(
        diagnosis,
        findings=tuple(
            replace(each, sentence=shown(each.sentence), fix=each.fix and shown(each.fix))
            for each in diagnosis.findings
        ),
    )


DEADLINE_S = 32.0  # of all checks together, once torch has been checked


class Check(NamedTuple):
    """A row of the table; `--quick` skips the slow ones."""

    name: str
    find: Callable[[Machine], Iterable[Finding]]
    is_slow: bool = False


CHECKS = (
    Check("driver", checks.check_driver),
    Check("torch", checks.check_torch),
    Check("compiled-libraries", checks.check_compiled, is_slow=True),
    Check("collective", checks.check_collective, is_slow=True),
    Check("loopback", checks.check_loopback),
    Check("libraries", checks.check_libraries),
    Check("compiler", checks.check_compiler),
    Check("shared-memory", checks.check_shared_memory),
    Check("disk", checks.check_disk),
    Check("slurm", checks.check_slurm),
)
JOB_CHECK = "job"  # made for the job of the command line


def run_checks(
    machine: Machine, wanted: Sequence[Check] = CHECKS, *, deadline_s: float = DEADLINE_S
) -> Iterator[Finding]:
    """Findings of the checks in the order of the table; a check that does not end in time is a finding itself."""
    until_s = time.monotonic() + deadline_s
    running = [(check, BackgroundCall(partial(_all_of, check, machine))) for check in wanted]
    for check, call in running:
        found = call.wait(until_s)
        if found is None and call.is_running:
            found = (
                warning(
                    f"this check did not end within {deadline_s:g} s: a disk, a server or a driver does not respond",
                    "df -h, mount and nvidia-smi show which hangs",
                ),
            )
        yield from (replace(finding, check=check.name) for finding in found or ())


def _all_of(check: Check, machine: Machine) -> tuple[Finding, ...]:
    return tuple(check.find(machine))


NUM_FILES = 1000  # of the data files, that are opened


def check_job(requested: RequestedJob, machine: Machine) -> Iterator[Finding]:
    """Findings that prevent the job from running on this machine."""
    try:
        inputs = read_inputs(
            requested.path,
            requested.overrides,
            nodes=NodeOptions(),
            environment=machine.environment,
        )
        yield from _unreadable(inputs)
        yield from _checked(lambda: check_trackers(inputs.resolved.job, machine.environment), requested)
        yield from _to_fetch(inputs, requested)
        plan = plan_inputs(inputs, profile_data(inputs), environment=machine.environment, extent=Extent.SCREEN)
    except ShardwiseError as error:
        yield explained(Level.FAULT, str(error), otherwise=f"shardwise plan {requested.path} shows more")
        return
    chosen = plan.chosen
    yield fine(f"{requested.path}: {chosen.strategy.name}, micro batch {chosen.micro_batch}, on {chosen.num_ranks} "
               f"rank{'s' if chosen.num_ranks > 1 else ''}")  # fmt: skip
    yield from _of_plan(plan, requested, machine.folders[checks.OUTPUT])
    yield from checks.missing_for(plan)


def _of_plan(plan: Plan, requested: RequestedJob, output: Path) -> Iterator[Finding]:
    if plan.hardware.source != "probe":
        return
    problems = list(_checked(lambda: check_disk(plan, output), requested))
    yield from problems
    if not problems:
        yield fine(
            f"{output} has room for checkpoints and the exported model ({format_bytes(needed_disk_bytes(plan))})"
        )
    operators = needed_operators(plan.chosen)
    if operators:
        yield from _checked(lambda: check_toolchain(operators, device_kind=plan.device_kind), requested)


def _checked(check: Callable[[], None], requested: RequestedJob) -> Iterator[Finding]:
    try:
        check()
    except ShardwiseError as error:
        yield explained(Level.FAULT, str(error), otherwise=f"shardwise train {requested.path} --dry-run shows more")


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


def _to_fetch(inputs: PlanInputs, requested: RequestedJob) -> Iterator[Finding]:
    """Missing weights and data are on the hub, and there is room for them."""
    job, hub_home = inputs.resolved.job, inputs.hub_home
    try:
        model = model_need(job, inputs.model, hub_home)
        needs = [*([] if model is None else [model]), *(data_need(source, hub_home) for source in data_sources(job))]
        check_room_of(needs)
    except ShardwiseError as error:
        yield explained(
            Level.FAULT, str(error), otherwise=f"fetch it where there is a network: shardwise fetch {requested.path}"
        )
        return
    yield from (fine(need.summary) for need in needs)
