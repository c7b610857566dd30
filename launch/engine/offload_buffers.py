"""How large DeepSpeed's buffers of offloaded state are: from what the plan counted and what the machine grants.

ZeRO-3 updates one sub-group of weights after the other. `sub_group_size` is in elements of a rank's partition; a
sub-group is closed by the weight that fills it, so it may be larger by one piece (a rank's part of the largest
weight). What a sub-group needs (DeepSpeed 0.19.8, runtime/swap_tensor and runtime/zero/stage3.py):

    state on NVMe      one buffer each for master weights, gradient and both moments, each as large as the largest
                       sub-group, locked in RAM (mlock) for the whole run
    weights on NVMe    also one in the computing type, through which updated weights are written, and `buffer_count`
                       buffers of one piece: every weight that is gathered, or about to be, holds one

So sub-groups are cut to what is left of the window that the memory estimate counts (`NVME_WINDOW_BYTES`), or of the
machine's limit on locked memory where that is less. DeepSpeed has a fixed size for all of these, and ends the process
where mlock refuses it.

A weight stays in RAM where a rank's piece of it is smaller than `SMALLEST_SWAPPED_BYTES`. With weights on NVMe nothing
is kept gathered for reuse, and few weights are gathered ahead, because DeepSpeed stops the run when no buffer is free.

`pin_memory` is for GPUs alone: nothing copies to a device on a CPU. CUDA's pinned memory is no part of the limit on
locked memory; where it is limited (WSL) and would not fit, DeepSpeed is told to use pageable memory, which is slower.
"""

from trainer.planning.memory.states import NVME_WINDOW_BYTES
from trainer.spec.hardware import DeviceKind
from trainer.spec.plan import Plan
from trainer.spec.strategy import Offload
from trainer.spec.units import MIB
from trainer.spec.value import Value

OPTIMIZER_BUFFERS = 4  # master weights, gradient, two moments: what Adam has of a sub-group
SMALLEST_SWAPPED_BYTES = MIB  # DeepSpeed's MIN_AIO_BYTES, and the block size of our files
WEIGHTS_AHEAD = 2  # gathered before they are needed
WEIGHT_BUFFERS = 1 + 2 * WEIGHTS_AHEAD  # at work; gathered ahead; on their way from the disk


class OffloadBuffers(Value, frozen=True, kw_only=True):
    """Sizes for one rank."""

    sub_group_elements: int
    weight_buffer_elements: int  # a rank's piece of the largest weight
    weight_buffers: int
    optimizer_buffers: int
    ahead_elements: int  # of whole weights that are gathered ahead of those on NVMe
    pins_memory: bool
    locked_bytes: int  # of RAM (mlock) that the buffers take; 0 without NVMe


def offload_buffers(plan: Plan) -> OffloadBuffers:
    """The buffers of a plan under ZeRO."""
    chosen, shape = plan.chosen, plan.model_shape
    strategy, num_ranks = chosen.strategy, chosen.num_ranks
    width = strategy.precision.compute_bytes
    partition, piece = -(-shape.num_parameters // num_ranks), -(-shape.largest_tensor // num_ranks)
    per_element = OPTIMIZER_BUFFERS * strategy.precision.master_bytes
    fixed = 0
    if strategy.offload is Offload.NVME_ALL:
        per_element += width
        fixed = WEIGHT_BUFFERS * piece * width
    largest = max(piece, (_window_bytes(plan) - fixed) // per_element)
    sub_group = max(1, min(partition, largest - piece))
    return OffloadBuffers(
        sub_group_elements=sub_group,
        weight_buffer_elements=piece,
        weight_buffers=WEIGHT_BUFFERS,
        optimizer_buffers=OPTIMIZER_BUFFERS,
        ahead_elements=WEIGHTS_AHEAD * num_ranks * SMALLEST_SWAPPED_BYTES // width,
        pins_memory=_pins_memory(plan),
        locked_bytes=fixed + per_element * min(partition, sub_group + piece) if strategy.offload.uses_nvme else 0,
    )


def _window_bytes(plan: Plan) -> int:
    """RAM that one rank's buffers may take."""
    if not plan.chosen.strategy.offload.uses_nvme:
        return NVME_WINDOW_BYTES
    limit = plan.hardware.host.memlock_limit_bytes
    return NVME_WINDOW_BYTES if limit is None else min(NVME_WINDOW_BYTES, limit)


def _pins_memory(plan: Plan) -> bool:
    if plan.device_kind is DeviceKind.CPU:
        return False
    limit = plan.hardware.host.pinned_limit_bytes
    return limit is None or plan.chosen.memory.pinned_bytes <= limit
