"""The memory of one training step in closed form: no torch, microseconds, every byte with a name.

    states              weights, gradients, masters, optimizer state
    saved_tensors       tensors that autograd saves in one block, operation by operation
    activations         saved activations, temporaries of the backward, logits and their gradients
    traced              the same of blocks that were traced
    events              bytes at every event of a step; the largest is the peak

What an engine decides (gathered parameters, buckets, gradients in transfer) is in `planning/engines`.

docs/memory-model.md lists what is covered and how it was checked.

From live bytes to device memory: every line of `OVERHEADS` has a low, a likely and a high value and a source;
`estimate_memory` accepts another table for a machine that has been measured.

    allocated   predicted live bytes, with the range of `allocated`
    reserved    segments that expand (`expandable_segments:True`, which our launcher sets) are shared by tensors of all
                sizes, but each stream has its own: FSDP gathers and reduces on others than it computes on, and what
                one frees the other cannot use. Segments of one size (the default of other trainers) are cached:
                buffers of the loss, of a block and of parameters hardly reuse each other's, so a step reserves nearly
                the sum of its phases. Near a full card the allocator frees unused segments
    device      reserved, the context and the communicators: the figure of nvidia-smi
    need        the smallest memory that still works, after the allocator has freed all unused segments; the margin
                depends on the event: the optimizer's step has few large tensors and fragments least

On CPU there is no caching allocator; the margin covers workspaces that oneDNN allocates inside an operation.
"""

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from shardwise.trainer.planning.configuration import Configuration, once
from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.engines import engine_of
from shardwise.trainer.planning.engines.engine import Event, PlannedEngine, ShardingMemory, StateMemory, States
from shardwise.trainer.planning.memory.activations import block_activations, head_memory
from shardwise.trainer.planning.memory.events import (
    StepMemory,
    accumulated_gradients,
    optimizer_step,
    resident_bytes,
    step_events,
)
from shardwise.trainer.planning.memory.states import HostMemory, host_memory, states_of
from shardwise.trainer.planning.policy.precision_policy import Dims, PrecisionPolicy, dims_for, policy_of
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.optimizers import Pieces
from shardwise.trainer.spec.plan import MemoryEstimate
from shardwise.trainer.spec.units import GIB, MIB
from shardwise.trainer.spec.value import Value


class Line(Value, frozen=True, kw_only=True):
    """One overhead: a share of something, or bytes."""

    low: float
    likely: float
    high: float
    source: str


_A100 = "published runs with allocated and nvidia-smi bytes (A100, torch 2.4, default allocator)"


class OverheadTable(Value, frozen=True, kw_only=True):
    """The named lines; replace one to override it."""

    allocated: Line = Line(low=0.97, likely=1.0, high=1.03, source="closed form against simulated and measured steps")
    context_bytes: Line | None = None  # None: of the device's row in the catalogue
    communicator_bytes: Line = Line(
        low=0.5 * GIB,
        likely=1331 * MIB,
        high=1.6 * GIB,
        source=f"NCCL, one group of ranks: {_A100}; nccl issues 864, 964",
    )
    loss_not_reused_alone: Line = Line(low=0.7, likely=1.1, high=1.2, source=_A100)
    loss_not_reused_sharded: Line = Line(low=0.0, likely=0.35, high=1.0, source=_A100)
    loss_not_reused_frozen: Line = Line(low=0.0, likely=0.0, high=0.35, source=_A100)
    fragmentation_alone: Line = Line(low=0.07, likely=0.09, high=0.11, source=f"of the transients; {_A100}")
    fragmentation_sharded: Line = Line(low=0.14, likely=0.155, high=0.17, source=f"of the block's transients; {_A100}")
    fragmentation_expanding: Line = Line(
        low=0.01, likely=0.07, high=0.34, source="of the transients; 50 runs of our trainer on one H100, torch 2.11"
    )
    least_reserved: Line = Line(low=1.0, likely=1.02, high=1.1, source="rounding to segments of 2 and 20 MiB")
    given_back: Line = Line(
        low=0.95, likely=0.97, high=1.0, source="of the memory left for tensors on a full card; " + _A100
    )
    # What must be there beyond the peak for a step to work at all, as shares:
    margin: Line = Line(
        low=0.02, likely=0.04, high=0.06, source="measured successes and out-of-memory runs of the same"
    )
    step_margin: Line = Line(low=0.0, likely=0.01, high=0.02, source="optimizer steps at 99 % of a card that ran")
    logits_margin: Line = Line(low=0.1, likely=0.19, high=0.25, source="measured out-of-memory runs, of the logits")
    sharded_margin: Line = Line(
        low=0.1, likely=0.2, high=0.25, source="the same under FSDP, of new allocations in the backward of a block"
    )
    cpu_margin: Line = Line(low=-0.05, likely=0.05, high=0.08, source="oneDNN's workspaces; profiler on CPU")


