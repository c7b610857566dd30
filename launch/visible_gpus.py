"""Which GPUs the ranks of a plan may see, in the words of CUDA_VISIBLE_DEVICES.

A UUID means the same card to every program; an index does only while everybody counts in the order of the PCI bus.
"""

from trainer.spec.hardware import DeviceKind
from trainer.spec.plan import Plan


def visible_gpus(plan: Plan) -> tuple[str, ...] | None:
    """One name for each rank's GPU; None where there is nothing to choose.

    That is on a CPU, on several machines (their cards have other UUIDs, and the scheduler chose them), and for a
    machine that was described instead of probed.
    """
    hardware = plan.hardware
    if plan.device_kind is not DeviceKind.CUDA or hardware.num_nodes > 1 or hardware.source != "probe":
        return None
    chosen = hardware.gpus[: plan.chosen.num_ranks]
    if all(gpu.uuid for gpu in chosen):
        return tuple(str(gpu.uuid) for gpu in chosen)
    return tuple(str(gpu.index) for gpu in chosen)
