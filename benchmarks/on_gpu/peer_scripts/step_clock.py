"""Inside the process of a trainer: how long each step took, what it held, and a wait for the next turn.

Nothing but the standard library and a torch that the trainer has imported already. Two pipes of the clock's folder join
it to whoever started the process: `ended` takes a line of JSON at the end of each step, `turn` gives a line to let the
next one run. Both are opened at the first step.
"""

import json
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes", "datasets", "triton", "flash-attn",
    "liger-kernel", "unsloth", "axolotl", "llamafactory", "torchtitan", "shardwise",
)  # fmt: skip


class StepClock:
    """A step counts from where the process is let go to where the step has ended, the device too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._turn: IO[str] | None = None
        self._ended: IO[str] | None = None
        self._let_go_at: float | None = None

    def end_of_step(self, step: int, *, loss: float | None = None, peak_bytes: int | None = None) -> None:
        """Tells, and waits; `peak_bytes` is what the trainer's own counter had, where it resets the device's."""
        torch = _torch_on_cuda()
        if torch is not None:
            torch.cuda.synchronize()
        now = time.perf_counter()
        seconds = None if self._let_go_at is None else now - self._let_go_at
        is_first = self._ended is None
        told: dict[str, Any] = {"step": step, "seconds": seconds, "loss": loss, **_memory(torch, peak_bytes)}
        self._tell(told | ({"versions": _versions()} if is_first else {}))
        assert self._turn is not None
        self._turn.readline()
        self._let_go_at = time.perf_counter()

    def loss_of_step(self, step: int, loss: float) -> None:
        """Tells a loss that is known after the step has ended."""
        self._tell({"step": step, "loss": loss, "is_loss_alone": True})

    def _tell(self, told: dict[str, Any]) -> None:
        if self._ended is None:
            self._turn, self._ended = (self._folder / "turn").open(), (self._folder / "ended").open("w")
        print(json.dumps(told), file=self._ended, flush=True)


def _torch_on_cuda() -> Any:  # noqa: ANN401  # a module, or None
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _memory(torch: Any, peak_bytes: int | None) -> dict[str, int | None]:  # noqa: ANN401  # as above
    """The most that was allocated and reserved since the step before; without a GPU, the most that was resident."""
    if torch is None:
        return {"peak_resident_bytes": _resident_bytes()}
    told = {
        "peak_allocated_bytes": max(torch.cuda.max_memory_allocated(), peak_bytes or 0),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    torch.cuda.reset_peak_memory_stats()
    return told


def _resident_bytes() -> int | None:
    """VmHWM: the most memory of this process that was in RAM, libraries included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
