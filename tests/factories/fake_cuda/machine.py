"""The machine that the stand-in pretends: read by the stand-in for torch.cuda and by the fake nvidia-smi alike."""

import os
import pickle
from dataclasses import dataclass
from pathlib import Path

FILE, LIBRARY = "FAKE_CUDA_MACHINE", "FAKE_CUDA_LIBRARY"
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU as its driver describes it; sizes in MiB."""

    name: str
    capability: tuple[int, int]
    memory: int
    reserved: int = 300  # what the driver keeps of `memory`
    held: int = 12  # what others hold of the rest
    power_w: float | None = 200
    pcie: tuple[int, int] = (4, 16)  # generation and lanes
    compute_mode: str = "Default"
    ecc: str = "[N/A]"
    mig: str = "[N/A]"
    mig_profiles: tuple[tuple[str, int], ...] = ()  # profile and MiB of each slice, where `mig` is Enabled
    num_multiprocessors: int = 24
    fields: tuple[tuple[str, str], ...] = ()  # answers of nvidia-smi that are others than these, by question

    @property
    def free(self) -> int:
        return self.memory - self.reserved - self.held


@dataclass(frozen=True, kw_only=True)
class Machine:
    cards: tuple[Card, ...]
    driver: str = "580.105.08"
    driver_cuda: str | None = None  # the newest that the driver has, in the head of the table; None: no such head
    cuda: str | None = "13.0"  # that torch was built for
    architectures: tuple[str, ...] = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
    is_usable: bool = True  # whether the driver lets torch initialise CUDA
    has_expandable_segments: bool = True  # whether memory can be mapped: not on WSL, nor on some vGPUs
    idle_share: float | None = None  # of the time, as its profiler records it; None: torch has no CUPTI
    processes: tuple[tuple[int, str, int], ...] = ()  # pid, program, MiB: of others, on the first card

    def write(self, path: Path) -> None:
        path.write_bytes(pickle.dumps(self))


def read_machine() -> Machine:
    machine: Machine = pickle.loads(Path(os.environ[FILE]).read_bytes())
    return machine


def slice_uuid_of(index: int, place: int) -> str:
    """The UUID of a slice of a card, by its place among the card's."""
    return f"MIG-{index:04x}{place:04x}-2222-3333-4444-555555555555"


def uuid_of(index: int) -> str:
    """The UUID of a card, without the prefix that nvidia-smi gives it."""
    return f"{index:08x}-1111-2222-3333-444444444444"
