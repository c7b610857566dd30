"""The memory of one training step in closed form: no torch, microseconds, every byte with a name.

    stacks, recipe   types of tensors and kernels, sizes of the model; ours, or another trainer's as a row of values
    states           weights, gradients, masters, optimizer state
    saved_tensors    what autograd saves in one block, operation by operation
    activations      what blocks keep for backward, what their backward needs; logits and their gradients
    sharding         gathered parameters, buckets, gradients on their way
    events           all of it at every event of a step (with `gradients`); the largest is the peak
    overheads        allocator, context, communicators, margins

What is covered, and how it was checked, is in docs/memory-model.md.
"""

from collections.abc import Callable, Mapping
from functools import cache

from msgspec.structs import replace

from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.memory.activations import block_activations, head_memory
from shardwise.trainer.planning.memory.events import StepMemory, resident_bytes, step_events
from shardwise.trainer.planning.memory.overheads import (
    OVERHEADS,
    OverheadTable,
    StepBytes,
    least_needed,
    needed,
    overheads,
)
from shardwise.trainer.planning.memory.precision_policy import dims_of, policy_of
from shardwise.trainer.planning.memory.sharding import accumulated_gradients, sharding_memory
from shardwise.trainer.planning.memory.states import States, host_memory, model_states
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import MemoryEstimate


def estimate_memory(
    shape: ModelShape, configuration: Configuration, device: Device, table: OverheadTable = OVERHEADS
) -> MemoryEstimate:
    """Bytes of one device, and of its node's host, at the worst event of a step of `setting`."""
    step = step_memory(shape, configuration, device)
    policy, held = step.policy, _bytes_of(step, configuration, device)
    totals = held.totals
    peak_event = max(totals, key=totals.__getitem__)
    steady = held.steady - step.sharding.root
    if policy.reference.uses_fsdp1 and policy.uses_fsdp and not policy.updates_in_backward:
        steady += step.states.gradients  # flat parameters keep their sharded gradients until the next backward
    around = overheads(held, table)
    host = host_memory(configuration, policy, step.dims, step.states, activations=step.blocks.offloaded)
    return MemoryEstimate(
        parts={name: num_bytes for name, num_bytes in held.events[peak_event].items() if num_bytes},
        peak_event=peak_event,
        events=totals,
        steady_allocated_bytes=steady,
        peak_allocated_bytes=totals[peak_event],
        peak_reserved_bytes=around.reserved,
        device_bytes=on_device(around.device, step.states.managed, device),
        low_bytes=around.low,
        high_bytes=around.high,
        need_bytes=around.need,
        usable_bytes=device.usable_bytes,
        pinned_bytes=host.pinned,
        host_bytes=host.pageable,
        nvme_bytes=host.nvme,
        outside_bytes=around.device - around.reserved,
        checkpoint_bytes=step.states.saved,
    )


def needed_bytes(shape: ModelShape, configuration: Configuration, device: Device) -> int:
    """`need_bytes` of `estimate_memory` alone, for a search over settings: a quarter less work."""
    return needed(_bytes_of(step_memory(shape, configuration, device), configuration, device), OVERHEADS)


def least_bytes(shape: ModelShape, start: Configuration, device: Device) -> Callable[[int, int], int]:
    """A lower bound of `needed_bytes` for `start` with another micro batch and accumulation.

    What is alive when the last block runs backwards: states, earlier gradients, all activations, gathered parameters.
    In our runtime it is the same for every loss head.
    """
    dims = dims_of(shape)
    policy = policy_of(start, device, dims)
    states, sharding = model_states(start, policy, dims), sharding_memory(start, policy, dims)
    held = _held(states) + sharding.buffers + sharding.buffers_backward + sharding.gathered_top

    @cache
    def least(micro_batch: int, accumulation: int) -> int:
        configuration = replace(start, micro_batch=micro_batch, accumulation=accumulation)
        blocks = block_activations(
            configuration, replace(policy, tokens=policy.tokens // start.micro_batch * micro_batch), dims
        )
        earlier = accumulated_gradients(configuration, policy, states.num_trained, states.gradients)
        alive = held + max(0, earlier - sharding.reduce_head)
        alive += blocks.retained + blocks.temporaries + blocks.recomputed_by_last
        return least_needed(alive, policy, device, start.num_ranks, OVERHEADS)

    return least


def held_bytes(shape: ModelShape, configuration: Configuration, device: Device) -> int:
    """States on the device between steps: of a row the same at every micro batch, recomputation and loss head."""
    dims = dims_of(shape)
    return _held(model_states(configuration, policy_of(configuration, device, dims), dims))


def _held(states: States) -> int:
    return states.weights + states.master_weights + states.quant_state + states.adapters + states.optimizer_state


def step_memory(shape: ModelShape, configuration: Configuration, device: Device) -> StepMemory:
    """The parts from which `step_events` computes every byte of every event of a step."""
    dims = dims_of(shape)
    policy = policy_of(configuration, device, dims)
    return StepMemory(
        configuration=configuration,
        policy=policy,
        dims=dims,
        states=model_states(configuration, policy, dims),
        blocks=block_activations(configuration, policy, dims),
        head=head_memory(configuration, policy, dims),
        sharding=sharding_memory(configuration, policy, dims),
    )


def on_device(num_bytes: int, managed_bytes: int, device: Device) -> int:
    """Bytes on the device with paged state beside them: managed memory moves to the host where it has no room."""
    return min(num_bytes + managed_bytes, max(num_bytes, device.usable_bytes))


def _bytes_of(step: StepMemory, configuration: Configuration, device: Device) -> StepBytes:
    resident = resident_bytes(step)
    events = step_events(step, resident)
    return StepBytes(
        policy=step.policy,
        device=device,
        num_ranks=configuration.num_ranks,
        events=events,
        totals={name: sum(event.values()) for name, event in events.items()},
        steady=sum(resident.values()) + step.sharding.root,
    )


# Terms of an event, grouped into the four parts that a running trainer can tell apart; all others are activations:
# saved for the backward, temporaries, gathered parameters, buffers, workspaces.
_GROUPS = {
    "weights": "weights",
    "adapters": "weights",
    "quant_state": "weights",
    "master_weights": "optimizer_state",
    "optimizer_state": "optimizer_state",
    "gradients": "gradients",
    "fresh_gradients": "gradients",
}


def grouped(parts: Mapping[str, int]) -> dict[str, int]:
    """The parts of an estimate under the names that measured parts have; the sum is unchanged."""
    groups = dict.fromkeys(("weights", "optimizer_state", "gradients", "activations"), 0)
    for name, num_bytes in parts.items():
        groups[_GROUPS.get(name, "activations")] += num_bytes
    return groups
