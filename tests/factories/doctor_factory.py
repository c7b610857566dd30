"""Broken machines for `doctor`: kernel files below a folder, programs that stand in, libraries that stand in."""

import dataclasses
from pathlib import Path

from captured_machine import Machine as LaidOut
from fake_torch import FakeTorch
from gpu_machines import FIRST, H100, Card, machine_with, smi_script
from msgspec.structs import replace
from warm_python import SWITCH

from shardwise.launch.doctor.checks import CACHE, HUB_CACHE, OUTPUT, TORCH_TIMEOUT_S, Machine, read_machine
from shardwise.launch.doctor.command import CHECKS, run_checks
from shardwise.launch.doctor.finding import Diagnosis, Level, diagnosis_of
from shardwise.launch.probe.torch_fit import TorchResult
from shardwise.trainer.spec.messages.worker_requests import DeviceTrial, TorchFacts

MEMINFO = "MemTotal:       65536000 kB\nMemAvailable:   60000000 kB\nSwapTotal:             0 kB\n"
CUDA_13 = TorchFacts(version="2.13.0+cu130", cuda="13.0", devices=(DeviceTrial(),))


class BrokenMachine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.laid_out = LaidOut(folder)
        self.home = folder / "home"
        self.home.mkdir()
        self.write("proc/meminfo", MEMINFO)
        self.environment = {"PATH": f"{self.laid_out.programs}:/usr/bin:/bin", "HOME": str(self.home)}
        self.folders = {OUTPUT: folder / "work", CACHE: folder / "cache", HUB_CACHE: folder / "hub"}

    def write(self, path: str, text: str) -> None:
        self.laid_out.write(path, text)

    def install(self, name: str, script: str) -> Path:
        program = self.laid_out.programs / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return program

    def install_gpu(self, card: Card = H100, *, driver: str = "580.95.05", mode: str = "Default") -> None:
        machine = machine_with(dataclasses.replace(card, compute_mode=mode), driver=driver, driver_cuda="13.0")
        self.laid_out.install_nvidia_smi(smi_script(machine, self.folder))

    def add_module(self, name: str, source: str) -> Path:
        """A module that every Python started here finds before the installed one."""
        folder = self.folder / "modules"
        path = folder / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        if "." in name:
            (path.parent / "__init__.py").touch()
        path.write_text(source)
        self.environment["PYTHONPATH"] = str(folder)
        return folder

    def add_torch(self, problem: str | None = None) -> None:
        """A torch with code for Ampere and Hopper; `problem` is raised on the card."""
        torch = FakeTorch(self.folder / "modules")
        torch.write(machine_with(architectures=("sm_80", "sm_90")), {FIRST: problem})
        self.environment |= {"PYTHONPATH": str(torch.folder), SWITCH: "0"}  # it loads nothing large

    def read(self, *, loads_torch: bool = False, timeout_s: float = TORCH_TIMEOUT_S) -> Machine:
        return read_machine(
            self.environment, self.folders, loads_torch=loads_torch, root=self.laid_out.root, timeout_s=timeout_s
        )

    def diagnose(self, *names: str, torch: TorchFacts | None = None, timeout_s: float = TORCH_TIMEOUT_S) -> Diagnosis:
        """Findings of these checks; torch is loaded if `torch` is among them and no facts are given."""
        loads_torch = "torch" in names and torch is None
        machine = self.read(loads_torch=loads_torch, timeout_s=timeout_s)
        wanted = tuple(check for check in CHECKS if check.name in names)
        assert len(wanted) == len(names), names
        result = machine.torch if loads_torch else TorchResult(facts=torch)
        return diagnosis_of(run_checks(replace(machine, torch=result), wanted))


def reported(diagnosis: Diagnosis, level: Level) -> list[tuple[str, str | None]]:
    return [(finding.sentence, finding.fix) for finding in diagnosis.findings if finding.level is level]


def assert_reported(diagnosis: Diagnosis, level: Level, *findings: tuple[str, ...]) -> None:
    """The findings of the level are these, in order, each given by the facts that it or its remedy must name."""
    texts = [f"{sentence} -> {fix}" for sentence, fix in reported(diagnosis, level)]
    assert len(texts) == len(findings), texts
    for text, facts in zip(texts, findings, strict=True):
        assert [fact for fact in facts if fact not in text] == [], text


def add_package(folder: Path, name: str, version: str) -> None:
    """What pip leaves of a package that it installed into `folder`."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
