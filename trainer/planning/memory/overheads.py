"""From live bytes to what a device must have: the allocator's cache, the context, communicators, and margins.

On CUDA the shares are fitted on published rows that carry allocated, reserved and nvidia-smi bytes of one run (A100,
torch 2.4, default allocator): buffers of the loss, of a block and of parameters do not reuse each other's segments.
They are a range elsewhere. `need_bytes` is the smallest memory that still works, after the allocator has given every
unused segment back; `high_bytes` is what it takes when it may.

On CPU there is no caching allocator; the margin covers workspaces that oneDNN takes inside an operation.
"""

from trainer.planning.device import Device
from trainer.planning.memory.events import Event
from trainer.planning.memory.recipe import Recipe
from trainer.spec.units import MIB
from trainer.spec.value import Value

NCCL_BYTES = 1331 * MIB  # communicators of a rank; 0.5 to 1.6 GiB published
REUSE_ALONE, REUSE_SHARDED = 1.1, 0.35  # share of the loss's buffers that the blocks cannot reuse
FRAGMENTATION_ALONE, FRAGMENTATION_SHARDED = 0.09, 0.155  # share of the transients lost to rounding and splitting
PEAK_MARGIN, STEP_MARGIN, LOGITS_MARGIN, SHARDED_MARGIN = 0.04, 0.01, 0.19, 0.10
CPU_MARGIN, CPU_HIGH, CPU_LOW = 0.05, 0.08, 0.05


class Overheads(Value, frozen=True, kw_only=True):
    """Bytes of one device beyond, around and under the predicted peak."""

    reserved: int
    device: int
    low: int
    high: int
    need: int


def overheads(
    recipe: Recipe, device: Device, events: dict[str, Event], totals: dict[str, int], *, num_ranks: int, steady: int
) -> Overheads:
    """What surrounds the largest of `totals`."""
    peak = max(totals.values())
    outside = device.context_bytes + (NCCL_BYTES if num_ranks > 1 and recipe.is_cuda else 0)
    if not recipe.is_cuda:
        need = peak + round(CPU_MARGIN * peak) + outside
        return Overheads(
            reserved=peak,
            device=peak + outside,
            low=round((1 - CPU_LOW) * peak),
            high=round((1 + CPU_HIGH) * peak),
            need=need,
        )
    gathered = events["block_backward_top"].get("gathered_weights", 0)
    block = max(totals["block_backward_top"], totals["block_backward_bottom"]) - steady
    loss = totals["loss_backward"] - steady
    logits = events["loss_backward"]["logits"]
    is_sharded = recipe.uses_fsdp
    reuse = 0.0 if recipe.is_frozen and is_sharded else REUSE_SHARDED if is_sharded else REUSE_ALONE
    waste = FRAGMENTATION_SHARDED * block if is_sharded else FRAGMENTATION_ALONE * max(0, peak - steady)
    disjoint = steady + max(0, block) + reuse * max(0, min(loss, block) - events["loss_backward"]["activations"])
    limit = max(0, device.usable_bytes - outside)
    reserved = round(max(1.02 * peak, min(max(disjoint, peak) + max(0.0, waste), 0.97 * limit)))
    step = totals.get("optimizer_step", 0)
    others = peak if step < peak else max(total for name, total in totals.items() if name != "optimizer_step")
    margin = (
        PEAK_MARGIN * others + LOGITS_MARGIN * logits + (SHARDED_MARGIN * max(0, block - gathered) if is_sharded else 0)
    )
    need = round(max(others + margin, (1 + STEP_MARGIN) * step)) + outside
    return Overheads(
        reserved=reserved,
        device=reserved + outside,
        low=round(0.97 * peak),
        high=max(reserved, round(1.1 * peak)),
        need=need,
    )
