"""TensorBoard as a tracker: event files in RUN/tensorboard, one for each supervisor of the run.

Every line of metrics.jsonl is one event over the optimizer's step. `lines.json` counts the lines that are on the disk,
so that a resumed run writes none twice. An attempt that went back to a checkpoint repeats steps: a session that starts
at such a step makes TensorBoard discard what it had read from that step on, so the later values count.

Needs only tensorboard, neither TensorFlow nor torch.
"""

import json
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from shardwise.launch.track.tracker import STEP, End, Line, Run, Tracker
from shardwise.trainer.spec import codec

FOLDER = "tensorboard"
_COUNT_FILE = "lines.json"
_FLUSH_EVERY_S = 2.0


class TensorboardTracker(Tracker):
    """Writes one event file."""

    name = "tensorboard"

    def __init__(self) -> None:
        self._writer: EventFileWriter | None = None
        self._folder = Path()
        self._first_line = self._num_lines = 0
        self._step: int | None = None  # of the last event; None before the session starts
        self._flushed_s = 0.0

    def begin(self, run: Run) -> None:
        """Opens the event file of this supervisor."""
        self._folder = run.run_dir / FOLDER
        self._folder.mkdir(exist_ok=True)
        self._first_line = self._num_lines = _read_count(self._folder)
        self._writer = EventFileWriter(str(self._folder))

    def step(self, line: Line) -> None:
        """Writes a line that is not there yet."""
        if line.place < self._first_line:
            return
        assert self._writer is not None
        if self._step is None or line.step <= self._step:
            log = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=line.step, wall_time=time.time(), session_log=log))
        values = [Summary.Value(tag=name, simple_value=number) for name, number in line.values.items() if name != STEP]
        self._writer.add_event(Event(step=line.step, wall_time=time.time(), summary=Summary(value=values)))
        self._step, self._num_lines = line.step, line.place + 1
        if time.monotonic() - self._flushed_s > _FLUSH_EVERY_S:
            self._flush()

    def end(self, end: End) -> None:
        """Writes the rest."""
        if self._writer is not None:
            self._flush()
            self._writer.close()

    def _flush(self) -> None:
        assert self._writer is not None
        self._writer.flush()
        codec.write_bytes(self._folder / _COUNT_FILE, json.dumps({"lines": self._num_lines}).encode() + b"\n")
        self._flushed_s = time.monotonic()


def _read_count(folder: Path) -> int:
    """Lines of metrics.jsonl in the event files; 0 without a count."""
    try:
        count = json.loads(codec.read_file(folder / _COUNT_FILE))["lines"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return count if isinstance(count, int) else 0
