"""The state of a run as a value, from the plan and the files of the ranks, and its text: a block of lines, or one line.

`shardwise train` shows its own attempt, `shardwise watch` a run directory. Memory and phases are those of rank 0, speed
is that of all ranks. A line of metrics.jsonl that is half written is read at the next call.

    quickstart: training, step 150 of 300
    progress   ██████████░░░░░░░░░░  50%, 1 min 10 s left
    loss       █▇▆▅▄▄▃▃▂▂▂▂▁▁▁▁▁▁▁▁  4.9513, held out 5.1943, learning rate 0.0003
    speed      ████████████████████  6.63k tokens/s, 114% of the predicted 5.84k, last 50 steps
    memory     ░░░░░░░░░░░░░░░░░░░░  483 MiB of 23.5 GiB RAM, tensors 244, predicted 244 MiB
    incidents  none

Text that does not fit is cut at the right, so a line never wraps: a terminal that wraps cannot be redrawn.
"""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.launch.rundir.metrics import NUM_RECENT_STEPS, recent_tokens_per_s
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.secrets import printable, redact
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.text import Text


_MOST_POINTS = 512


class Point(NamedTuple):
    """A value at a step."""

    step: int
    value: float


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


def _columns(points: Sequence[Point], width: int) -> list[float]:
    """Means of equal ranges of steps; one without a point repeats the previous mean."""
    if len(points) <= width:
        return [point.value for point in points]
    first, last = points[0].step, points[-1].step
    ranges: list[list[float]] = [[] for _ in range(width)]
    for point in points:
        ranges[(point.step - first) * width // (last - first + 1)].append(point.value)
    means: list[float] = []
    for values in ranges:
        means.append(sum(values) / len(values) if values else means[-1])
    return means


_LEAST_SEEN_S = 2.0  # before the pace of the steps that appeared is used


RECENT_STEPS = f"last {NUM_RECENT_STEPS} steps"


class MemoryGauge(NamedTuple):
    """Bytes of rank 0; None if not measured."""

    used_bytes: int | None  # of the card, or of the rank's RAM on a CPU
    total_bytes: int | None  # the card under its cap, or the machine's RAM
    place: str  # card | RAM
    predicted_bytes: int | None  # of what is used
    peak_bytes: int | None = None  # allocated
    predicted_peak_bytes: int | None = None

    @property
    def peak_name(self) -> str:
        """Name of the peak: on a CPU it is of tensors alone, and less than the process has."""
        return "peak" if self.place == "card" else "tensors"


class CardFigures(NamedTuple):
    """The driver's last readings of the GPU of rank 0."""

    utilization: float | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttle: str | None = None


class LiveView(NamedTuple):
    """The state of a run at one moment."""

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
    rate_of: str = ""  # what the rate is of: the last steps, or the run as its report has it
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
        self.incidents: list[str] = []
        self.curve: list[Point] = []  # of the loss; of a long run, fewer points of its older steps
        self._recent: deque[dict[str, Any]] = deque(maxlen=NUM_RECENT_STEPS)
        self._first_seen: tuple[int, float] | None = None
        self._last_seen: tuple[int, float] | None = None

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
        self.incidents += row.get("incidents", ())
        if isinstance(row.get("loss"), int | float):
            self._add_loss(row["step"], float(row["loss"]))
        if seen_s is not None:
            self._first_seen = self._first_seen or (row["step"], seen_s)
            self._last_seen = (row["step"], seen_s)

    def _add_loss(self, step: int, loss: float) -> None:
        """A repeated step, after a run went back to a checkpoint, replaces the points from that step on."""
        while self.curve and self.curve[-1].step >= step:
            self.curve.pop()
        self.curve.append(Point(step, loss))
        if len(self.curve) > _MOST_POINTS:
            older = slice(len(self.curve) // 2)
            self.curve[older] = self.curve[older][::2]

    def tokens_per_s(self) -> float | None:
        """The rate over the last steps together."""
        return recent_tokens_per_s(self._recent)

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
    step: int = 0,
    attempt: int = 1,
    incidents: Sequence[str] = (),
    is_running: bool = True,
    report: Report | None = None,
) -> LiveView:
    """The view after these steps, or a later `step` that has no figures; what only a plan has is None without one.

    Speed and RAM are those of the report of a run that has ended; without it the last steps decide.
    """
    tokens_per_s = None if report is None else report.tokens_per_s
    row, num_steps = steps.last, None if plan is None else plan.schedule.num_steps
    chosen = None if plan is None else plan.chosen
    return LiveView(
        title=title,
        state=state,
        step=max(steps.step or 0, _with_figures(step, plan) if is_running else step) or None,
        num_steps=num_steps,
        attempt=attempt,
        seconds_left=steps.seconds_left(num_steps) if is_running and num_steps is not None else None,
        curve=tuple(steps.curve),
        loss=row.get("loss"),
        eval_loss=row.get("eval_loss"),
        lr=row.get("lr"),
        tokens_per_s=tokens_per_s or steps.tokens_per_s(),
        rate_of="the run" if tokens_per_s else RECENT_STEPS,
        predicted_tokens_per_s=None if chosen is None else chosen.speed.tokens_per_s_per_gpu * chosen.num_ranks,
        mfu=row.get("mfu"),
        memory=memory_gauge(row, plan, report),
        card=CardFigures(*(steps.newest.get(f"gpu_{name}") for name in CardFigures._fields)),
        num_skipped=steps.num_skipped,
        incidents=tuple(dict.fromkeys((*steps.incidents, *incidents))),
    )


def _with_figures(step: int, plan: Plan | None) -> int:
    """The step before one that is done and whose line of metrics.jsonl is due: it is shown once, with its figures."""
    if plan is None:
        return step
    is_due = step % (plan.job.log.every.steps or 1) == 0 or step == plan.schedule.num_steps
    return step - is_due


def memory_gauge(row: dict[str, Any], plan: Plan | None, report: Report | None = None) -> MemoryGauge | None:
    """Rank 0's memory, on a GPU of the card, on a CPU of the RAM, there of the report if the run has ended.

    None before the first step.
    """
    if not row:
        return None
    expected = None if plan is None else plan.chosen.memory
    is_card = plan is not None and plan.device_kind is DeviceKind.CUDA
    resident = row.get("host_rss_bytes") if report is None else report.measured.memory.host_bytes
    counts = (row.get(f"memory_{name}_bytes") for name in ("device", "reserved", "allocated"))
    return MemoryGauge(
        used_bytes=next(filter(None, counts), None) if is_card else resident or row.get("host_rss_bytes"),
        total_bytes=None if plan is None else _total_bytes(plan),
        place="card" if is_card else "RAM",
        predicted_bytes=expected.device_bytes if expected is not None and is_card else None,
        peak_bytes=row.get("memory_peak_bytes") or None,
        predicted_peak_bytes=None if expected is None else expected.peak_allocated_bytes or None,
    )


def _total_bytes(plan: Plan) -> int | None:
    hardware = plan.hardware
    if plan.device_kind is not DeviceKind.CUDA:
        return hardware.host.ram_bytes
    cap = hardware.vram_cap_bytes
    return min([gpu.memory_bytes for gpu in hardware.gpus] + ([] if cap is None else [cap]), default=None)


class Glyphs(NamedTuple):
    """Characters for bars and curves."""

    full: str
    empty: str
    mark: str  # of a prediction
    levels: str  # of a curve, the lowest first


UNICODE = Glyphs("█", "░", "│", "▁▂▃▄▅▆▇█")
ASCII = Glyphs("#", "-", "|", "_.-~=+*#")

_LABEL_WIDTH = 11
_GRAPHIC_WIDTHS = ((100, 32), (60, 20), (30, 6), (0, 0))  # for lines of at least so many columns
_LOG_BAR_WIDTH = 24
_FULL_SHARE = 0.9  # a fuller memory is shown as a warning


class _Row(NamedTuple):
    """A line of the block: a graphic, and parts of which the first are the most important."""

    label: str
    graphic: str
    parts: Sequence[str]
    is_warning: bool = False


def block(view: LiveView, *, width: int, is_ascii: bool) -> "Text":
    """The block for a terminal of `width` columns, the most important lines first."""
    from rich.text import Text  # on a terminal only

    graphic, glyphs = next(size for least, size in _GRAPHIC_WIDTHS if width >= least), ASCII if is_ascii else UNICODE
    rows = [_progress(view, graphic, glyphs), _loss(view, graphic, glyphs), _speed(view, graphic, glyphs)]
    rows += [_memory(view.memory, graphic, glyphs), _card(view), _incidents(view)]
    head = ", ".join([f"{view.title}: {view.state or 'starting'}", *_place(view)])
    text = Text.assemble((_in_one_line(head), "bold"), no_wrap=True, overflow="crop" if is_ascii else "ellipsis")
    for row in filter(None, rows):
        graph = f"{row.graphic:<{graphic}}  " if row.graphic else ""
        text.append(f"\n{row.label:<{_LABEL_WIDTH}}", style="dim")
        text.append(graph, style="yellow" if row.is_warning else "cyan")
        text.append(_in_one_line(", ".join(row.parts)), style="yellow" if row.is_warning and not graph else None)
    return text


def _in_one_line(text: str) -> str:
    return redact(printable(" ".join(text.split("\n")).replace("\t", " ")))


def log_line(view: LiveView) -> str:
    """`[####----] 50/100  loss 4.1250  6.1k tokens/s (104% of predicted)  peak 310 MiB  1 min 10 s left`, in ASCII."""
    step, num_steps = view.step or 0, view.num_steps
    parts = [f"step {step}"]
    if num_steps is not None:
        parts = [f"[{bar(step / max(1, num_steps), width=_LOG_BAR_WIDTH, glyphs=ASCII)}] {step}/{num_steps}"]
    parts += [f"loss {view.loss:.4f}"] if view.loss is not None else []
    parts += [f"lr {view.lr:.3g}"] if view.lr is not None else []
    share = _share_of_predicted(view)
    if view.tokens_per_s:
        of_predicted = "" if share is None else f" ({share:.0%} of predicted)"
        parts.append(f"{format_count(view.tokens_per_s)} tokens/s{of_predicted}")
    if view.memory is not None:
        used, total, peak = view.memory.used_bytes, view.memory.total_bytes, view.memory.peak_bytes
        if used is not None and total is not None and view.memory.place == "card":
            parts.append(_pair(used, " of ", total))
        elif peak is not None:
            parts.append(f"{view.memory.peak_name} {format_bytes(peak)}")
    parts += [f"{format_seconds(view.seconds_left)} left"] if view.seconds_left is not None else []
    parts += _counted(view)
    return "  ".join(parts)


def bar(share: float, *, width: int, glyphs: Glyphs, mark: float | None = None) -> str:
    """A bar of which `share` is filled, with a mark at the prediction."""
    filled = round(width * min(1.0, max(0.0, share)))
    if share < 1:
        filled = min(filled, width - 1)  # what looks complete is complete
    cells = [glyphs.full] * filled + [glyphs.empty] * (width - filled)
    if mark is not None and width:
        cells[min(width - 1, int(width * min(1.0, max(0.0, mark))))] = glyphs.mark
    return "".join(cells)


def _place(view: LiveView) -> list[str]:
    of = "" if view.num_steps is None else f" of {view.num_steps}"
    step = [] if view.step is None and view.num_steps is None else [f"step {view.step or 0}{of}"]
    return step + ([f"attempt {view.attempt}"] if view.attempt > 1 else [])


def _progress(view: LiveView, width: int, glyphs: Glyphs) -> _Row | None:
    if not view.num_steps:
        return None
    share = (view.step or 0) / view.num_steps
    left = [f"{format_seconds(view.seconds_left)} left"] if view.seconds_left is not None else []
    return _Row("progress", bar(share, width=width, glyphs=glyphs), [f"{int(share * 100)}%", *left])


def _loss(view: LiveView, width: int, glyphs: Glyphs) -> _Row | None:
    if view.loss is None and not view.curve:
        return None
    parts = ["no number" if view.loss is None else f"{view.loss:.4f}"]
    parts += [f"held out {view.eval_loss:.4f}"] if view.eval_loss is not None else []
    parts += [f"learning rate {view.lr:.3g}"] if view.lr is not None else []
    curve = sparkline(view.curve, width=width, levels=glyphs.levels) if width else ""
    return _Row("loss", curve, parts)


def _speed(view: LiveView, width: int, glyphs: Glyphs) -> _Row | None:
    if not view.tokens_per_s:
        return None
    share = _share_of_predicted(view)
    parts = [f"{format_count(view.tokens_per_s)} tokens/s"]
    if share is not None and view.predicted_tokens_per_s is not None:
        parts.append(f"{share:.0%} of the predicted {format_count(view.predicted_tokens_per_s)}")
    parts += [view.rate_of] if view.rate_of else []
    parts += [f"MFU {view.mfu:.1%}"] if view.mfu is not None else []
    return _Row("speed", "" if share is None else bar(share, width=width, glyphs=glyphs), parts)


def _memory(gauge: MemoryGauge | None, width: int, glyphs: Glyphs) -> _Row | None:
    """Against the card or the RAM; if neither is known, against the prediction."""
    if gauge is None or (gauge.used_bytes is None and gauge.peak_bytes is None):
        return None
    used, total, mark = gauge.used_bytes, gauge.total_bytes, None
    parts = []
    if used is not None:
        parts.append(f"{_pair(used, ' of ', total)} {gauge.place}")
    if gauge.peak_bytes is not None:
        parts.append(f"{gauge.peak_name} {_pair(gauge.peak_bytes, ', predicted ', gauge.predicted_peak_bytes)}")
    if used is not None and total:
        mark = None if gauge.predicted_bytes is None else gauge.predicted_bytes / total
        share = used / total
    else:
        share = (gauge.peak_bytes or 0) / gauge.predicted_peak_bytes if gauge.predicted_peak_bytes else 0.0
    is_nearly_full = used is not None and bool(total) and share >= _FULL_SHARE
    return _Row("memory", bar(share, width=width, glyphs=glyphs, mark=mark), parts, is_nearly_full)


def _card(view: LiveView) -> _Row | None:
    card = view.card
    parts = [f"{card.utilization:.0%} busy"] if card.utilization is not None else []
    parts += [f"{card.power_w:.0f} W"] if card.power_w is not None else []
    parts += [f"{card.temperature_c} C"] if card.temperature_c is not None else []
    parts += [f"slowed by {card.throttle}"] if card.throttle else []
    return _Row("card", "", parts, bool(card.throttle)) if parts else None


def _incidents(view: LiveView) -> _Row:
    newest = [view.incidents[-1]] if view.incidents else []
    parts = [*_counted(view), *newest]
    return _Row("incidents", "", parts or ["none"], bool(parts))


def _counted(view: LiveView) -> list[str]:
    retries, skipped = view.attempt - 1, view.num_skipped
    parts = ["1 restart" if retries == 1 else f"{retries} restarts"] if retries > 0 else []
    return parts + (["1 step skipped" if skipped == 1 else f"{skipped} steps skipped"] if skipped else [])


def _pair(first: int, between: str, second: int | None) -> str:
    """`61 of 80 GiB`, `483 MiB of 23.5 GiB`: the first size has no unit if the second has the same."""
    if second is None:
        return format_bytes(first)
    (number, unit), rest = format_bytes(first).split(), format_bytes(second)
    return f"{number}{between}{rest}" if rest.endswith(f" {unit}") else f"{number} {unit}{between}{rest}"


def _share_of_predicted(view: LiveView) -> float | None:
    if not view.tokens_per_s or not view.predicted_tokens_per_s:
        return None
    return view.tokens_per_s / view.predicted_tokens_per_s