OVERHEADS = OverheadTable()
_BLOCKS = ("block_backward_top", "block_backward_middle", "block_backward_bottom")


class StepBytes(Value, frozen=True, kw_only=True):
    """Bytes on one of `num_ranks` devices at each event of a step, by part and in total (`totals`)."""

    policy: PrecisionPolicy
    sharding: Sharding
    device: Device
    num_ranks: int
    events: dict[str, Event]
    totals: dict[str, int]
    steady: int  # what stays on the device through a whole step
    host: int  # of the process in RAM that is the memory of the device as well; 0 where RAM is another

    @property
    def engine(self) -> PlannedEngine:
        return engine_of(self.sharding)


class Overheads(Value, frozen=True, kw_only=True):
    """Bytes of one device beyond, around and under the predicted peak."""

    reserved: int
    device: int
    low: int
    high: int
    need: int


def estimate_memory(
    shape: ModelShape, configuration: Configuration, device: Device, table: OverheadTable = OVERHEADS
) -> MemoryEstimate:
    """Bytes of one device, and of its node's host, at the worst event of a step of `configuration`."""
    step = step_memory(shape, configuration, device)
    policy, held = step.policy, _bytes_of(step, configuration, device)
    totals = held.totals
    peak_event = max(totals, key=totals.__getitem__)
    steady = held.steady - step.sharding.root
    if policy.reference.uses_fsdp1 and policy.pieces is Pieces.SHARDS and not policy.updates_in_backward:
        steady += step.states.gradients  # flat parameters keep their sharded gradients until the next backward
    around = overheads(held, table)
    host = _host_of(step)
    if device.shares_host_memory:  # `need_bytes` has it
        host = HostMemory(pinned=0, pageable=0, nvme=host.nvme)
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


@once
def needed_bytes(shape: ModelShape, configuration: Configuration, device: Device) -> int:
    """`need_bytes` of `estimate_memory` alone, for a search over configurations: a quarter less work."""
    return needed(_bytes_of(step_memory(shape, configuration, device), configuration, device), OVERHEADS)


def least_bytes(shape: ModelShape, start: Configuration, device: Device) -> Callable[[int, int], int]:
    """A lower bound of `needed_bytes` for `start` with another micro batch and accumulation.

    It counts the tensors alive in the backward of the last block: states, earlier gradients, all activations, gathered
    parameters. In our runtime they are the same for every loss head.
    """
    dims = dims_for(shape, start)
    policy = policy_of(start, device, dims)
    states, sharding = states_of(start, device, dims), _sharding(start, policy, dims)
    held = _held(states, sharding)

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


def state_need(shape: ModelShape, configuration: Configuration, device: Device) -> int:
    """A lower bound of `needed_bytes` for every micro batch, recomputation and loss head.

    It counts a backward without activations, and the update after it.
    """
    dims = dims_for(shape, configuration)
    policy = policy_of(configuration, device, dims)
    states, sharding = states_of(configuration, device, dims), _sharding(configuration, policy, dims)
    backward = least_needed(_held(states, sharding), policy, device, configuration.num_ranks, OVERHEADS)
    if policy.updates_in_backward:
        return backward
    step = StateMemory(
        configuration=configuration,
        policy=policy,
        dims=dims,
        states=states,
        sharding=sharding,
    )
    update = sum(optimizer_step(step, resident_bytes(step)).values())
    return max(backward, least_needed(update, policy, device, configuration.num_ranks, OVERHEADS, is_update=True))


