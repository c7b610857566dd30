"""Says whether the installed torch can use the GPUs of this machine: `python -m trainer.runtime.torch_check`.

A GPU that is there but unusable is a fault with a remedy; planning for the CPU instead would hide it. Exit code 0: it
can be used, or there is none. 4: the lines on stderr say what to change.

The decision is a pure function of what was read. Minimum drivers are NVIDIA's, from the compatibility table of the
CUDA Toolkit release notes: 525.60.13 for any CUDA 12, 580.65.06 for CUDA 13.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

MINIMUM_DRIVER = {12: "525.60.13", 13: "580.65.06"}
_QUERY = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]


class VisibleGpu(NamedTuple):
    """A GPU as the driver sees it."""

    name: str
    driver: str
    compute_capability: tuple[int, int]


def parse_gpus(text: str) -> list[VisibleGpu]:
    """The lines of `nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader`."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and re.fullmatch(r"\d+\.\d+", fields[2]):
            major, minor = fields[2].split(".")
            gpus.append(VisibleGpu(fields[0], fields[1], (int(major), int(minor))))
    return gpus


def find_fault(
    gpus: Sequence[VisibleGpu],
    *,
    torch_version: str,
    cuda: str | None,
    architectures: Sequence[str],
    is_available: bool,
) -> list[str]:
    """What stands between torch and the GPUs, with the remedy; empty where nothing does."""
    if not gpus:
        return []
    named = f"{gpus[0].name} (driver {gpus[0].driver})"
    if cuda is None:
        return [
            f"{named} is here, but torch {torch_version} was built without CUDA",
            "remedy: pip install --force-reinstall torch==2.13.0 from an index that has the CUDA build",
        ]
    needed = MINIMUM_DRIVER.get(int(cuda.split(".")[0]))
    if needed is not None and _numbers(gpus[0].driver) < _numbers(needed):
        return [
            f"{named}: torch {torch_version} is built for CUDA {cuda}, which needs driver {needed} or newer",
            f"remedy: update the NVIDIA driver to {needed} or newer, or install a torch 2.13.0 built for an older CUDA",
        ]
    dropped = [gpu for gpu in gpus if not runs_on(gpu.compute_capability, architectures)]
    if dropped:
        major, minor = dropped[0].compute_capability
        return [
            f"{dropped[0].name} has compute capability {major}.{minor}; torch {torch_version} (CUDA {cuda}) has code "
            f"for {', '.join(architectures)} only",
            "remedy: install the torch 2.13.0 built for the newest CUDA 12, which keeps older architectures",
        ]
    if not is_available:
        return [
            f"{named} is here and the driver is new enough, but torch.cuda.is_available() is false",
            "remedy: look at CUDA_VISIBLE_DEVICES and the permissions of /dev/nvidia*; in a container: --gpus all",
        ]
    return []


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """True where binary code (same major, minor not above) or PTX (not above) fits the device."""
    for name in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name)
        if match is None:
            continue
        built = (int(match[2]), int(match[3]))
        if match[1] == "compute" and built <= capability:
            return True
        if match[1] == "sm" and built[0] == capability[0] and built[1] <= capability[1]:
            return True
    return False


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def read_gpus() -> list[VisibleGpu]:
    """The GPUs that nvidia-smi lists; none where it is missing or has no device."""
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(answer.stdout) if answer.returncode == 0 else []


def main() -> int:
    """Prints the fault, if any; returns the exit code."""
    gpus = read_gpus()
    fault = find_fault(
        gpus,
        torch_version=torch.__version__,
        cuda=torch.version.cuda,
        architectures=torch.cuda.get_arch_list() if gpus else [],
        is_available=torch.cuda.is_available(),
    )
    for line in fault:
        sys.stderr.write(line + "\n")
    return 4 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
