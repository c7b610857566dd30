"""What a process that uses GPUs gets in its environment: the cards that it may see, and the allocator's settings.

The trial of `launch.probe.torch_fit` and the ranks get the same. A UUID means the same card to every program; an index
does only while everybody counts in the order of the PCI bus.
"""

from collections.abc import Mapping

from trainer.spec.hardware import DeviceKind, Hardware
from trainer.spec.plan import Plan

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"  # segments that grow instead of fragmenting


def visible_gpus(plan: Plan) -> tuple[str, ...] | None:
    """One name for each rank's GPU, in the words of CUDA_VISIBLE_DEVICES; None where there is nothing to choose."""
    if plan.device_kind is not DeviceKind.CUDA:
        return None
    return _gpu_names(plan.hardware, plan.chosen.num_ranks)


def cuda_variables(hardware: Hardware, num_gpus: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """What is added to an inherited environment for a process on the first GPUs of a machine."""
    ours: dict[str, str] = {}
    if hardware.can_expand_segments and not any(name in inherited for name in ALLOCATOR_VARIABLES):
        ours["PYTORCH_ALLOC_CONF"] = _EXPANDABLE
    gpus = _gpu_names(hardware, num_gpus)
    if gpus is not None:
        ours["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of nvidia-smi, where a card is named by its index
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return ours


def _gpu_names(hardware: Hardware, num_gpus: int) -> tuple[str, ...] | None:
    """None on several machines (their cards have other UUIDs, and the scheduler chose them) and where the machine was
    described instead of probed."""
    if hardware.num_nodes > 1 or hardware.source != "probe":
        return None
    chosen = hardware.gpus[:num_gpus]
    if all(gpu.uuid for gpu in chosen):
        return tuple(str(gpu.uuid) for gpu in chosen)
    return tuple(str(gpu.index) for gpu in chosen)
