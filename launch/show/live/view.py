"""The state of a run as a value, made from the plan and the files that the ranks write.

`shardwise train` makes a view of its own attempt, `shardwise watch` one of a run directory; `live.text` draws both.
Memory and phases are those of rank 0, speed is that of all ranks. Of metrics.jsonl only complete lines are read; a line
that is half written is read at the next call.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Plan

_CHUNK_BYTES = 8 << 20


class MetricsTail:
    """New complete lines of a metrics file since the last call; damaged lines are skipped."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._offset = path.stat().st_size if from_end and path.is_file() else 0
        self._rest = b""

    def read_new(self) -> list[dict[str, Any]]:
        """Rows in the order of the file; none while it cannot be read. A file that became shorter is read again."""
        rows: list[dict[str, Any]] = []
        try:
            with self.path.open("rb") as stream:
                if stream.seek(0, 2) < self._offset:
                    self._offset, self._rest = 0, b""
                stream.seek(self._offset)
                while content := stream.read(_CHUNK_BYTES):
                    self._offset += len(content)
                    *lines, self._rest = (self._rest + content).split(b"\n")
                    rows += [row for line in lines if (row := parse_row(line)) is not None]
        except OSError:  # not there yet, or out of sight for a while
            return rows
        return rows


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The figures of a step; None if the line is no object with a step."""
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def read_phase(attempt_dir: Path) -> str | None:
    """The phase that the ranks of an attempt report; None before the first report or while it is written."""
    try:
        status = msgspec.json.decode((attempt_dir / "status.json").read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    phase = status.get("phase") if isinstance(status, dict) else None
    return phase if isinstance(phase, str) else None


_MOST_POINTS = 512


class Point(NamedTuple):
    """A value at a step; of several steps, their mean at the last of them."""

    step: int
    value: float
    num_steps: int = 1


class Curve:
    """Points in the order of their steps; neighbours are joined if there are too many."""

    def __init__(self) -> None:
        self._points: list[Point] = []

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(self._points)

    def add(self, step: int, value: float) -> None:
        """A repeated step, after a run went back to a checkpoint, replaces the points from that step on."""
        while self._points and self._points[-1].step >= step:
            self._points.pop()
        self._points.append(Point(step, value))
        if len(self._points) > _MOST_POINTS:
            self._points = _halved(self._points)


def sparkline(points: Sequence[Point], *, width: int, levels: str) -> str:
    """The curve in `width` characters, the lowest value as the first of `levels`, the highest as the last.

    Each character is the mean of a range of steps; a short curve has one character a point.
    """
    means = _columns(points, width)
    if not means:
        return ""
    low, high = min(means), max(means)
    if high == low:
        return levels[0] * len(means)
    return "".join(levels[round((mean - low) / (high - low) * (len(levels) - 1))] for mean in means)


def _halved(points: Sequence[Point]) -> list[Point]:
    """Halves the number of points in the older half; the newer half is unchanged."""
    old, new = points[: len(points) // 2], points[len(points) // 2 :]
    pairs = [old[place : place + 2] for place in range(0, len(old), 2)]
    return [_joined(pair) for pair in pairs] + list(new)


def _joined(points: Sequence[Point]) -> Point:
    num_steps = sum(point.num_steps for point in points)
    return Point(points[-1].step, sum(point.value * point.num_steps for point in points) / num_steps, num_steps)


def _columns(points: Sequence[Point], width: int) -> list[float]:
    """Means of equal ranges of steps; one without a point repeats the previous mean."""
    if len(points) <= width:
        return [point.value for point in points]
    first, last = points[0].step, points[-1].step
    ranges: list[list[Point]] = [[] for _ in range(width)]
    for point in points:
        ranges[(point.step - first) * width // (last - first + 1)].append(point)
    means: list[float] = []
    for members in ranges:
        means.append(_joined(members).value if members else means[-1])
    return means


_NUM_RECENT = 50
_LEAST_SEEN_S = 2.0  # before the pace of the steps that appeared is used


class MemoryGauge(NamedTuple):
    """Bytes of rank 0; None if not measured."""

    used_bytes: int | None  # of the card, or of the rank's RAM on a CPU
    total_bytes: int | None  # the card under its cap, or the machine's RAM
    place: str  # card | RAM
    predicted_bytes: int | None  # of what is used
    peak_bytes: int | None = None  # allocated
    predicted_peak_bytes: int | None = None


class CardFigures(NamedTuple):
    """The driver's last readings of the GPU of rank 0."""

    utilization: float | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttle: str | None = None


class LiveView(NamedTuple):
    """A moment of a run."""

    title: str
    state: str = ""  # training, evaluating, waiting in the queue
    step: int | None = None
    num_steps: int | None = None
    attempt: int = 1
    seconds_left: float | None = None
    curve: tuple[Point, ...] = ()  # of the loss
    loss: float | None = None
    eval_loss: float | None = None
    lr: float | None = None
    tokens_per_s: float | None = None
    predicted_tokens_per_s: float | None = None
    mfu: float | None = None
    memory: MemoryGauge | None = None
    card: CardFigures = CardFigures()
    num_skipped: int = 0
    incidents: tuple[str, ...] = ()


