"""The exact dry run of a plan by a worker, its comparison with the closed form, and the resulting plan.

The dry run needs torch, and changes torch's own tables for a device that is not there. It allocates nothing on any
device. It is run for the chosen candidate; if its bytes do not fit the device, the plan's fallbacks and its other
candidates follow, until one fits. Of a model whose blocks could not be traced (`trace`), the memory of the plan is that
of the dry run.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from shardwise.launch.terminal import Console
from shardwise.launch.worker import ask
from shardwise.trainer.planning.memory import grouped
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.schedule import document_tokens
from shardwise.trainer.planning.simulated import (
    Simulated,
    compiled_memory,
    eager_candidate,
    longest_row,
    named_events,
    obstacle_to_dry_run,
    plan_of_simulated,
    simulated_memory,
)
from shardwise.trainer.spec.data.objectives import OBJECTIVES
from shardwise.trainer.spec.data.shapes import objective_of
from shardwise.trainer.spec.errors import InputError, NothingFitsError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.worker_requests import Simulation, SimulationRequest
from shardwise.trainer.spec.packages import kernel_packages
from shardwise.trainer.spec.plan import Candidate, MemoryEstimate, Plan
from shardwise.trainer.spec.report import relative_difference
from shardwise.trainer.spec.strategy import Attention, Quant
from shardwise.trainer.spec.units import format_bytes
from shardwise.trainer.spec.value import Value

V = TypeVar("V", bound=Value)
DEFAULT_TIMEOUT_S = 900.0
_NOTHING_COMPUTED = {"OMP_NUM_THREADS": "1"}
_NO_DEVICE = {"CUDA_VISIBLE_DEVICES": ""}  # none is touched
_WORKSPACE = "workspace"
_COLUMNS = "{:<24}{:>12}{:>12}{:>12}"


def simulate(
    request: SimulationRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S, python: str = sys.executable
) -> Simulation:
    """The result of the dry run; raises the ShardwiseError that its worker ended with."""
    return ask_simulation(None, request, Simulation, timeout_s=timeout_s, python=python)


def ask_simulation(
    flag: str | None,
    request: Value,
    result_type: type[V],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    sees_gpus: bool = False,
    python: str = sys.executable,
) -> V:
    """The result of a request to `trainer.simulation`; raises the ShardwiseError that its worker ended with."""
    return ask(
        "shardwise.trainer.simulation",
        request,
        result_type,
        subject="the dry run",
        flags=() if flag is None else (flag,),
        environment=_NOTHING_COMPUTED if sees_gpus else {**_NOTHING_COMPUTED, **_NO_DEVICE},
        timeout_s=timeout_s,
        python=python,
    )


def simulation_request(plan: Plan, candidate: Candidate | None = None) -> SimulationRequest:
    """The request of a candidate of a plan, by default of the chosen one.

    flash-attn has no dry run; torch's own flash kernel, which keeps the same tensors, stands in for it.
    """
    chosen = plan.chosen if candidate is None else candidate
    gpu = plan.hardware.gpus[0] if plan.hardware.gpus else None
    capability: dict[str, Any] = {}
    if gpu is not None and gpu.compute_capability is not None:
        capability["compute_capability"] = gpu.compute_capability
    return SimulationRequest(
        model_config=plan.model_config,
        model_code=plan.model_code,
        method=chosen.method,
        quant=plan.model_shape.quant or Quant.NF4_DQ,
        lora=plan.job.train.lora,
        sharding=chosen.strategy.sharding,
        num_ranks=chosen.num_ranks,
        ranks_per_node=plan.hardware.num_devices_per_node,
        shard_group=chosen.shard_group,
        reduce_every_micro_batch=chosen.reduce_every_micro_batch,
        bf16_reduction=chosen.bf16_reduction,
        embedding_on_host=chosen.embedding_on_host,
        prefetch_two_blocks=chosen.prefetch_two_blocks,
        fused_adapters=chosen.fused_adapters,
        precision=chosen.strategy.precision,
        optimizer=chosen.strategy.optimizer,
        micro_batch=chosen.micro_batch,
        rows_per_example=OBJECTIVES[objective_of(plan.job.train.objective, plan.data.format)].rows_per_example,
        seq_len=chosen.seq_len,
        document_tokens=document_tokens(plan.data, seq_len=chosen.seq_len),
        accumulation=chosen.accumulation,
        checkpointing=chosen.checkpointing,
        attention=Attention.SDPA if chosen.attention is Attention.FLASH else chosen.attention,
        loss=chosen.loss,
        loss_chunk_tokens=chosen.loss_chunk_tokens,
        activation_offload=chosen.activation_offload,
        packages=kernel_packages(plan.hardware.libraries),
        device_kind=plan.device_kind,
        device_name=gpu.name if gpu is not None else None,
        **capability,
    )


def describe_simulation(simulation: Simulation, predicted: MemoryEstimate, *, is_expandable: bool = True) -> list[str]:
    """Lines of predicted and simulated bytes, by event and by part, with the relative difference.

    The closed form counts the matrix library's workspaces, which no dry run sees: its figures here exclude them.
    Reserved is as a run is started: with expandable segments if the device has them.
    """
    workspace = predicted.parts.get(_WORKSPACE, 0)
    seen = named_events(simulation.events, predicted.events)
    lines = [_COLUMNS.format("event", "predicted", "simulated", "difference")]
    for event in (*predicted.events, *(name for name in seen if name not in predicted.events)):
        expected = predicted.events.get(event)
        if expected is not None and event != "load":
            expected -= workspace
        lines.append(_compared(event, expected, seen.get(event)))
    lines.append(_compared("peak", predicted.peak_allocated_bytes - workspace, simulation.peak_allocated_bytes))
    lines.append(
        _compared("between steps", predicted.steady_allocated_bytes - workspace, simulation.steady_allocated_bytes)
    )
    reserved = simulation.reserved_bytes(is_expandable=is_expandable)
    lines.append(_compared("reserved", predicted.peak_reserved_bytes - workspace, reserved))
    lines.append(f"parts at the peak: {predicted.peak_event} predicted, {simulation.peak_event} simulated")
    expected_parts = grouped({name: size for name, size in predicted.parts.items() if name != _WORKSPACE})
    seen_parts = grouped(simulation.parts)
    lines += [_compared(f"  {part}", expected_parts[part], seen_parts[part]) for part in expected_parts]
    lines.append(
        f"the allocator needs {format_bytes(simulation.min_capacity_bytes)} for it; "
        f"{format_bytes(simulation.reserved_bytes(is_expandable=not is_expandable))} reserved "
        f"{'without' if is_expandable else 'with'} expandable segments"
    )
    lines += [f"checked: {check}" for check in simulation.checks]
    return lines


def _compared(name: str, expected: int | None, seen: int | None) -> str:
    off = relative_difference(expected, seen)
    return _COLUMNS.format(name, _or_dash(expected), _or_dash(seen), "-" if off is None else f"{off:+.2%}")


def _or_dash(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)


Result = tuple[str, Plan | NothingFitsError]
MAX_DRY_RUNS = 6


def after_dry_run(plan: Plan, console: Console) -> Plan:
    """The plan of an architecture that no closed form knows, by its dry run; unchanged if it has none."""
    if plan.model_shape.has_form:
        return plan
    try:
        simulated, _ = simulated_plan(plan, console)
    except InputError as error:
        console.line(f"memory is an estimate for a model of these sizes: {error}")
        return plan
    return simulated


def simulated_plan(plan: Plan, console: Console) -> tuple[Plan, list[str]]:
    """The plan with the first candidate whose dry run fits, and lines that compare it with the closed form.

    NothingFitsError if none does, InputError if no candidate of an unknown architecture has a dry run.
    """
    shape, is_cpu = plan.model_shape, plan.device_kind is DeviceKind.CPU
    obstacle = obstacle_to_dry_run(plan.chosen, shape, is_cpu=is_cpu)
    if obstacle is not None and shape.has_form:
        return plan, [f"no dry run: {obstacle}; the figures are predicted"]
    context = context_of(plan)
    failed: list[Simulated] = []
    for candidate in _with_dry_run(plan, is_cpu=is_cpu):
        console.line(f"dry run of {candidate.strategy.name}, micro batch {candidate.micro_batch} ...")
        request = replace(simulation_request(plan, candidate), seq_len=longest_row(plan, candidate))
        simulation, eager = simulate(request), eager_candidate(context, candidate)
        memory = simulated_memory(context, eager, simulation)
        if candidate.compile:
            memory = compiled_memory(memory, eager.memory, candidate.memory)
        simulated = Simulated(candidate=candidate, memory=memory)
        if simulated.memory.fits:
            lines = [_head(simulated), *(f"not chosen: {each.text}" for each in failed)]
            is_expandable = plan.hardware.can_expand_segments
            lines += describe_simulation(simulation, eager.memory, is_expandable=is_expandable)
            return plan_of_simulated(plan, simulated, failed), lines
        failed.append(simulated)
        if len(failed) == MAX_DRY_RUNS:
            break
    if not failed:
        raise InputError(f"no closed form knows {shape.model_type}, and {obstacle}; {_PINS}")
    raise NothingFitsError(_nothing_fits(failed))


def simulated_results(results: Sequence[Result], console: Console) -> tuple[list[Result], dict[str, list[str]]]:
    """Every machine's plan after its dry run, and lines on the dry runs, by the name of the machine.

    NothingFitsError if the only machine has none; of several machines the others are reported.
    """
    decided: list[Result] = []
    lines: dict[str, list[str]] = {}
    for name, result in results:
        try:
            plan = result
            if isinstance(plan, Plan):
                plan, lines[name] = simulated_plan(plan, console)
            decided.append((name, plan))
        except NothingFitsError as error:
            if len(results) == 1:
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
    return f"dry run: {simulated.text}; {format_bytes(simulated.memory.usable_bytes)} are usable"


def _nothing_fits(failed: list[Simulated]) -> str:
    nearest = min(failed, key=lambda each: each.memory.need_bytes)
    times = f"{len(failed)} dry runs" if len(failed) > 1 else "its dry run"
    return (
        f"nothing fits by {times}: {nearest.text}; {format_bytes(nearest.memory.usable_bytes)} are usable\n"
        "would fit with shorter sequences (train.seq_len), or a device with "
        f"{format_bytes(nearest.memory.need_bytes)} usable"
    )