def _held(states: States, sharding: ShardingMemory) -> int:
    """Bytes without activations and gradients in the backward of the last block."""
    weights = states.weights + states.master_weights + states.quant_state + states.adapters
    return weights + states.optimizer_state + sharding.buffers + sharding.buffers_backward + sharding.gathered_top


def host_need(shape: ModelShape, configuration: Configuration, device: Device) -> HostMemory:
    """Bytes of RAM and NVMe of a node alone, for a search over configurations."""
    dims = dims_for(shape, configuration)
    policy = policy_of(configuration, device, dims)
    blocks = block_activations(configuration, policy, dims)
    states = states_of(configuration, device, dims)
    return host_memory(configuration, policy, dims, states, activations=blocks.offloaded)


def step_memory(shape: ModelShape, configuration: Configuration, device: Device) -> StepMemory:
    """The parts from which `step_events` computes every byte of every event of a step."""
    dims = dims_for(shape, configuration)
    policy = policy_of(configuration, device, dims)
    return StepMemory(
        configuration=configuration,
        policy=policy,
        dims=dims,
        states=states_of(configuration, device, dims),
        blocks=block_activations(configuration, policy, dims),
        head=head_memory(configuration, policy, dims),
        sharding=_sharding(configuration, policy, dims),
    )


def _sharding(configuration: Configuration, policy: PrecisionPolicy, dims: Dims) -> ShardingMemory:
    return engine_of(configuration.strategy.sharding).memory(configuration, policy, dims)


def managed_bytes(shape: ModelShape, configuration: Configuration, device: Device) -> int:
    """Paged state of one rank: on the device as long as there is room, and no part of the need."""
    return states_of(configuration, device, dims_for(shape, configuration)).managed


def on_device(num_bytes: int, managed_bytes: int, device: Device) -> int:
    """Bytes on the device including paged state: managed memory that does not fit moves to the host."""
    return min(num_bytes + managed_bytes, max(num_bytes, device.usable_bytes))


def _bytes_of(step: StepMemory, configuration: Configuration, device: Device) -> StepBytes:
    resident = resident_bytes(step)
    events = step_events(step, resident)
    return StepBytes(
        policy=step.policy,
        sharding=configuration.strategy.sharding,
        device=device,
        num_ranks=configuration.num_ranks,
        events=events,
        totals={name: sum(event.values()) for name, event in events.items()},
        steady=sum(resident.values()) + step.sharding.root,
        host=host_in_pool(step, device),
    )


def host_in_pool(step: StepMemory, device: Device) -> int:
    """Bytes of RAM in the same pool as those of the device; 0 where RAM is another."""
    return _host_of(step).ram if device.shares_host_memory else 0


def _host_of(step: StepMemory) -> HostMemory:
    return host_memory(step.configuration, step.policy, step.dims, step.states, activations=step.blocks.offloaded)


# Terms of an event, grouped into the four parts that a running trainer can distinguish; all others are activations:
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


def overheads(held: StepBytes, table: OverheadTable) -> Overheads:
    """Overheads around the largest total."""
    policy, peak = held.policy, max(held.totals.values())
    need = needed(held, table)
    if not policy.is_cuda:
        return _on_cpu(peak, need, _context_bytes(held.device, table), table)
    outside, block = _outside_bytes(held.device, held.num_ranks, table), _block_bytes(held)
    room = max(0, held.device.usable_bytes - outside)
    limit = table.given_back.likely * room
    expands = policy.reference.expands_segments and held.engine.expands_segments
    segments = _expanding(held, table) if expands else _of_one_size(held, block, table)
    likely = round(max(table.least_reserved.likely * peak, min(segments, limit)))
    reserved = min(likely, max(peak, room))  # on a full device unused segments are freed
    return Overheads(
        reserved=reserved,
        device=reserved + outside,
        low=round(table.allocated.low * peak),
        high=max(reserved, round(table.least_reserved.high * peak)),
        need=need,
    )


