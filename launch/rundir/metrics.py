"""Reading of metrics.jsonl and of logs, whole and while they grow.

Every reader of a run uses this module. A line that is half written is read at the next call, a damaged one is left
out. Long files are read from their end, or thinned out. Links are not followed: in a run directory of another user they
may lead to files of the reader.
"""

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from shardwise.trainer.spec import codec

TAIL_BYTES = 64 * 1024  # of metrics.jsonl: a hundred steps
_MIN_TAIL_BYTES = 16 * 1024
_BYTES_A_LINE = 400  # of logs, generously: read for the last lines
_CHUNK_BYTES = 1 << 20
_MAX_LINE_BYTES = 1 << 20
MAX_METRICS_LINES = 10_000  # of metrics.jsonl, retained for a view or a report
LEAST_SAVE_S = 1e-3  # below it, no save was due


_MOST_BITS = 63  # of a figure; no sum of larger ones is exact, and some cannot even become a float
Whole = Annotated[int, msgspec.Meta(ge=-(1 << _MOST_BITS), le=(1 << _MOST_BITS) - 1)]


class Step(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A line of metrics.jsonl; a missing figure is None. A line with text in place of a figure is damaged."""

    step: Whole
    attempt: Whole = 1
    loss: float | None = None
    eval_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens: Whole | None = None
    step_s: float | None = None
    data_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    optimizer_s: float | None = None
    wait_s: float | None = None
    checkpoint_s: float | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    targets_per_s: float | None = None
    padding_share: float | None = None
    host_rss_bytes: Whole | None = None
    memory_allocated_bytes: Whole | None = None
    memory_reserved_bytes: Whole | None = None
    memory_peak_bytes: Whole | None = None
    memory_device_bytes: Whole | None = None
    mfu: float | None = None
    gpu_utilization: float | None = None
    gpu_power_w: float | None = None
    gpu_temperature_c: float | None = None
    gpu_throttle: str | None = None
    skipped: bool | None = None
    skipped_rows: tuple[Whole, ...] | None = None
    incidents: tuple[str, ...] = ()

    @property
    def targets_per_s_per_gpu(self) -> float | None:
        """Learned tokens per second of one device; None for a line of an earlier version."""
        if self.targets_per_s is None or not self.tokens_per_s or self.tokens_per_s_per_gpu is None:
            return None
        return self.targets_per_s * self.tokens_per_s_per_gpu / self.tokens_per_s

    @property
    def other_s(self) -> float | None:
        """Seconds of a step outside every measured phase."""
        parts = (self.data_s, self.forward_s, self.backward_s, self.optimizer_s, self.wait_s)
        return None if self.step_s is None else max(0.0, self.step_s - sum(part or 0.0 for part in parts))


class NewLines:
    """Complete lines of a file since the last call; of one that is longer than a MiB an empty line is read."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path, self._is_skipping = path, False
        self._offset = _end_of_last_line(path) if from_end else 0

    @property
    def num_bytes(self) -> int:
        """Bytes that have not been read; 0 while the file cannot be seen."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return 0
        return size - self._offset if size >= self._offset else size

    def read(self) -> Iterator[bytes]:
        """Lines in the order of the file; none while it cannot be read. A file that became shorter is read again."""
        rest = b""
        with suppress(OSError), codec.open_file(self.path, follows_link=False) as stream:
            if stream.seek(0, os.SEEK_END) < self._offset:
                self._offset, self._is_skipping = 0, False
            stream.seek(self._offset)
            while content := stream.read(_CHUNK_BYTES):
                *lines, rest = (rest + content).split(b"\n")
                if lines and self._is_skipping:
                    self._offset, self._is_skipping = self._offset + len(lines[0]), False
                    lines[0] = b""
                self._offset += sum(map(len, lines)) + len(lines)
                if len(rest) > _MAX_LINE_BYTES:
                    self._offset, rest, self._is_skipping = self._offset + len(rest), b"", True
                yield from lines


def _end_of_last_line(path: Path) -> int:
    try:
        with codec.open_file(path, follows_link=False) as stream:
            size = stream.seek(0, os.SEEK_END)
            begin = max(0, size - _MIN_TAIL_BYTES)
            stream.seek(begin)
            return begin + stream.read().rfind(b"\n") + 1
    except OSError:
        return 0


def tail_lines(path: Path, limit: int = TAIL_BYTES) -> list[str]:
    """The lines among the last bytes of a file; the first of them only if it is complete."""
    try:
        with codec.open_file(path, follows_link=False) as stream:
            size = stream.seek(0, os.SEEK_END)
            begin = max(0, size - limit - 1)
            stream.seek(begin)
            content = stream.read()
    except OSError:
        return []
    if begin:
        content = content.partition(b"\n")[2]
    return content.decode(errors="replace").splitlines()


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines of a file, fewer where they are extremely long."""
    size = path.stat().st_size if path.is_file() else 0
    limit = max(_MIN_TAIL_BYTES, count * _BYTES_A_LINE)
    most = min(size, 16 * limit)
    lines = tail_lines(path, limit)
    while len(lines) < count and limit < most:
        limit *= 4
        lines = tail_lines(path, limit)
    return lines[-count:] if count else []


_STEP, _ANY = msgspec.json.Decoder(Step), msgspec.json.Decoder()


def parse_step(line: bytes) -> Step | None:
    """The step of a line; None if the line is damaged."""
    try:
        return _STEP.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The figures of a step as they were written, also those that `Step` lacks; None if the line is damaged."""
    if parse_step(line) is None:
        return None
    row: dict[str, Any] = _ANY.decode(line)
    is_damaged = any(isinstance(value, int) and value.bit_length() > _MOST_BITS for value in row.values())
    return None if is_damaged else row


class ThinnedLines(NamedTuple):
    """Lines of metrics.jsonl, and what all of them add up to."""

    lines: list[bytes]
    num_steps: int
    training_s: float


def thinned_lines(new: NewLines) -> ThinnedLines:
    """All new lines of a short file, of a long one at most about `MAX_METRICS_LINES`; damaged ones are left out.

    Of each stretch it keeps the lowest and the highest loss, so that no spike is lost; of the whole file scores, saves,
    skipped steps, incidents, new peaks of memory, the first steps of an attempt and the last hundred lines.
    """
    num_bytes, lines = new.num_bytes, new.read()
    first = list(islice(lines, 100))
    stretch = num_bytes * len(first) // (sum(map(len, first)) or 1) * 2 // MAX_METRICS_LINES
    retained: dict[int, bytes] = {}
    last: deque[tuple[int, bytes]] = deque(maxlen=100)
    low = high = (math.nan, 0, b"")
    number, training_s, peak_bytes, num_early, attempt = 0, 0.0, 0, 0, 0
    for line in chain(first, lines):
        row = parse_step(line)
        if row is None:
            continue
        number += 1
        training_s += row.step_s or 0.0
        if row.attempt != attempt:
            attempt, num_early = row.attempt, 0
        num_early += 1
        is_peak = row.memory_peak_bytes is not None and row.memory_peak_bytes > peak_bytes
        if is_peak:
            peak_bytes = row.memory_peak_bytes or 0
        is_news = row.skipped or row.incidents or row.eval_loss is not None
        is_named = is_peak or is_news or (row.checkpoint_s or 0.0) >= LEAST_SAVE_S
        if stretch <= 2 or num_early <= 2 or (is_named and len(retained) < 2 * MAX_METRICS_LINES):
            retained[number] = line
        last.append((number, line))
        loss = math.inf if row.loss is None else row.loss
        low = low if low[0] <= loss else (loss, number, line)
        high = high if high[0] >= loss else (loss, number, line)
        if stretch > 2 and number % stretch == 0:
            retained[low[1]], retained[high[1]] = low[2], high[2]
            low = high = (math.nan, 0, b"")
    retained.update(last)
    return ThinnedLines([retained[place] for place in sorted(retained)], number, training_s)


class MetricsTail:
    """New complete lines of a metrics file since the last call; damaged lines are skipped."""

    def __init__(self, path: Path) -> None:
        self._new = NewLines(path)
        self.num_steps, self.training_s = 0, 0.0  # of all lines, those that are left out included

    def read_new(self) -> list[dict[str, Any]]:
        """Rows in the order of the file, of a long one the lines that a view needs (`thinned_lines`)."""
        thinned = thinned_lines(self._new)
        self.num_steps, self.training_s = self.num_steps + thinned.num_steps, self.training_s + thinned.training_s
        return [row for line in thinned.lines if (row := parse_row(line)) is not None]


class RecordedSteps(NamedTuple):
    """Steps of metrics.jsonl; of a long file those that `thinned_lines` keeps."""

    steps: tuple[Step, ...]
    num_steps: int = 0  # of the whole file
    training_s: float = 0.0


def read_steps(path: Path) -> RecordedSteps:
    """Every complete line, in the order of the file."""
    thinned = thinned_lines(NewLines(path))
    steps = tuple(step for line in thinned.lines if (step := parse_step(line)) is not None)
    return RecordedSteps(steps, thinned.num_steps, thinned.training_s)


def first_step(path: Path, attempt: int) -> int | None:
    """The step of the first line of an attempt; None if it has none."""
    steps = map(parse_step, NewLines(path).read())
    return next((step.step for step in steps if step is not None and step.attempt == attempt), None)


def tail_rows(path: Path, limit: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The complete rows among the last bytes of metrics.jsonl; damaged ones are skipped."""
    return [row for line in tail_lines(path, limit) if (row := parse_row(line.encode())) is not None]


NUM_RECENT_STEPS = 50


def recent_tokens_per_s(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Tokens per second of all ranks over these lines of metrics.jsonl together; None if none was timed."""
    timed = [row for row in rows if row.get("tokens_per_s") and row.get("step_s")]
    seconds = sum(row["step_s"] for row in timed)
    return sum(row["tokens_per_s"] * row["step_s"] for row in timed) / seconds if seconds else None
