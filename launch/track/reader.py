"""What a run directory says to sinks: its first plan, each line of metrics.jsonl once, and what went wrong meanwhile.

Only reads. A line keeps its place in the file, which is how a sink knows after a restart which lines it has told of.
Whatever is half written is there at the next look; a line that is damaged is passed over, and keeps its place.
"""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from launch.track.metrics import STEP, measured_series, predicted_series
from launch.track.tracker import Incident, Line
from trainer.spec import codec
from trainer.spec.errors import InputError
from trainer.spec.messages.heartbeat import STEP_PHASES, Heartbeat, read_heartbeat
from trainer.spec.plan import Plan
from trainer.spec.report import Report
from trainer.spec.units import format_seconds

_LONGEST_READ_BYTES = 4 * 1024 * 1024
_LEAST_STALL_S = 120.0
_STALL_STEPS = 10  # of the usual duration without a heartbeat
_NUM_STEPS_KEPT = 50


class RunReader:
    """One reader of a run directory; every sink has its own."""

    def __init__(self, run_dir: Path, *, first_attempt: int) -> None:
        self.run_dir = run_dir
        self.first_attempt = first_attempt
        self._offset = 0
        self._num_lines = 0
        self._predicted: dict[int, dict[str, float]] = {}
        self._told_attempts = first_attempt - 1
        self._report_ns = 0
        self._is_finite = True
        self._stall = StallWatch()

    def first_plan(self) -> Plan | None:
        """The plan of this supervisor's first attempt; None before there is one."""
        return self._plan(self.first_attempt)

    def read_lines(self) -> Iterator[Line]:
        """The lines that are new and whole."""
        for row in self._new_rows():
            self._num_lines += 1
            if row is None or not isinstance(row.get(STEP), int):
                continue
            attempt = row["attempt"] if isinstance(row.get("attempt"), int) else self.first_attempt
            self._stall.note(row.get("step_s"))
            values = {**self._predictions(attempt), **measured_series(row)}
            yield Line(self._num_lines - 1, row[STEP], attempt, values)

    def incidents_of(self, line: Line) -> Iterator[Incident]:
        """What a line tells of that a person wants to hear; the first of several in a row."""
        is_finite = "train/loss" in line.values and not line.values.get("train/skipped")
        if line.attempt >= self.first_attempt and not is_finite and self._is_finite:
            what = "the loss is no finite number" if "train/loss" not in line.values else "the step was skipped"
            yield Incident("non-finite step", f"step {line.step}: {what}")
        self._is_finite = is_finite

    def read_incidents(self) -> Iterator[Incident]:
        """Attempts that failed since the last look, and a silence that is longer than usual."""
        yield from self._failed_attempts()
        newest = self._newest_attempt()
        words = None if newest is None else self._stall.look(read_heartbeat(newest, 0), now_s=time.monotonic())
        if words is not None:
            yield Incident("stalled", words)

    def read_report(self) -> Report | None:
        """The run's report as it stands."""
        try:
            return codec.read(self.run_dir / "report.json", Report)
        except InputError:
            return None

    def _new_rows(self) -> Iterator[dict[str, Any] | None]:
        path = self.run_dir / "metrics.jsonl"
        while True:
            try:
                with path.open("rb") as stream:
                    stream.seek(self._offset)
                    content = stream.read(_LONGEST_READ_BYTES)
            except OSError:
                return
            whole = content[: content.rfind(b"\n") + 1]
            if not whole:
                return
            self._offset += len(whole)
            yield from map(_row, whole.split(b"\n")[:-1])

    def _predictions(self, attempt: int) -> dict[str, float]:
        if attempt not in self._predicted:
            plan = self._plan(attempt)
            self._predicted[attempt] = {} if plan is None else predicted_series(plan.chosen)
        return self._predicted[attempt]

    def _plan(self, attempt: int) -> Plan | None:
        try:
            return codec.read(self.run_dir / "attempts" / str(attempt) / "plan.json", Plan)
        except InputError:
            return None

    def _failed_attempts(self) -> Iterator[Incident]:
        with suppress(OSError):
            changed_ns = (self.run_dir / "report.json").stat().st_mtime_ns
            if changed_ns == self._report_ns:
                return
            self._report_ns = changed_ns
            report = self.read_report()
            for record in () if report is None else report.history:
                if record.number > self._told_attempts:
                    self._told_attempts = record.number
                    if record.fault is not None:
                        where = f"attempt {record.number} at step {record.step} with {record.strategy}"
                        yield Incident(record.fault.replace("_", " "), f"{where}: {record.cause or 'no reason given'}")

    def _newest_attempt(self) -> Path | None:
        number = self.first_attempt
        while (self.run_dir / "attempts" / str(number + 1)).is_dir():
            number += 1
        folder = self.run_dir / "attempts" / str(number)
        return folder if folder.is_dir() else None


class StallWatch:
    """Says once when rank 0 writes no heartbeat within a step for much longer than a step takes.

    The supervisor ends a run that hangs; this only tells of it before.
    """

    def __init__(self) -> None:
        self._steps_s: list[float] = []
        self._sign: Heartbeat | None = None
        self._since_s = 0.0
        self._is_told = False

    def note(self, step_s: object) -> None:
        """Another step took so long."""
        if isinstance(step_s, int | float):
            self._steps_s = [*self._steps_s[-_NUM_STEPS_KEPT + 1 :], float(step_s)]

    def look(self, sign: Heartbeat | None, *, now_s: float) -> str | None:
        """The sentence, at the first look at which the silence is too long."""
        if sign != self._sign or sign is None or sign.phase not in STEP_PHASES or not self._steps_s:
            self._sign, self._since_s, self._is_told = sign, now_s, False
            return None
        silent_s, usual_s = now_s - self._since_s, median(self._steps_s)
        if self._is_told or silent_s < max(_LEAST_STALL_S, _STALL_STEPS * usual_s):
            return None
        self._is_told = True
        return (
            f"no heartbeat in {sign.phase} of step {sign.step + 1} for {format_seconds(silent_s)}; "
            f"a step usually takes {format_seconds(usual_s)}"
        )


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
