"""`shardwise plan --simulate`: the exact dry run of what a plan would take, and what is taken where it does not fit.

The dry run is of the chosen candidate; where its bytes do not fit the device, the plan's fallbacks and its other
candidates follow, until one fits. For an architecture that no reader knows, the shape comes from the model itself,
built without tensors in a process of its own, and the memory of the plan is the dry run's.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from shardwise.launch.plan.dry_run import describe_simulation, simulate, simulation_request
from shardwise.launch.terminal import Console
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.simulated import (
    Simulated,
    longest_row,
    obstacle_to_dry_run,
    plan_of_simulated,
    simulated_memory,
)
from shardwise.trainer.spec.errors import InputError, NothingFitsError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.units import format_bytes

Answer = tuple[str, Plan | NothingFitsError]
MAX_DRY_RUNS = 6


def after_dry_run(plan: Plan, console: Console) -> Plan:
    """The plan of an architecture that no closed form knows, by its dry run; as it is where nothing has one."""
    if not plan.model_shape.is_described:
        return plan
    try:
        simulated, _ = simulated_plan(plan, console)
    except InputError as error:
        console.line(f"memory is an estimate for a model of these sizes: {error}")
        return plan
    return simulated


def simulated_plan(plan: Plan, console: Console) -> tuple[Plan, list[str]]:
    """The plan that takes the first candidate whose dry run fits, and what the dry run says beside the closed form.

    NothingFitsError where none does, InputError where no candidate of an unknown architecture has a dry run.
    """
    shape, is_cpu = plan.model_shape, plan.device_kind is DeviceKind.CPU
    obstacle = obstacle_to_dry_run(plan.chosen, shape, is_cpu=is_cpu)
    if obstacle is not None and not shape.is_described:
        return plan, [f"no dry run: {obstacle}; the figures are the closed form's"]
    context = context_of(plan)
    failed: list[Simulated] = []
    for candidate in _with_dry_run(plan, is_cpu=is_cpu):
        console.line(f"dry run of {candidate.strategy.name}, micro batch {candidate.micro_batch} ...")
        request = replace(simulation_request(plan, candidate), seq_len=longest_row(plan, candidate))
        simulation = simulate(request)
        simulated = Simulated(candidate=candidate, memory=simulated_memory(context, candidate, simulation))
        if simulated.memory.fits:
            lines = [_head(simulated), *(f"not taken: {each.words}" for each in failed)]
            is_expandable = plan.hardware.can_expand_segments
            lines += describe_simulation(simulation, candidate.memory, is_expandable=is_expandable)
            return plan_of_simulated(plan, simulated, failed), lines
        failed.append(simulated)
        if len(failed) == MAX_DRY_RUNS:
            break
    if not failed:
        raise InputError(f"no closed form knows {shape.model_type}, and {obstacle}; {_PINS}")
    raise NothingFitsError(_nothing_fits(failed))


def simulated_answers(answers: Sequence[Answer], console: Console) -> tuple[list[Answer], dict[str, list[str]]]:
    """Every machine's plan after its dry run, and what was found, by the name of the machine.

    NothingFitsError where only one machine is asked about; of several the others are told all the same.
    """
    decided: list[Answer] = []
    lines: dict[str, list[str]] = {}
    for name, answer in answers:
        try:
            plan = answer
            if isinstance(plan, Plan):
                plan, lines[name] = simulated_plan(plan, console)
            decided.append((name, plan))
        except NothingFitsError as error:
            if len(answers) == 1:
                raise
            decided.append((name, error))
    return decided, lines


_PINS = "pin.sharding: none, ddp or fsdp has one, on GPUs"


def _with_dry_run(plan: Plan, *, is_cpu: bool) -> Iterator[Candidate]:
    """The chosen candidate, its fallbacks after an out of memory, and the other candidates."""
    seen: list[Candidate] = []
    for candidate in (plan.chosen, *plan.fallbacks, *plan.candidates[1:]):
        if candidate not in seen and obstacle_to_dry_run(candidate, plan.model_shape, is_cpu=is_cpu) is None:
            seen.append(candidate)
            yield candidate


def _head(simulated: Simulated) -> str:
    return f"dry run: {simulated.words}; {format_bytes(simulated.memory.usable_bytes)} are usable"


def _nothing_fits(failed: list[Simulated]) -> str:
    nearest = min(failed, key=lambda each: each.memory.need_bytes)
    times = f"{len(failed)} dry runs" if len(failed) > 1 else "its dry run"
    return (
        f"nothing fits by {times}: {nearest.words}; {format_bytes(nearest.memory.usable_bytes)} are usable\n"
        "smallest change that would fit: shorter sequences (train.seq_len), or a device with "
        f"{format_bytes(nearest.memory.need_bytes)} usable"
    )
