"""Feeds every tracker of one run from its files until the run ends: `python -m shardwise.launch.track.process RUN_DIR`.

The first line on standard input is a `TrackerOrder`, the second an `EndNotice`; end of file without the second means
that the supervisor died. Each tracker has a thread and a `RunReader` of its own: one that raises is switched off with a
line in the log, one that hangs delays no other. The process ignores the signals that stop a run, since the supervisor
handles those.

All output goes to RUN/logs/sinks.log, without secrets.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

from shardwise.launch.rundir.files import read_value
from shardwise.launch.rundir.metrics import NewLines, parse_row
from shardwise.launch.track.notify import NotifyTracker
from shardwise.launch.track.tracker import (
    NOT_SAVED,
    STEP,
    End,
    EndNotice,
    Incident,
    Line,
    Run,
    Tracker,
    TrackerOrder,
    measured_series,
    predicted_series,
    show,
)
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.messages.rank_files import STEP_PHASES, Heartbeat, read_heartbeat
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.secrets import redacted_output
from shardwise.trainer.spec.units import format_seconds

POLL_S = 0.5
_INCIDENTS_EVERY_S = 5.0
_MAX_END_S = 120.0  # a living supervisor waits less than this
_ORPHAN_END_S = 8.0  # after the supervisor died
_SWITCHED_OFF = 1
_NICENESS = 10  # below the ranks, which need the cores
_MIN_STALL_S = 120.0
_STALL_STEPS = 10  # usual step durations without a heartbeat
_NUM_TIMED_STEPS = 50


def main(argv: Sequence[str]) -> int:
    """Returns 0, or 1 if a tracker failed or did not end; the log has the reason."""
    run_dir = Path(argv[1])
    os.nice(_NICENESS)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _ignore)
    order = codec.decode(sys.stdin.buffer.readline(), TrackerOrder, origin="standard input")
    ending = Ending()
    feeds = [Feed(name, make, order, run_dir, ending) for name, make in makers_of(order, run_dir).items()]
    for feed in feeds:
        feed.start()
    line = sys.stdin.buffer.readline()  # returns at the end of the run
    ending.set(codec.decode(line, EndNotice, origin="standard input") if line.endswith(b"\n") else None)
    return _join(feeds, limit_s=_MAX_END_S if line else _ORPHAN_END_S)


def makers_of(order: TrackerOrder, run_dir: Path) -> Mapping[str, Callable[[], Tracker]]:
    """The constructor of each tracker that the order names."""
    makers: dict[str, Callable[[], Tracker]] = {
        "wandb": _make_wandb,
        "tensorboard": _make_tensorboard,
        "notify": partial(NotifyTracker, run_dir, name=order.name, notify=order.notify or ()),
    }
    return {name: makers[name] for name in order.names}


class Ending:
    """The notice of the supervisor, once it is there."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._notice: EndNotice | None = None

    def set(self, notice: EndNotice | None) -> None:
        """None: the supervisor died."""
        self._notice = notice
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)

    def read_end(self, reader: "RunReader") -> End:
        """The end of the run, with its report if that covers this supervisor."""
        if self._notice is None:
            return End(None, "the supervisor of the run died without reporting an end")
        return End(reader.read_report() if self._notice.has_report else None, self._notice.error)


