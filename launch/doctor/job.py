"""`doctor JOB`: what this job needs, asked with the functions that `plan`, `fetch` and `train` ask; nothing is started.

The job is read, its model and data are looked for here and, where they are not here, on the hub; it is planned; and the
disks, the operators and the login that the plan needs are looked at.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from launch.doctor.finding import Finding, fault, fault_of, fine, warning
from launch.doctor.limits import read_memory
from launch.doctor.machine import Machine
from launch.engine.operators import check_toolchain, needed_operators
from launch.plan.asked_nodes import AskedNodes
from launch.plan.disk_check import check_disk, needed_disk_bytes
from launch.plan.gather import PlanInputs, plan_inputs, profile_data, read_inputs
from launch.run.fetch_needs import check_room_of, data_need, data_sources, model_need
from launch.track.start import check_trackers
from trainer.spec.errors import ShardwiseError
from trainer.spec.plan import Plan
from trainer.spec.strategy import Offload
from trainer.spec.units import format_bytes

NUM_FILES = 1000  # of the data, that are opened


class JobAsked(NamedTuple):
    """The job of the command line."""

    path: Path
    overrides: Sequence[str] = ()


def check_job(asked: JobAsked, machine: Machine) -> Iterator[Finding]:
    """What stands between this machine and the job."""
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


def _of_plan(plan: Plan, asked: JobAsked, machine: Machine) -> Iterator[Finding]:
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


def _asked(check: Callable[[], None], asked: JobAsked) -> Iterator[Finding]:
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


def _to_fetch(inputs: PlanInputs, asked: JobAsked) -> Iterator[Finding]:
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
