"""The values of `shardwise doctor`: findings, their text, and the machine that every check inspects.

A finding is a level, one sentence with the values found, and the remedy. torch is loaded in a process of its own with a
time limit, because a GPU in a bad state can block forever. That also caches torch's files, so that later processes
start fast.
"""

import os
import socket
import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path

from msgspec.structs import replace

from shardwise.launch.inputs.hub import hub_cache
from shardwise.launch.job import cache_home
from shardwise.launch.probe.machine import read_hardware
from shardwise.launch.probe.torch_fit import TorchResult, run_torch_check
from shardwise.launch.terminal import wrapped
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.units import format_seconds
from shardwise.trainer.spec.value import Value


class Level(StrEnum):
    """The worst first."""

    FAULT = "fault"  # training would fail
    WARNING = "warning"  # it would be slow, or fail later or for some jobs
    FINE = "fine"


class Finding(Value, frozen=True, kw_only=True):
    """A result of a check."""

    check: str = ""  # the row of `command.CHECKS` that found it
    level: Level
    sentence: str
    fix: str | None = None  # the command or the setting that fixes it; None if nothing is wrong


class Diagnosis(Value, frozen=True, kw_only=True):
    """Everything that was found, the worst first."""

    findings: tuple[Finding, ...]
    num_faults: int
    num_warnings: int

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.ENVIRONMENT if self.num_faults else ExitCode.DONE


def diagnosis_of(findings: Iterable[Finding]) -> Diagnosis:
    """The findings in order; a sentence of two checks appears once."""
    retained = list({finding.sentence: finding for finding in reversed(list(findings))}.values())[::-1]
    order = list(Level)
    return Diagnosis(
        findings=tuple(sorted(retained, key=lambda finding: order.index(finding.level))),
        num_faults=sum(finding.level is Level.FAULT for finding in retained),
        num_warnings=sum(finding.level is Level.WARNING for finding in retained),
    )


def fault(sentence: str, fix: str) -> Finding:
    """Training would fail."""
    return Finding(level=Level.FAULT, sentence=sentence, fix=fix)


def warning(sentence: str, fix: str) -> Finding:
    """Training would be slow, or fail later or for some jobs."""
    return Finding(level=Level.WARNING, sentence=sentence, fix=fix)


def fine(sentence: str) -> Finding:
    """The check passed."""
    return Finding(level=Level.FINE, sentence=sentence)


def explained(level: Level, message: str, *, otherwise: str) -> Finding:
    """A finding from the message of one of our errors or notes: the problem, then, on further lines or after a
    semicolon, the remedy; `otherwise` if the message has none."""
    first, _, rest = message.strip().partition("\n")
    if not rest:
        first, _, rest = message.strip().partition("; ")
    remedies = [line.strip().removeprefix("remedy: ").removeprefix("install it: ") for line in rest.splitlines()]
    fix = "; ".join(filter(None, remedies)) or otherwise
    return Finding(level=level, sentence=first.rstrip(";"), fix=fix)


_HEADS = {Level.FAULT: "faults: training would fail", Level.WARNING: "warnings", Level.FINE: "fine"}


def render_diagnosis(diagnosis: Diagnosis, *, seconds: float | None = None, width: int | None = None) -> str:
    """The findings by level, each with its remedy, and a last line such as `2 faults, 1 warning (8.59 s)`.

    Lines are wrapped at `width` columns; without it they are not.
    """
    lines: list[str] = []
    for level, head in _HEADS.items():
        found = [finding for finding in diagnosis.findings if finding.level is level]
        longest = max((len(finding.check) for finding in found), default=0)
        lines += [head] if found else []
        for finding in found:
            lines += wrapped(f"  {finding.check:<{longest}}  ", finding.sentence, width)
            lines += wrapped(f"  {'':<{longest}}  -> ", finding.fix, width) if finding.fix else []
        lines += [""] if found else []
    counts = ((diagnosis.num_faults, "fault"), (diagnosis.num_warnings, "warning"))
    last = ", ".join(f"{number or 'no'} {what}{'' if number == 1 else 's'}" for number, what in counts)
    return "\n".join([*lines, last + (f" ({format_seconds(seconds)})" if seconds is not None else "")])


TORCH_TIMEOUT_S = 20.0
SMI_TIMEOUT_S = 8.0
SERVER_TIMEOUT_S = 4.0
SLURM_TIMEOUT_S = 6.0


class Place(Value, frozen=True, kw_only=True):
    """Folders and environment to inspect; a test lays out a machine of its own below `root`."""

    environment: dict[str, str]
    root: Path = Path("/")
    working: Path = Path()  # where the command was given
    python: str = sys.executable
    hostname: str = ""
    cache: Path
    hub: Path  # the hub's cache
    output: Path  # below which runs write
    is_quick: bool = False
    server_timeout_s: float = SERVER_TIMEOUT_S  # of each request to the hub, wandb or a proxy
    slurm_timeout_s: float = SLURM_TIMEOUT_S  # of each request to the controller or munge


class Machine(Value, frozen=True, kw_only=True):
    """A place, its hardware and the check of its torch."""

    place: Place
    hardware: Hardware | None  # None: the driver of a GPU fails
    obstacle: str | None = None  # the sentence and the remedy of that failure
    torch: TorchResult = TorchResult()

    @property
    def environment(self) -> Mapping[str, str]:
        return self.place.environment

    @property
    def num_gpus(self) -> int:
        return len(self.hardware.gpus) if self.hardware is not None else 0

    @property
    def has_gpus(self) -> bool:
        return self.num_gpus > 0


def place_of(
    environment: Mapping[str, str] = os.environ,
    *,
    named: Mapping[str, str] = {},
    output: Path | None = None,
    is_quick: bool = False,
    **changes: object,
) -> Place:
    """This machine with an environment; `named` are the folders of a config.yaml."""
    hub_home = named.get("huggingface")
    place = Place(
        environment=dict(environment),
        working=Path.cwd(),
        hostname=socket.gethostname(),
        cache=cache_home(environment, configured=named.get("cache")),
        hub=hub_cache(Path(hub_home) if hub_home else None, environment),
        output=output or Path.cwd(),
        is_quick=is_quick,
    )
    return replace(place, **changes)


def read_machine(place: Place, *, timeout_s: float = TORCH_TIMEOUT_S, smi_timeout_s: float = SMI_TIMEOUT_S) -> Machine:
    """Probes the hardware and, unless `place.is_quick`, runs the check of torch."""
    hardware, obstacle = None, None
    try:
        hardware = read_hardware(root=place.root, environment=place.environment, smi_timeout_s=smi_timeout_s)
    except EnvironmentFaultError as error:
        obstacle = str(error)
    torch = TorchResult()
    if not place.is_quick:
        torch = run_torch_check(hardware, place.environment, python=place.python, timeout_s=timeout_s)
    return Machine(place=place, hardware=hardware, obstacle=obstacle, torch=torch)