class Feed(threading.Thread):
    """The thread of one tracker, which also loads it."""

    def __init__(
        self, name: str, make: Callable[[], Tracker], order: TrackerOrder, run_dir: Path, ending: Ending
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.has_failed = False
        self._make, self._order, self._run_dir, self._ending = make, order, run_dir, ending
        self._reader = RunReader(run_dir, first_attempt=order.first_attempt)
        self._has_begun = False
        self._incidents_s = 0.0

    def run(self) -> None:
        """Feeds the tracker to the end of the run, or until it fails."""
        try:
            tracker = self._make()
            is_over = False
            while not is_over:
                is_over = self._ending.wait(POLL_S)
                self._feed(tracker, is_over=is_over)
            tracker.end(self._ending.read_end(self._reader))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the other trackers go on
            self.has_failed = True
            traceback.print_exc()
            reason = (str(error).splitlines() or [""])[0]
            show(f"{self.name}: switched off: {type(error).__name__}: {reason}")

    def _feed(self, tracker: Tracker, *, is_over: bool) -> None:
        if not self._has_begun:
            plan = self._reader.plan(self._order.first_attempt)
            if plan is None:
                return
            self._has_begun = True
            tracker.begin(Run(self._run_dir, self._order, plan))
        for line in self._reader.read_lines():
            tracker.step(line)
            for incident in self._reader.incidents_of(line):
                tracker.incident(incident)
        if is_over or time.monotonic() - self._incidents_s > _INCIDENTS_EVERY_S:
            self._incidents_s = time.monotonic()
            for incident in self._reader.read_incidents():
                tracker.incident(incident)


class RunReader:
    """Reads a run directory for one tracker: its first plan, each line of metrics.jsonl once, incidents.

    A line is identified by its place in the file, by which a tracker finds the lines that it has already received. A
    line that is half written is read at the next call. A damaged line is skipped and counts as a place.
    """

    def __init__(self, run_dir: Path, *, first_attempt: int) -> None:
        self.run_dir = run_dir
        self.first_attempt = first_attempt
        self._new, self._num_lines = NewLines(run_dir / "metrics.jsonl"), 0
        self._predicted: dict[int, dict[str, float]] = {}
        self._last_failed = first_attempt - 1
        self._report_ns = 0
        self._is_finite = True
        self._problem = ""
        self._stall = StallWatch()

    def plan(self, attempt: int) -> Plan | None:
        """The plan of an attempt; None before it is written."""
        return read_value(self.run_dir / "attempts" / str(attempt) / "plan.json", Plan)

    def read_lines(self) -> Iterator[Line]:
        """The complete lines since the last call."""
        for line in self._new.read():
            self._num_lines += 1
            row = parse_row(line)
            if row is None:
                continue
            attempt = row.get("attempt", self.first_attempt)
            self._stall.note(row.get("step_s"))
            if attempt not in self._predicted:
                plan = self.plan(attempt)
                self._predicted[attempt] = {} if plan is None else predicted_series(plan.chosen, plan.device_kind)
            values = {**self._predicted[attempt], **measured_series(row)}
            yield Line(self._num_lines - 1, row[STEP], attempt, values)

    def incidents_of(self, line: Line) -> Iterator[Incident]:
        """The incident of a line without a finite loss; of several in a row, that of the first."""
        is_finite = "train/loss" in line.values and not line.values.get("train/skipped")
        if line.attempt >= self.first_attempt and not is_finite and self._is_finite:
            problem = "the loss is not finite" if "train/loss" not in line.values else "the step was skipped"
            yield Incident("non-finite step", f"step {line.step}: {problem}")
        self._is_finite = is_finite

    def read_incidents(self) -> Iterator[Incident]:
        """Attempts that failed since the last call, a checkpoint that was not saved, and a stall."""
        yield from self._failed_attempts()
        number = self.first_attempt
        while (self.run_dir / "attempts" / str(number + 1)).is_dir():
            number += 1
        heartbeat = read_heartbeat(self.run_dir / "attempts" / str(number), 0)
        problem = "" if heartbeat is None else heartbeat.problem
        if problem and not self._problem:
            yield Incident(NOT_SAVED, problem)
        self._problem = problem
        text = self._stall.check(heartbeat, now_s=time.monotonic())
        if text is not None:
            yield Incident("stalled", text)

    def read_report(self) -> Report | None:
        """The run's report; None if there is none."""
        return read_value(self.run_dir / "report.json", Report)

    def _failed_attempts(self) -> Iterator[Incident]:
        with suppress(OSError):
            changed_ns = (self.run_dir / "report.json").stat().st_mtime_ns
            if changed_ns == self._report_ns:
                return
            self._report_ns = changed_ns
            report = self.read_report()
            for record in () if report is None else report.history:
                if record.number > self._last_failed:
                    self._last_failed = record.number
                    if record.fault is not None:
                        where = f"attempt {record.number} at step {record.step} with {record.strategy}"
                        yield Incident(record.fault.replace("_", " "), f"{where}: {record.cause or 'unknown cause'}")


class StallWatch:
    """Reports once if rank 0 sends no heartbeat within a step for much longer than the duration of a step.

    The supervisor ends a run that hangs; this reports the stall before that.
    """

    def __init__(self) -> None:
        self._steps_s: list[float] = []
        self._heartbeat: Heartbeat | None = None
        self._since_s = 0.0
        self._is_reported = False

    def note(self, step_s: object) -> None:
        """Adds the duration of a step."""
        if isinstance(step_s, int | float):
            self._steps_s = [*self._steps_s[-_NUM_TIMED_STEPS + 1 :], float(step_s)]

    def check(self, heartbeat: Heartbeat | None, *, now_s: float) -> str | None:
        """The description of a stall, at the first call that finds it; else None."""
        if heartbeat != self._heartbeat or heartbeat is None or heartbeat.phase not in STEP_PHASES or not self._steps_s:
            self._heartbeat, self._since_s, self._is_reported = heartbeat, now_s, False
            return None
        silent_s, usual_s = now_s - self._since_s, median(self._steps_s)
        if self._is_reported or silent_s < max(_MIN_STALL_S, _STALL_STEPS * usual_s):
            return None
        self._is_reported = True
        return (
            f"no heartbeat in {heartbeat.phase} of step {heartbeat.step + 1} for {format_seconds(silent_s)}; "
            f"a step usually takes {format_seconds(usual_s)}"
        )


def _join(feeds: Sequence[Feed], *, limit_s: float) -> int:
    """Waits for the threads; the process ends without those that hang."""
    until_s = time.monotonic() + limit_s
    for feed in feeds:
        feed.join(max(0.0, until_s - time.monotonic()))
    late = [feed.name for feed in feeds if feed.is_alive()]
    if late:
        show(f"{' and '.join(late)}: did not end")
        os._exit(_SWITCHED_OFF)
    return _SWITCHED_OFF if any(feed.has_failed for feed in feeds) else 0


def _make_wandb() -> Tracker:
    from shardwise.launch.track.wandb import WandbTracker  # loads wandb

    return WandbTracker()


def _make_tensorboard() -> Tracker:
    from shardwise.launch.track.tensorboard import TensorboardTracker  # loads tensorboard and numpy

    return TensorboardTracker()


def _ignore(_number: int, _frame: object) -> None:
    """A handler, because child processes would inherit SIG_IGN."""


if __name__ == "__main__":
    with redacted_output():
        sys.exit(main(sys.argv))
