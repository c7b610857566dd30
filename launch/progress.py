"""Shows a run from what its ranks write: metrics.jsonl (one object a step) and status.json (phase).

On a terminal one line is redrawn; elsewhere a plain line appears every few seconds, so that a log stays readable.
Nothing here can disturb the training: the files are only read.
"""

import json
import time
from pathlib import Path
from typing import Any

from launch.console import Console
from trainer.spec.units import format_bytes, format_count, format_seconds

_PLAIN_EVERY_S = 10.0
_BAR_WIDTH = 24


class MetricsTail:
    """New whole lines of a metrics file since the last look."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._offset = path.stat().st_size if from_end and path.is_file() else 0
        self._rest = b""

    def read_new(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        with self.path.open("rb") as stream:
            stream.seek(self._offset)
            content = stream.read()
        self._offset += len(content)
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [json.loads(line) for line in lines if line.strip()]


class Progress:
    """The progress line of one attempt."""

    def __init__(self, console: Console, *, attempt_dir: Path, metrics: MetricsTail, num_steps: int) -> None:
        self.console = console
        self.attempt_dir = attempt_dir
        self.metrics = metrics
        self.num_steps = num_steps
        self._last: dict[str, Any] = {}
        self._phase = ""
        self._shown_at = float("-inf")
        self._shown_step: int | None = None
        self._is_line_open = False
        self._first: tuple[int, float] | None = None
        self._started = time.monotonic()

    def tick(self) -> None:
        """Looks once and shows what is new."""
        for row in self.metrics.read_new():
            self._note(row)
        self._show_phase()
        self._show_step()

    def close(self) -> None:
        """Ends the redrawn line with the newest state."""
        for row in self.metrics.read_new():
            self._note(row)
        self._show_step(force=True)
        if self._is_line_open:
            self.console.stream.write("\n")
            self._is_line_open = False

    def _note(self, row: dict[str, Any]) -> None:
        now = time.monotonic()
        if self._first is None and "step" in row:
            self._first = (int(row["step"]), now)
        self._last.update(row)
        if row.get("eval_loss") is not None:
            self._write_line(f"step {row['step']}: held-out loss {row['eval_loss']:.4f}")

    def _show_phase(self) -> None:
        path = self.attempt_dir / "status.json"
        try:
            phase = str(json.loads(path.read_text())["phase"])
        except (OSError, ValueError, KeyError):
            return
        if phase != self._phase:
            self._phase = phase
            if phase != "training":
                self._write_line(f"{phase} ...")

    def _show_step(self, *, force: bool = False) -> None:
        if "step" not in self._last or (self._last["step"] == self._shown_step and not self.console.is_terminal):
            return
        now = time.monotonic()
        if not force and now - self._shown_at < (0.2 if self.console.is_terminal else _PLAIN_EVERY_S):
            return
        text = progress_line(self._last, num_steps=self.num_steps, seconds_left=self._seconds_left(now))
        if self.console.is_terminal:
            self.console.stream.write(f"\r\x1b[2K{text}")
            self.console.stream.flush()
            self._is_line_open = True
        else:
            self.console.line(text)
        self._shown_at, self._shown_step = now, self._last["step"]

    def _seconds_left(self, now: float) -> float | None:
        if self._first is None or self._last["step"] <= self._first[0]:
            return None
        first_step, first_time = self._first
        per_step: float = (now - first_time) / (self._last["step"] - first_step)
        steps_left: int = self.num_steps - self._last["step"]
        return max(0.0, steps_left * per_step)

    def _write_line(self, text: str) -> None:
        if self._is_line_open:
            self.console.stream.write("\r\x1b[2K")
            self._is_line_open = False
        self.console.line(text)


def progress_line(row: dict[str, Any], *, num_steps: int, seconds_left: float | None) -> str:
    """`[#####-----] 50/100  loss 4.12  6.1k tokens/s  310 MiB  1 min 10 s left`."""
    step = int(row["step"])
    filled = min(_BAR_WIDTH, _BAR_WIDTH * step // max(1, num_steps))
    parts = [f"[{'#' * filled}{'-' * (_BAR_WIDTH - filled)}] {step}/{num_steps}"]
    if row.get("loss") is not None:
        parts.append(f"loss {row['loss']:.4f}")
    if row.get("tokens_per_s"):
        parts.append(f"{format_count(row['tokens_per_s'])} tokens/s")
    memory = row.get("memory_peak_bytes") or row.get("memory_allocated_bytes")
    if memory:
        parts.append(format_bytes(int(memory)))
    if seconds_left is not None:
        parts.append(f"{format_seconds(seconds_left)} left")
    return "  ".join(parts)
