"""From live bytes to what a device must have: the allocator's cache, the context, communicators, and margins.

Every line of `OVERHEADS` has a low, a likely and a high value and a source; `estimate_memory` takes another table where
a machine has been measured. In short:

    allocated   predicted live bytes, with the range of `allocated`
    reserved    the allocator keeps a segment for what may come back. Buffers of the loss, of a block and of parameters
                are of different sizes and hardly reuse each other's segments, so what a step reserves is closer to the
                sum of its phases than to the largest; near a full card it gives unused segments back
    device      reserved, the context and the communicators: what nvidia-smi shows
    need        the smallest memory that still works, after the allocator has given everything unused back; the margin
                belongs to the event: the optimizer's step is made of few large tensors and packs best

On CPU there is no caching allocator; the margin covers workspaces that oneDNN takes inside an operation.
"""

from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.memory.precision_policy import PrecisionPolicy
from shardwise.trainer.spec.units import GIB, MIB
from shardwise.trainer.spec.value import Value

Event = dict[str, int]


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
        low=0.1, likely=0.2, high=0.25, source="the same under FSDP, of what the backward of a block takes anew"
    )
    cpu_margin: Line = Line(low=-0.05, likely=0.05, high=0.08, source="oneDNN's workspaces; profiler on CPU")


OVERHEADS = OverheadTable()
_BLOCKS = ("block_backward_top", "block_backward_middle", "block_backward_bottom")


class StepBytes(Value, frozen=True, kw_only=True):
    """Bytes on one of `num_ranks` devices at each event of a step, by part and in total (`totals`)."""

    policy: PrecisionPolicy
    device: Device
    num_ranks: int
    events: dict[str, Event]
    totals: dict[str, int]
    steady: int  # what stays on the device through a whole step


class Overheads(Value, frozen=True, kw_only=True):
    """Bytes of one device beyond, around and under the predicted peak."""

    reserved: int
    device: int
    low: int
    high: int
    need: int


def overheads(held: StepBytes, table: OverheadTable) -> Overheads:
    """Overheads around the largest total."""
    policy, peak = held.policy, max(held.totals.values())
    need = needed(held, table)
    if not policy.is_cuda:
        return _on_cpu(peak, need, _context_bytes(held.device, table), table)
    outside, block = _outside_bytes(held.device, held.num_ranks, table), _block_bytes(held)
    limit = table.given_back.likely * max(0, held.device.usable_bytes - outside)
    disjoint = _disjoint(held, block, table)
    waste = table.fragmentation_sharded if policy.uses_fsdp else table.fragmentation_alone
    wasted = waste.likely * (block if policy.uses_fsdp else max(0, peak - held.steady))
    reserved = round(max(table.least_reserved.likely * peak, min(max(disjoint, peak) + wasted, limit)))
    return Overheads(
        reserved=reserved,
        device=reserved + outside,
        low=round(table.allocated.low * peak),
        high=max(reserved, round(table.least_reserved.high * peak)),
        need=need,
    )


def needed(held: StepBytes, table: OverheadTable) -> int:
    """Bytes the device must have for every event of a step to work, context and communicator included."""
    if not held.policy.is_cuda:
        peak = max(held.totals.values())
        return peak + round(table.cpu_margin.likely * peak) + _context_bytes(held.device, table)
    inside = max(_needed(held, name, event, table) for name, event in held.events.items())
    return round(inside) + _outside_bytes(held.device, held.num_ranks, table)


def least_needed(num_bytes: int, policy: PrecisionPolicy, device: Device, num_ranks: int, table: OverheadTable) -> int:
    """A lower bound of `needed` when `num_bytes` are alive in a forward or a backward."""
    if not policy.is_cuda:
        return num_bytes + round(table.cpu_margin.likely * num_bytes) + _context_bytes(device, table)
    return int((1 + table.margin.likely) * num_bytes) + _outside_bytes(device, num_ranks, table)


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
    if held.policy.uses_fsdp and name in _BLOCKS:
        retained = event["activations"] + event.get("retained_gradients", 0)
        needed += table.sharded_margin.likely * max(0, total - held.steady - retained)
    return needed


def _disjoint(held: StepBytes, block: int, table: OverheadTable) -> float:
    """The sum of a step's phases, each less what the phase before left that it can use."""
    policy, events = held.policy, held.events
    loss = max("forward_end", "loss_backward", key=held.totals.__getitem__)
    reuse = table.loss_not_reused_alone
    if policy.uses_fsdp:
        reuse = table.loss_not_reused_frozen if policy.is_frozen else table.loss_not_reused_sharded
    beside = max(0, min(held.totals[loss] - held.steady, block) - events[loss]["activations"])
    disjoint = held.steady + block + reuse.likely * beside
    step = events.get("optimizer_step", {})
    if policy.uses_fsdp:
        disjoint += step.get("gradients", 0) + step.get("optimizer_temporaries", 0)
    return disjoint
