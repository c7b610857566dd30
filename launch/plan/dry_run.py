"""Has a worker run the exact dry run, and compares its answer with the closed form's.

The dry run needs torch, and changes torch's own tables for a device that is not there. It allocates nothing on any
device.
"""

import sys
from typing import Any

from shardwise.launch.worker import ask
from shardwise.trainer.planning.memory.parts import grouped
from shardwise.trainer.planning.run.rows import document_tokens
from shardwise.trainer.planning.simulated import named_events
from shardwise.trainer.spec.data.shapes import objective_of, rows_per_example
from shardwise.trainer.spec.messages.simulation import Simulation, SimulationRequest
from shardwise.trainer.spec.model.shape import DescriptionRequest, ModelShape
from shardwise.trainer.spec.plan import Candidate, MemoryEstimate, Plan
from shardwise.trainer.spec.strategy import Attention
from shardwise.trainer.spec.units import format_bytes

DEFAULT_TIMEOUT_S = 900.0
_MODULE, _SUBJECT = "shardwise.trainer.simulation", "the dry run"
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # nothing is computed
    "CUDA_VISIBLE_DEVICES": "",  # and no device is touched
}
_WORKSPACE = "workspace"
_COLUMNS = "{:<24}{:>12}{:>12}{:>12}"


def simulate(
    request: SimulationRequest, *, timeout_s: float = DEFAULT_TIMEOUT_S, python: str = sys.executable
) -> Simulation:
    """The dry run's answer; raises the ShardwiseError that its worker ended with."""
    return ask(
        _MODULE,
        request,
        Simulation,
        subject=_SUBJECT,
        environment=_ENVIRONMENT,
        timeout_s=timeout_s,
        python=python,
    )


def described_shape(request: DescriptionRequest) -> ModelShape:
    """The shape of a causal language model of transformers, or of code that comes with it.

    InputError if it cannot be built.
    """
    return ask(
        _MODULE,
        request,
        ModelShape,
        subject=_SUBJECT,
        flags=("--describe",),
        environment=_ENVIRONMENT,
        timeout_s=DEFAULT_TIMEOUT_S,
    )


def simulation_request(plan: Plan, candidate: Candidate | None = None) -> SimulationRequest:
    """The request of a candidate of a plan, by default of the chosen one.

    flash-attn has no dry run; torch's own flash kernel, which keeps the same tensors, stands in for it.
    """
    taken = plan.chosen if candidate is None else candidate
    gpu = plan.hardware.gpus[0] if plan.hardware.gpus else None
    capability: dict[str, Any] = {}
    if gpu is not None and gpu.compute_capability is not None:
        capability["compute_capability"] = gpu.compute_capability
    return SimulationRequest(
        model_config=plan.model_config,
        model_code=plan.model_code,
        method=taken.method,
        lora=plan.job.train.lora,
        sharding=taken.strategy.sharding,
        num_ranks=taken.num_ranks,
        ranks_per_node=plan.hardware.num_devices_per_node,
        precision=taken.strategy.precision,
        optimizer=taken.strategy.optimizer,
        micro_batch=taken.micro_batch,
        rows_per_example=rows_per_example(objective_of(plan.job.train.objective, plan.data.format)),
        seq_len=taken.seq_len,
        document_tokens=document_tokens(plan.data, seq_len=taken.seq_len),
        accumulation=taken.accumulation,
        checkpointing=taken.checkpointing,
        attention=Attention.SDPA if taken.attention is Attention.FLASH else taken.attention,
        loss=taken.loss,
        loss_chunk_tokens=taken.loss_chunk_tokens,
        activation_offload=taken.activation_offload,
        device_kind=plan.device_kind,
        device_name=gpu.name if gpu is not None else None,
        **capability,
    )


def describe_simulation(simulation: Simulation, predicted: MemoryEstimate, *, is_expandable: bool = True) -> list[str]:
    """Lines: predicted beside simulated, event by event and part by part, with the relative difference.

    The closed form counts the matrix library's workspaces, which no dry run sees: they are taken out of its figures.
    Reserved is as a run is started: with expandable segments where the device has them.
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
    difference = f"{expected / seen - 1:+.2%}" if expected is not None and seen else "-"
    return _COLUMNS.format(name, _or_dash(expected), _or_dash(seen), difference)


def _or_dash(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_bytes(num_bytes)
