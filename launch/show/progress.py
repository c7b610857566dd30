"""Shows an attempt while it runs, from what its ranks write: metrics.jsonl (one object a step) and status.json (phase).

On a terminal a block is redrawn; elsewhere, in CI and under Slurm a plain line appears every few seconds, so that a log
stays readable. Nothing here can disturb the training: the files are only read, and nobody has to read what is shown.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.launch.show.live.screen import ViewOutput
from shardwise.launch.show.live.view import LiveView, MetricsTail, StepLog, read_phase, view_of
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.plan import Plan

_TRAINING = "training"


class Progress:
    """The view of one attempt, as its supervisor shows it."""

    def __init__(
        self,
        console: Console,
        *,
        attempt_dir: Path,
        plan: Plan,
        incidents: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempt_dir, self._plan, self._incidents = attempt_dir, plan, incidents
        self._clock = clock
        self._output = ViewOutput(console, environment, clock)
        self._tail = MetricsTail(attempt_dir.parent.parent / "metrics.jsonl")
        self._steps = StepLog()
        self._has_step = False  # of this attempt
        self._phase = ""
        for row in self._tail.read_new():  # of earlier attempts
            self._steps.note(row)

    @contextmanager
    def shown(self) -> Iterator["Progress"]:
        """Shows the attempt while the block runs; ends with its newest state."""
        with self._output.screen.shown():
            try:
                yield self
            finally:
                self._read_rows()
                if self._has_step:
                    self._output.show(self.view())

    def tick(self) -> None:
        """Looks once and shows what is new."""
        self._read_rows()
        self._read_phase()
        if self._output.is_due and (self._has_step or self._output.screen.is_block):
            self._output.show(self.view())

    def view(self) -> LiveView:
        """As far as the files tell."""
        state = self._phase if self._phase or not self._has_step else _TRAINING
        return view_of(
            self._steps,
            self._plan,
            title=self._attempt_dir.parent.parent.name,
            state=state,
            attempt=int(self._attempt_dir.name),
            incidents=self._incidents,
        )

    def _read_rows(self) -> None:
        now = self._clock()
        for row in self._tail.read_new():
            self._note(row, now)

    def _note(self, row: dict[str, Any], now: float) -> None:
        self._steps.note(row, seen_s=now)
        self._has_step = True
        if row.get("eval_loss") is not None:
            self._output.screen.print_line(f"step {row['step']}: held-out loss {row['eval_loss']:.4f}")

    def _read_phase(self) -> None:
        phase = read_phase(self._attempt_dir)
        if phase is None or phase == self._phase:
            return
        self._phase = phase
        if phase != _TRAINING and not self._output.screen.is_block:
            self._output.screen.print_line(f"{phase} ...")
