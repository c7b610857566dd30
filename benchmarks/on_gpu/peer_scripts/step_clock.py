"""Inside the process of a trainer: a line of JSON at the end of each step, with its seconds, loss and peak memory.

Uses only the standard library and the torch that the trainer has imported.
"""

import json
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "trl", "unsloth", "unsloth_zoo", "axolotl", "bitsandbytes",
    "datasets", "liger-kernel", "xformers",
)  # fmt: skip


class StepClock:
    """Writes FOLDER/steps.jsonl. A step counts from the end of the one before to its own end, the device included."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "steps.jsonl"
        self._ended_at: float | None = None

    def end_of_step(self, step: int, *, loss: float | None = None, peak_bytes: int | None = None) -> None:
        """Ends a step; `peak_bytes` is the trainer's own counter, if it resets the device's."""
        torch = _torch_on_cuda()
        if torch is not None:
            torch.cuda.synchronize()
        seconds = None if self._ended_at is None else time.perf_counter() - self._ended_at
        line: dict[str, Any] = {"step": step, "seconds": seconds, "loss": loss, **_memory(torch, peak_bytes)}
        self._write(line | ({"versions": _versions()} if seconds is None else {}))
        self._ended_at = time.perf_counter()

    def loss_of_step(self, step: int, loss: float) -> None:
        """Reports a loss that is known only after the step has ended."""
        self._write({"step": step, "loss": loss})

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _torch_on_cuda() -> Any:  # noqa: ANN401  # a module, or None
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _memory(torch: Any, peak_bytes: int | None) -> dict[str, int]:  # noqa: ANN401  # as above
    """Peak bytes since the step before; none without a GPU."""
    if torch is None:
        return {}
    peaks = {
        "peak_allocated_bytes": max(torch.cuda.max_memory_allocated(), peak_bytes or 0),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    torch.cuda.reset_peak_memory_stats()
    return peaks


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
