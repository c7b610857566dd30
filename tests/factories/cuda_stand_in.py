"""Machines with NVIDIA cards that are not there: a fake nvidia-smi, and a torch with a device `cuda`."""

import fcntl
import hashlib
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from runpy import run_path

import pytest
from gpu_machines import FAKE_CUDA, Card, Machine, smi_script
from machine import FILE, LIBRARY

from shardwise.launch.job import cache_home

__all__ = ["H100", "RTX_4060", "T4", "Card", "Machine", "machine_environment", "needs_no_cuda"]

RTX_4060 = Card(name="NVIDIA GeForce RTX 4060", capability=(8, 9), memory=8188, power_w=115, pcie=(4, 8))
T4 = Card(name="Tesla T4", capability=(7, 5), memory=15360, power_w=70, pcie=(3, 16), ecc="Enabled")
H100 = Card(
    name="NVIDIA H100 80GB HBM3", capability=(9, 0), memory=81559, power_w=700, ecc="Enabled", num_multiprocessors=132
)

# What torch was built for; importing torch for it would take a second in every collection.
_VERSION = run_path(str(distribution("torch").locate_file("torch/version.py")))
needs_no_cuda = pytest.mark.skipif(
    _VERSION["cuda"] is not None, reason="torch is built for CUDA here: the stand-in takes the place of a CUDA build"
)


def machine_environment(machine: Machine, folder: Path) -> dict[str, str]:
    programs = folder / "bin"
    programs.mkdir(parents=True)
    program = programs / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{smi_script(machine, folder)}")
    program.chmod(0o755)
    return {
        FILE: str(folder / "machine.pickle"),
        LIBRARY: str(device_library()),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(FAKE_CUDA), os.environ.get("PYTHONPATH")))),
        "PATH": os.pathsep.join((str(programs), os.environ["PATH"])),
    }


@cache
def device_library() -> Path:
    """The compiled device, which is built once for a torch and a source: half a minute the first time."""
    source = FAKE_CUDA / "device.cpp"
    key = hashlib.sha256(f"{_VERSION['__version__']}{sys.version}".encode() + source.read_bytes()).hexdigest()[:16]
    folder = cache_home() / "fake_cuda"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"device-{key}.so"
    with (folder / "lock").open("w") as lock:  # other workers of the tests want it too
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            made = library.with_suffix(f".{os.getpid()}")
            subprocess.run(_compiler(source, made), check=True)
            made.rename(library)
    return library


def _compiler(source: Path, library: Path) -> list[str]:
    import torch

    root = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{root / 'include'}"]
    linked = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    return [os.environ.get("CXX", "c++"), *flags, str(source), "-o", str(library), *linked]