def _expanding(held: StepBytes, table: OverheadTable) -> float:
    """Reserved bytes of segments that expand: those of each stream at its largest, and what does not fit together."""
    peak = max(held.totals.values())
    waste = table.fragmentation_expanding.likely * max(0, peak - held.steady)
    parts = held.engine.other_streams
    if not parts:
        return peak + waste
    others = {name: sum(event.get(part, 0) for part in parts) for name, event in held.events.items()}
    return max(total - others[name] for name, total in held.totals.items()) + max(others.values()) + waste


def _of_one_size(held: StepBytes, block: int, table: OverheadTable) -> float:
    """Reserved bytes of segments that are cached, each for tensors of its size."""
    peak, is_sharded = max(held.totals.values()), bool(held.engine.other_streams)
    waste = table.fragmentation_sharded if is_sharded else table.fragmentation_alone
    wasted = waste.likely * (block if is_sharded else max(0, peak - held.steady))
    return max(_disjoint(held, block, table), peak) + wasted


def needed(held: StepBytes, table: OverheadTable) -> int:
    """Bytes the device must have for every event of a step to work, context and communicator included."""
    if not held.policy.is_cuda:
        peak = max(held.totals.values())
        return peak + round(table.cpu_margin.likely * peak) + _context_bytes(held.device, table)
    inside = max(_needed(held, name, event, table) for name, event in held.events.items())
    return round(inside) + _outside_bytes(held.device, held.num_ranks, table) + held.host


def least_needed(
    num_bytes: int,
    policy: PrecisionPolicy,
    device: Device,
    num_ranks: int,
    table: OverheadTable,
    *,
    is_update: bool = False,
) -> int:
    """A lower bound of `needed` when `num_bytes` are alive in a forward or a backward, or in the update after it."""
    if not policy.is_cuda:
        return num_bytes + round(table.cpu_margin.likely * num_bytes) + _context_bytes(device, table)
    margin = table.step_margin if is_update else table.margin
    return int((1 + margin.likely) * num_bytes) + _outside_bytes(device, num_ranks, table)


def _context_bytes(device: Device, table: OverheadTable) -> int:
    return device.context_bytes if table.context_bytes is None else round(table.context_bytes.likely)


def _outside_bytes(device: Device, num_ranks: int, table: OverheadTable) -> int:
    """Bytes of the process outside PyTorch's allocator."""
    communicators = round(table.communicator_bytes.likely) if num_ranks > 1 else 0
    return _context_bytes(device, table) + communicators


def _on_cpu(peak: int, need: int, context: int, table: OverheadTable) -> Overheads:
    margin = table.cpu_margin
    return Overheads(
        reserved=peak,
        device=peak + context,
        low=round((1 + margin.low) * peak),
        high=round((1 + margin.high) * peak),
        need=need,
    )


def _block_bytes(held: StepBytes) -> int:
    """Bytes that the backward of a block adds to the constant ones, including gathered parameters outside blocks."""
    return max(0, max(held.totals.get(name, 0) for name in _BLOCKS) - held.steady)


def _needed(held: StepBytes, name: str, event: Event, table: OverheadTable) -> float:
    """Bytes that an event needs after the allocator has returned its free segments."""
    total = held.totals[name]
    if name == "optimizer_step":
        return (1 + table.step_margin.likely) * total
    needed = (1 + table.margin.likely) * total + table.logits_margin.likely * event.get("logits", 0)
    if held.engine.other_streams and name in _BLOCKS:
        retained = event["activations"] + event.get("retained_gradients", 0)
        needed += table.sharded_margin.likely * max(0, total - held.steady - retained)
    return needed


def _disjoint(held: StepBytes, block: int, table: OverheadTable) -> float:
    """The sum of a step's phases, each less what the phase before left that it can use."""
    events, is_sharded = held.events, bool(held.engine.other_streams)
    loss = max("forward_end", "loss_backward", key=held.totals.__getitem__)
    reuse = table.loss_not_reused_alone
    if is_sharded:
        reuse = table.loss_not_reused_frozen if held.policy.is_frozen else table.loss_not_reused_sharded
    not_reused = max(0, min(held.totals[loss] - held.steady, block) - events[loss]["activations"])
    disjoint = held.steady + block + reuse.likely * not_reused
    step = events.get("optimizer_step", {})
    if is_sharded:
        disjoint += step.get("gradients", 0) + step.get("optimizer_temporaries", 0)
    return disjoint
