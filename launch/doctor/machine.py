"""What every check of `doctor` starts from: where it looks, the hardware, and what torch says of itself.

torch is asked in a process of its own with an end: a GPU in a bad state may hold whoever asks it for ever, and this
process never loads it. The first answer also brings torch's files into memory, so the processes after it start fast.
"""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from launch.inputs.hub import hub_cache
from launch.job import folders
from launch.probe.machine import read_hardware
from launch.probe.torch_fit import TorchAnswer, ask_torch
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.hardware import Hardware
from trainer.spec.value import Value

TORCH_TIMEOUT_S = 20.0
SMI_TIMEOUT_S = 8.0
SERVER_TIMEOUT_S = 4.0
SLURM_TIMEOUT_S = 6.0


class Place(Value, frozen=True, kw_only=True):
    """Where to look, and as whom; a test lays out a machine of its own below `root`."""

    environment: dict[str, str]
    root: Path = Path("/")
    working: Path = Path()  # where the command was given
    python: str = sys.executable
    hostname: str = ""
    cache: Path
    hub: Path  # the hub's cache
    output: Path  # below which runs write
    is_quick: bool = False
    server_timeout_s: float = SERVER_TIMEOUT_S  # for each answer of the hub, of wandb and of a proxy
    slurm_timeout_s: float = SLURM_TIMEOUT_S  # for each answer of the controller and of munge


class Machine(Value, frozen=True, kw_only=True):
    """A place with what was found there."""

    place: Place
    hardware: Hardware | None  # None: the driver of a GPU that is here fails
    obstacle: str | None = None  # its sentence and remedy
    torch: TorchAnswer = TorchAnswer()

    @property
    def environment(self) -> Mapping[str, str]:
        return self.place.environment

    @property
    def has_gpus(self) -> bool:
        return self.hardware is not None and bool(self.hardware.gpus)

    @property
    def num_gpus(self) -> int:
        return len(self.hardware.gpus) if self.hardware is not None else 0


def place_of(
    environment: Mapping[str, str] = os.environ,
    *,
    named: Mapping[str, str] = {},
    output: Path | None = None,
    is_quick: bool = False,
    **changes: object,
) -> Place:
    """This machine as it stands in the environment; `named` are the folders that a config.yaml names."""
    hub_home = named.get("huggingface")
    place = Place(
        environment=dict(environment),
        working=Path.cwd(),
        hostname=socket.gethostname(),
        cache=folders.cache_home(environment, configured=named.get("cache")),
        hub=hub_cache(Path(hub_home) if hub_home else None, environment),
        output=output or Path.cwd(),
        is_quick=is_quick,
    )
    return replace(place, **changes)


def read_machine(place: Place, *, timeout_s: float = TORCH_TIMEOUT_S, smi_timeout_s: float = SMI_TIMEOUT_S) -> Machine:
    """Looks at the hardware, and, unless it has to be quick, asks torch."""
    hardware, obstacle = None, None
    try:
        hardware = read_hardware(root=place.root, environment=place.environment, smi_timeout_s=smi_timeout_s)
    except EnvironmentFaultError as error:
        obstacle = str(error)
    torch = TorchAnswer()
    if not place.is_quick:
        torch = ask_torch(hardware, place.environment, python=place.python, timeout_s=timeout_s)
    return Machine(place=place, hardware=hardware, obstacle=obstacle, torch=torch)