class StepLog:
    """The steps of a run as they come in."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}  # the newest figure of each name
        self.num_skipped = 0
        self._curve = Curve()
        self._recent: deque[dict[str, Any]] = deque(maxlen=_NUM_RECENT)
        self._first_seen: tuple[int, float] | None = None
        self._last_seen: tuple[int, float] | None = None

    @property
    def curve(self) -> tuple[Point, ...]:
        """The loss."""
        return self._curve.points

    @property
    def step(self) -> int | None:
        return self.last.get("step")

    @property
    def newest(self) -> dict[str, Any]:
        """The last line; a figure that it lacks no longer applies."""
        return self._recent[-1] if self._recent else {}

    def note(self, row: dict[str, Any], *, seen_s: float | None = None) -> None:
        """Adds a line of metrics.jsonl; `seen_s` is the time when it appeared, None if it was there before."""
        if row.get("attempt") != self.last.get("attempt"):
            self._recent.clear()
            self._first_seen = self._last_seen = None
        self._recent.append(row)
        self.last.update(row)
        self.num_skipped += bool(row.get("skipped"))
        if isinstance(row.get("loss"), int | float):
            self._curve.add(row["step"], float(row["loss"]))
        if seen_s is not None:
            self._first_seen = self._first_seen or (row["step"], seen_s)
            self._last_seen = (row["step"], seen_s)

    def tokens_per_s(self) -> float | None:
        """The rate over the last steps together."""
        timed = [row for row in self._recent if row.get("tokens_per_s") and row.get("step_s")]
        seconds = sum(row["step_s"] for row in timed)
        return sum(row["tokens_per_s"] * row["step_s"] for row in timed) / seconds if seconds else None

    def seconds_left(self, num_steps: int) -> float | None:
        """By the pace at which steps appeared, evaluations and saves included; else by the steps alone."""
        if self.step is None or self.step >= num_steps:
            return None
        per_step = self._seen_pace()
        if per_step is None:
            steps_s = [row["step_s"] for row in self._recent if row.get("step_s") is not None]
            per_step = sum(steps_s) / len(steps_s) if steps_s else None
        return None if per_step is None else (num_steps - self.step) * per_step

    def _seen_pace(self) -> float | None:
        if self._first_seen is None or self._last_seen is None:
            return None
        steps, seconds = self._last_seen[0] - self._first_seen[0], self._last_seen[1] - self._first_seen[1]
        return seconds / steps if steps > 0 and seconds >= _LEAST_SEEN_S else None


def view_of(
    steps: StepLog,
    plan: Plan | None,
    *,
    title: str,
    state: str,
    attempt: int = 1,
    incidents: Sequence[str] = (),
    is_running: bool = True,
) -> LiveView:
    """The view after these steps; fields that only a plan has are None without one."""
    row, num_steps = steps.last, None if plan is None else plan.schedule.num_steps
    chosen = None if plan is None else plan.chosen
    return LiveView(
        title=title,
        state=state,
        step=steps.step,
        num_steps=num_steps,
        attempt=attempt,
        seconds_left=steps.seconds_left(num_steps) if is_running and num_steps is not None else None,
        curve=steps.curve,
        loss=row.get("loss"),
        eval_loss=row.get("eval_loss"),
        lr=row.get("lr"),
        tokens_per_s=steps.tokens_per_s(),
        predicted_tokens_per_s=None if chosen is None else chosen.speed.tokens_per_s_per_gpu * chosen.num_ranks,
        mfu=row.get("mfu"),
        memory=memory_gauge(row, plan),
        card=CardFigures(*(steps.newest.get(f"gpu_{name}") for name in CardFigures._fields)),
        num_skipped=steps.num_skipped,
        incidents=tuple(incidents),
    )


def memory_gauge(row: dict[str, Any], plan: Plan | None) -> MemoryGauge | None:
    """Rank 0's memory, on a GPU of the card, on a CPU of the RAM; None before the first step."""
    if not row:
        return None
    peak = row.get("memory_peak_bytes")
    expected = None if plan is None else plan.chosen.memory
    is_card = plan is not None and plan.device_kind is DeviceKind.CUDA
    held = next((row[name] for name in _HELD_ON_CARD if row.get(name)), None)
    return MemoryGauge(
        used_bytes=held if is_card else row.get("host_rss_bytes"),
        total_bytes=None if plan is None else _total_bytes(plan),
        place="card" if is_card else "RAM",
        predicted_bytes=expected.device_bytes if expected is not None and is_card else None,
        peak_bytes=peak or None,
        predicted_peak_bytes=None if expected is None else expected.peak_allocated_bytes or None,
    )


_HELD_ON_CARD = ("memory_device_bytes", "memory_reserved_bytes", "memory_allocated_bytes")


def _total_bytes(plan: Plan) -> int | None:
    hardware = plan.hardware
    if plan.device_kind is not DeviceKind.CUDA:
        return hardware.host.ram_bytes
    cap = hardware.vram_cap_bytes
    return min([gpu.memory_bytes for gpu in hardware.gpus] + ([] if cap is None else [cap]), default=None)
