"""Cores, clocks and memory bus of a card, which NVML reports and nvidia-smi does not: for cards without a row.

NVML's binding is imported here alone of launch/, and only where such a card is there. What a driver does not report
stays None, and a machine without the binding or without the library reports nothing.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from trainer.spec.hardware import Gpu


def with_card_facts(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """The cards, each without a row with what NVML reports of it."""
    unknown = [gpu for gpu in gpus if gpu.spec_name is None and gpu.uuid and not gpu.is_mig_on]
    if not unknown:
        return tuple(gpus)
    facts = _read([gpu.uuid or "" for gpu in unknown])
    return tuple(replace(gpu, **facts.get(gpu.uuid or "", {})) if gpu in unknown else gpu for gpu in gpus)


def _read(uuids: Sequence[str]) -> dict[str, dict[str, int]]:
    """By UUID, the fields of `Gpu` that NVML knows."""
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        return {uuid: _facts_of(pynvml, uuid) for uuid in uuids}
    finally:
        pynvml.nvmlShutdown()


def _facts_of(nvml: Any, uuid: str) -> dict[str, int]:  # noqa: ANN401  # NVML's binding is untyped
    questions = {
        "num_cuda_cores": ("nvmlDeviceGetNumGpuCores",),
        "max_clock_mhz": ("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        "memory_bus_bits": ("nvmlDeviceGetMemoryBusWidth",),
        "max_memory_clock_mhz": ("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
    }
    facts = {}
    for field, (function, *more) in questions.items():
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            answer = getattr(nvml, function)(handle, *more)
        except nvml.NVMLError:  # this card, or this driver, does not report it
            continue
        if answer:
            facts[field] = int(answer)
    return facts
