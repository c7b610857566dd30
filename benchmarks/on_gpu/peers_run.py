"""Runs trainers, each in a process of its own that trains one step whenever it is let go.

Alone: it is let go at once, every time. In turns: A B C D, B C D A, ..., while the others wait, so that what slows the
machine slows all alike. A process is ended after its last step: what a trainer does at the end of a run is no step.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from launch.process_record import descendants, record_of
from launch.supervisor import StopRequest
from on_gpu.peers_trainers import ROOT

START_S, STEP_S = 420.0, 180.0  # a step may compile
RUN_S = 540.0  # of all of it: what hangs is an answer too, within one call of the benchmark
END_S = 20.0
_OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "DefaultCPUAllocator: can't allocate")
_OFFLINE = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "WANDB_MODE": "disabled",
    "AXOLOTL_DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore",
}  # fmt: skip
_ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}


class PeerError(Exception):
    """A trainer that does not train: why, in a line."""


class Trained(NamedTuple):
    """What a trainer told, step by step."""

    seconds: list[float]  # of every step but the first, which loads and has no start
    losses: dict[int, float]
    memory: dict[str, int]  # the most of each counter
    versions: dict[str, str]


class TrainerRun:
    """A trainer's process, from its start to its end."""

    def __init__(
        self,
        words: Sequence[str],
        clock: Path,
        *,
        environment: Mapping[str, str],
        stop: StopRequest,
        needs_rank: bool = False,
    ) -> None:
        self._words, self._clock, self._stop = words, clock, stop
        self._environment = {**environment, **_OFFLINE, **(_ONE_RANK if needs_rank else {})}
        self.trained = Trained([], {}, {}, {})

    def __enter__(self) -> Self:
        for name in ("turn", "ended"):
            (self._clock / name).unlink(missing_ok=True)
            os.mkfifo(self._clock / name)
        self._turn, self._ended = (
            os.open(self._clock / name, os.O_RDWR) for name in ("turn", "ended")
        )  # waits for none
        self._unread = b""
        self._log = (self._clock / "log.txt").open("w+b")
        self._process = subprocess.Popen(
            self._words,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it with all that it started, and waits: what the next trainer measures must not be shared with it."""
        family = [*descendants(self._process.pid), record_of(self._process.pid)]
        for process in family:
            if process is not None:
                process.send(signal.SIGKILL)
        self._process.wait(END_S)
        gives_up_at = time.monotonic() + END_S
        while any(process is not None and process.is_alive for process in family) and time.monotonic() < gives_up_at:
            time.sleep(0.05)
        for descriptor in (self._turn, self._ended):
            os.close(descriptor)
        self._log.close()

    def let_go(self) -> None:
        """The next step may run."""
        os.write(self._turn, b"\n")

    def wait(self, *, within_s: float) -> None:
        """Until a step has ended; PeerError where none does."""
        told = self._next(within_s)
        while told.get("is_loss_alone"):
            told = self._next(within_s)
        if told["seconds"] is not None:
            self.trained.seconds.append(float(told["seconds"]))
        self.trained.versions.update(told.get("versions", {}))
        for name, value in told.items():
            if name.startswith("peak_") and value is not None:
                self.trained.memory[name] = max(value, self.trained.memory.get(name, 0))

    def wait_for_loss(self, step: int) -> None:
        """Lets the last step's loss be told, where a trainer tells it later; no longer than a moment."""
        self.let_go()
        gives_up_at = time.monotonic() + END_S
        while step not in self.trained.losses and time.monotonic() < gives_up_at:
            try:
                self._next(max(0.1, gives_up_at - time.monotonic()))
            except PeerError:
                return

    def _next(self, within_s: float) -> dict[str, Any]:
        """The next line that the clock tells."""
        gives_up_at = time.monotonic() + within_s
        while b"\n" not in self._unread:
            if select.select([self._ended], [], [], 0.5)[0]:
                self._unread += os.read(self._ended, 65536)
            elif self._stop.kind is not None:
                raise PeerError("stopped")
            elif self._process.poll() is not None:
                raise PeerError(self._last_words(f"ended with {self._process.returncode}"))
            elif time.monotonic() > gives_up_at:
                raise PeerError(self._last_words(f"no step within {within_s:.0f} s"))
        line, _, self._unread = self._unread.partition(b"\n")
        told: dict[str, Any] = json.loads(line)
        if told.get("loss") is not None:
            self.trained.losses[int(told["step"])] = float(told["loss"])
        return told

    def _last_words(self, what: str) -> str:
        """Why it ended, as far as its log says."""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace")
        if any(words in text for words in _OUT_OF_MEMORY):
            return "out of memory"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        said = (errors or lines)[-1:] or ["it said nothing"]
        return f"{what}: {said[0][:300]}"


def train_alone(run: TrainerRun, *, num_steps: int) -> Trained:
    """All steps of one trainer, one after the other."""
    ends_by = time.monotonic() + RUN_S
    with run:
        run.wait(within_s=_left(ends_by, START_S))
        for _ in range(num_steps - 1):
            run.let_go()
            run.wait(within_s=_left(ends_by, STEP_S))
        run.wait_for_loss(num_steps)
    return run.trained


def train_in_turns(runs: Sequence[TrainerRun], *, num_steps: int) -> None:
    """All steps of several trainers, a step each in turn; they are started one after the other."""
    entered: list[TrainerRun] = []
    ends_by = time.monotonic() + RUN_S
    try:
        for run in runs:
            entered.append(run.__enter__())
            run.wait(within_s=_left(ends_by, START_S))
        for number in range(1, num_steps):
            first = number % len(runs)
            for run in (*runs[first:], *runs[:first]):
                run.let_go()
                run.wait(within_s=_left(ends_by, STEP_S))
        for run in runs:
            run.wait_for_loss(num_steps)
    finally:
        for run in entered:
            run.__exit__()


def _left(ends_by: float, limit_s: float) -> float:
    """Seconds that a step may take; PeerError where none are left of the run's."""
    left_s = ends_by - time.monotonic()
    if left_s <= 0:
        raise PeerError(f"not done within {RUN_S:.0f} s")
    return min(left_s, limit_s)
