"""Looks at this machine: which devices a plan may use, what joins them, what surrounds them. Measures only when asked.

    read_gpus + read_host -> visible (CUDA_VISIBLE_DEVICES) -> selected (--gpus, busy, uniform) -> Hardware

Nothing is guessed: what is not known is None, what is left out is named in `Hardware.excluded`, and what a person
should know beside it in `Hardware.notes`. A GPU that is there while its driver fails stops the probe with the remedy,
because a plan for the CPU would be a silent disappointment; `CUDA_VISIBLE_DEVICES=` (empty) asks for that plan.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from launch.probe.gpu_selection import free_memory_note, select_gpus, visible_devices, visible_gpus
from launch.probe.gpus import TIMEOUT_S, GpuFindings, amd_notes, read_gpus
from launch.probe.installed import installed_version, unfit_version
from launch.probe.surroundings import read_host
from launch.probe.text import describe_hardware
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.hardware import Gpu, Hardware

__all__ = ["describe_hardware", "read_hardware", "read_libraries", "select_gpus", "visible_devices"]

_HIDES_ALL = ("", "-1", "NoDevFiles")
LIBRARIES = (
    "torch",
    "accelerate",
    "transformers",
    "deepspeed",
    "peft",
    "bitsandbytes",
    "galore-torch",
    "lion-pytorch",
    "datasets",
    "tokenizers",
    "safetensors",
    "triton",
    "flash-attn",
    "kernels",
    "transformer-engine",
    "liger-kernel",
    "torchao",
    "wandb",
)


def read_hardware(
    *,
    gpus: tuple[int, ...] | None = None,
    measure: bool = False,
    vram_cap_bytes: int | None = None,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    smi_timeout_s: float = TIMEOUT_S,
) -> Hardware:
    """This machine as a plan may use it.

    InputError for an index in `gpus` that does not exist; EnvironmentFaultError where a GPU is there and its driver
    does not answer. `measure` adds the speed of disks, of the device and of the links between devices: half a minute,
    a few minutes at most where something hangs.
    """
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    findings = read_gpus(root=root, environment=environment, timeout_s=smi_timeout_s)
    failure_notes = _failure_notes(findings, hides_all=setting is not None and setting.strip() in _HIDES_ALL)
    visible, hidden = visible_gpus(findings.gpus, setting)
    chosen, left_out = select_gpus(visible, wanted=gpus, torch_version=installed_version("torch"))
    uneven = free_memory_note(chosen)
    host = read_host(root=root, environment=environment)
    hardware = Hardware(
        gpus=chosen,
        host=host,
        links=tuple(link for link in findings.links if {link.a, link.b} <= {gpu.index for gpu in chosen}),
        excluded=(*findings.excluded, *hidden, *left_out),
        notes=(
            *findings.notes,
            *failure_notes,
            *(() if findings.gpus else amd_notes(root)),
            *([uneven] if uneven else []),
            *_mixed_order_note(findings.gpus, setting),
        ),
        libraries=read_libraries(),
        unfit_libraries=_unfit_libraries(),
        vram_cap_bytes=vram_cap_bytes,
        can_expand_segments=not host.is_wsl,
    )
    return _with_measurements(hardware) if measure else hardware


def read_libraries() -> dict[str, str]:
    """Versions of the installed libraries that decide what a plan can use, from their metadata; none is imported."""
    return {name: version for name in LIBRARIES if (version := installed_version(name)) is not None}


def _unfit_libraries() -> dict[str, str]:
    """Of those that only another library loads: the ones at a version that it leaves aside, and its words."""
    unfit = unfit_version("kernels", user="transformers")
    return {} if unfit is None else {"kernels": unfit}


def _failure_notes(findings: GpuFindings, *, hides_all: bool) -> tuple[str, ...]:
    failure = findings.failure
    if failure is None:
        return ()
    if not hides_all and (failure.proves_gpu or findings.is_gpu_on_bus):
        raise EnvironmentFaultError(
            f"{failure.sentence}\nto train on the CPU all the same, set CUDA_VISIBLE_DEVICES= (empty)"
        )
    return (failure.sentence.replace("\n", "; "),)


def _mixed_order_note(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[str, ...]:
    """CUDA counts the fastest card first unless told otherwise; on mixed machines numbers may mean other cards."""
    has_numbers = setting is not None and any(entry.strip().isdigit() for entry in setting.split(","))
    if not has_numbers or len({gpu.name for gpu in gpus}) < 2:
        return ()
    return (
        f"CUDA_VISIBLE_DEVICES={setting} is read with the numbers of nvidia-smi; "
        "on a machine of several models CUDA itself may count otherwise",
    )


def _with_measurements(hardware: Hardware) -> Hardware:
    # Imported here: an ordinary probe starts faster without them.
    import tempfile

    from launch.probe.measure.disk import measure_disks
    from launch.probe.measure.links import judged_links
    from launch.probe.measure.rates import measure_rates

    folders = [Path(tempfile.gettempdir()), Path.cwd(), Path.home()]
    disks, disk_notes = measure_disks(hardware.host.disks, folders)
    found = measure_rates(hardware)
    return msgspec.structs.replace(
        hardware,
        host=msgspec.structs.replace(hardware.host, disks=disks),
        links=judged_links(hardware.links, found.rates),
        rates=found.rates,
        notes=(*hardware.notes, *disk_notes, *found.notes),
    )
