"""Machines that people have: their cards and drivers, laid out with a fake nvidia-smi and kernel files."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from captured_machine import Machine as LaidOut
from captured_machine import captured
from warm_python import REAL_PYTHON

FAKE_CUDA = Path(__file__).with_name("fake_cuda")
sys.path.append(str(FAKE_CUDA))

from machine import FILE, Card, Machine, uuid_of  # noqa: E402

__all__ = ["AMD", "FIRST", "GPU_MACHINES", "H100", "SECOND", "Card", "Machine", "lay_out_gpus", "uuid_of"]

FIRST, SECOND = (f"GPU-{uuid_of(index)}" for index in range(2))  # UUIDs
RTX_4090 = Card(name="NVIDIA GeForce RTX 4090", capability=(8, 9), memory=24564)
H100 = Card(name="NVIDIA H100 80GB HBM3", capability=(9, 0), memory=81559)
V100 = Card(name="Tesla V100-SXM2-32GB", capability=(7, 0), memory=32768)
AMD = "0x1002"  # of PCI
CUDA_13 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")  # as PyPI's wheel of the locked torch was built


def machine_with(*cards: Card, **changes: object) -> Machine:
    return replace(Machine(cards=cards, architectures=CUDA_13), **changes)


def _card(name: str, capability: tuple[int, int], memory: int, **facts: Any) -> Card:
    return Card(name=name, capability=capability, memory=memory, **facts)


_OLD_CARD = _card("NVIDIA GeForce GTX 1050 Ti", (6, 1), 4096)
_RTX_3080 = _card("NVIDIA GeForce RTX 3080", (8, 6), 10240)
_RTX_4060 = _card("NVIDIA GeForce RTX 4060", (8, 9), 8188)
GPU_MACHINES = {
    "rtx4090_and_old_card": machine_with(RTX_4090, _OLD_CARD),
    "laptop_4060": machine_with(_card("NVIDIA GeForce RTX 4060 Laptop GPU", (8, 9), 8188, held=700)),
    "t4": machine_with(_card("Tesla T4", (7, 5), 15360)),
    "v100": machine_with(V100),
    "rtx5090": machine_with(_card("NVIDIA GeForce RTX 5090", (12, 0), 32607)),
    "wsl_rtx3080": machine_with(_RTX_3080, has_expandable_segments=False),
    "cuda_compat_h100": machine_with(H100, driver="550.90.07"),
    "old_driver": machine_with(_RTX_4060, driver="535.183.01", is_usable=False),
    "vgpu": machine_with(_card("GRID T4-16Q", (7, 5), 16384), has_expandable_segments=False),
    "two_different": machine_with(RTX_4090, _card("NVIDIA GeForce RTX 3060", (8, 6), 12288)),
    "amd": machine_with(),
}
_WSL = ("wsl_rtx3080",)
_AMD_GPUS = {"amd": ("0000:03:00.0", "0000:83:00.0")}


def smi_script(machine: Machine, folder: Path) -> str:
    """Lines of a shell script that answers as nvidia-smi does on the machine, which is written into the folder."""
    file = folder / "machine.pickle"
    machine.write(file)
    program = shlex.join([REAL_PYTHON, "-I", "-S", str(FAKE_CUDA / "nvidia_smi.py")])
    return f'export {FILE}={shlex.quote(str(file))}\nexec {program} "$@"\n'


def lay_out_gpus(folder: Path, machine: Machine | str) -> LaidOut:
    folder.mkdir(parents=True, exist_ok=True)
    laid_out = LaidOut(folder)
    laid_out.write("proc/meminfo", "MemTotal: 65536000 kB\nMemAvailable: 60000000 kB\n")
    if machine in _WSL:
        laid_out.write("proc/version", captured("wsl_rtx3080", "version"))
    for address in _AMD_GPUS.get(str(machine), ()):
        laid_out.put_gpu_on_bus(address, vendor=AMD)
    known = GPU_MACHINES[machine] if isinstance(machine, str) else machine
    if known.cards:
        laid_out.install_nvidia_smi(smi_script(known, folder))
    return laid_out
