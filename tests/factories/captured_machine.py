"""Lays out a captured machine: its kernel files in a folder, and a program that answers as its nvidia-smi did."""

import shlex
from pathlib import Path

CAPTURED = Path(__file__).parents[1] / "captured"
MACHINES = tuple(sorted(folder.name for folder in CAPTURED.iterdir() if "slurm" not in folder.name))
GPU_MACHINES = tuple(name for name in MACHINES if (CAPTURED / name / "query-gpu.csv").exists())
_KERNEL_FILES = {
    "meminfo": "proc/meminfo", "cpuinfo": "proc/cpuinfo", "cgroup": "proc/self/cgroup",
    "mountinfo": "proc/self/mountinfo", "version": "proc/version",
}  # fmt: skip


class Machine:
    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.programs = folder / "bin"
        self.root.mkdir(parents=True)
        self.programs.mkdir()
        self.runs = folder / "nvidia-smi.runs"

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": str(self.programs)}

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def install_nvidia_smi(self, script: str) -> None:
        program = self.programs / "nvidia-smi"
        program.write_text(f'#!/bin/sh\necho "$*" >> {shlex.quote(str(self.runs))}\n{script}')
        program.chmod(0o755)

    def put_gpu_on_bus(
        self, address: str = "0000:01:00.0", pci_class: str = "0x030000", *, vendor: str = "0x10de"
    ) -> None:
        self.write(f"sys/bus/pci/devices/{address}/vendor", f"{vendor}\n")
        self.write(f"sys/bus/pci/devices/{address}/class", f"{pci_class}\n")

    def smi_runs(self) -> list[str]:
        return sorted(self.runs.read_text().splitlines()) if self.runs.exists() else []


def captured(name: str, file: str) -> str:
    path = CAPTURED / name / file
    return path.read_text() if path.exists() else ""


def lay_out(folder: Path, name: str) -> Machine:
    machine = Machine(folder)
    for file, path in _KERNEL_FILES.items():
        if (CAPTURED / name / file).exists():
            machine.write(path, captured(name, file))
    if name in GPU_MACHINES:
        machine.install_nvidia_smi(_answers(CAPTURED / name))
    return machine


def _answers(folder: Path) -> str:
    return f"""cd {shlex.quote(str(folder))} || exit 9
case "$*" in
    --query-gpu=*) exec cat query-gpu.csv ;;
    --query-compute-apps=*) exec cat compute-apps.csv ;;
    "topo -m") exec cat topo.txt ;;
    "topo -p2p r") exec cat p2p.txt ;;
    "nvlink -s") exec cat nvlink.txt ;;
    -L) exec cat list.txt ;;
    "") exec cat table.txt ;;
esac
echo "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help."
exit 6
"""
