"""What every check of `doctor` starts from: where it looks, the hardware, and what torch says of itself.

torch is asked in a process of its own with an end: a GPU in a bad state may hold whoever asks it for ever, and this
process never loads it. The first answer also brings torch's files into memory, so the processes after it start fast.
"""

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from launch import folders
from launch.doctor_process import ask
from launch.hub_files import hub_cache
from launch.probe import read_hardware
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.hardware import Hardware
from trainer.spec.torch_facts import TorchFacts
from trainer.spec.value import Value

TORCH_TIMEOUT_S = 20.0
SMI_TIMEOUT_S = 8.0
SERVER_TIMEOUT_S = 4.0
SLURM_TIMEOUT_S = 6.0
_PACKAGES = Path(__file__).resolve().parent.parent


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


class TorchAnswer(Value, frozen=True, kw_only=True):
    """What torch said, or why it said nothing; neither where it was not asked."""

    facts: TorchFacts | None = None
    problem: str | None = None
    is_slow: bool = False  # it had not loaded when its time was over, which says nothing else against it


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
    return msgspec.structs.replace(place, **changes)


def read_machine(place: Place, *, timeout_s: float = TORCH_TIMEOUT_S, smi_timeout_s: float = SMI_TIMEOUT_S) -> Machine:
    """Looks at the hardware, and, unless it has to be quick, asks torch."""
    torch = TorchAnswer() if place.is_quick else ask_torch(place, timeout_s=timeout_s)
    try:
        hardware = read_hardware(root=place.root, environment=place.environment, smi_timeout_s=smi_timeout_s)
    except EnvironmentFaultError as error:
        return Machine(place=place, hardware=None, obstacle=str(error), torch=torch)
    return Machine(place=place, hardware=hardware, torch=torch)


def ask_torch(place: Place, *, timeout_s: float = TORCH_TIMEOUT_S) -> TorchAnswer:
    """What `trainer.runtime.torch_facts` answers."""
    argv = [place.python, "-P", "-m", "trainer.runtime.torch_facts"]
    answer = ask(argv, environment=python_environment(place), timeout_s=timeout_s)
    if answer.obstacle is not None:
        return TorchAnswer(problem=answer.obstacle)
    if answer.exit_code is None:
        return TorchAnswer(problem=f"it did not load within {timeout_s:g} s", is_slow=True)
    lines = answer.output.splitlines()
    try:
        return TorchAnswer(facts=msgspec.json.decode(lines[-1] if lines else "", type=TorchFacts))
    except msgspec.DecodeError:
        return TorchAnswer(problem=answer.last_words)


def python_environment(place: Place) -> dict[str, str]:
    """The environment that our processes get: our packages first, nothing of the working directory."""
    inherited = place.environment.get("PYTHONPATH")
    packages = f"{_PACKAGES}{os.pathsep}{inherited}" if inherited else str(_PACKAGES)
    return {**place.environment, "PYTHONSAFEPATH": "1", "PYTHONPATH": packages, "PYTHONWARNINGS": "ignore"}
