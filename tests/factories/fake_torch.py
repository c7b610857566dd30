"""A torch that `runtime.tools.torch_check` asks instead of the installed one, with cards that fail as a test wants."""

from collections.abc import Mapping
from pathlib import Path

from gpu_machines import Machine, uuid_of

from shardwise.launch.probe.torch_fit import runs_on

NO_CODE = "CUDA error: no kernel image is available for execution on the device"

_SOURCE = """
import os, sys
from pathlib import Path
from types import SimpleNamespace

CARDS, ARCHITECTURES, CUDA, VERSION, IS_AVAILABLE, CAN_MAP, PROBLEM, RUNS = {facts!r}
SETTING = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
IS_EXPANDABLE = "expandable_segments:True" in SETTING


class OutOfMemoryError(RuntimeError):
    pass


def visible():
    setting, names = os.environ.get("CUDA_VISIBLE_DEVICES"), list(CARDS)
    if setting is None:
        return names
    seen = []
    for entry in filter(None, setting.split(",")):
        found = [names[int(entry)]] if entry.isdigit() and int(entry) < len(names) else []
        found += [name for name in names if name.startswith(entry)]
        if not found:
            break
        seen += found
    return seen


def init():
    raise RuntimeError(PROBLEM)


class Block:
    def __init__(self, side):
        self.side = side

    def __matmul__(self, other):
        return self

    def __getitem__(self, place):
        return self.side


def ones(shape, device):
    if IS_EXPANDABLE and not CAN_MAP:
        raise RuntimeError("CUDA driver error: unknown error\\nException raised from ExpandableSegment")
    problem = CARDS[visible()[device]]
    if problem is not None:
        raise (OutOfMemoryError if "out of memory" in problem else RuntimeError)(problem + "\\nCUDA kernel errors ...")
    return Block(shape[0])


def device(kind, index):
    return index


def count():
    return len(visible()) * IS_AVAILABLE


__version__ = VERSION
version = SimpleNamespace(cuda=CUDA)
cuda = SimpleNamespace(
    init=init, is_available=lambda: count() > 0, device_count=count, get_arch_list=lambda: list(ARCHITECTURES),
    memory_snapshot=lambda: [{{"is_expandable": IS_EXPANDABLE}}],
)

if "shardwise.trainer.runtime.tools.torch_check" in sys.orig_argv:
    with Path(RUNS).open("a") as runs:
        runs.write(f"{{os.environ.get('CUDA_VISIBLE_DEVICES')}} {{SETTING}}\\n")
else:
    sys.path.remove(str(Path(__file__).parent))
    del sys.modules["torch"]
    import torch
"""


class FakeTorch:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs = folder / "torch_check.runs"

    def write(
        self, machine: Machine, problems: Mapping[str, str | None] = {}, *, problem: str = "No CUDA GPUs are available"
    ) -> None:
        """The build and the cards of `machine`; `problems`, by UUID, are raised on cards, `problem` where none is."""
        self.folder.mkdir(parents=True, exist_ok=True)
        has_code = {
            f"GPU-{uuid_of(index)}": not machine.architectures or runs_on(card.capability, machine.architectures)
            for index, card in enumerate(machine.cards)
        }
        cards = {uuid: None if is_so else NO_CODE for uuid, is_so in has_code.items()} | dict(problems)
        version = f"2.13.0+{'cpu' if machine.cuda is None else 'cu' + machine.cuda.replace('.', '')}"
        is_available = machine.is_usable and machine.cuda is not None
        facts = (
            cards, machine.architectures, machine.cuda, version, is_available, machine.has_expandable_segments, problem,
            str(self._runs),
        )  # fmt: skip
        (self.folder / "torch.py").write_text(_SOURCE.format(facts=facts))

    def runs(self) -> list[str]:
        return self._runs.read_text().splitlines() if self._runs.exists() else []
