"""The curves of a run's page, from its steps and its report. Pure; a chart without a figure is left out by its writer.

Axes are optimizer steps. What happened on the way stands on every one of them as a mark.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise

from shardwise.launch.show.report.runs import ENDINGS, RecordedRun, Step
from shardwise.launch.show.report.text import FAULTS
from shardwise.trainer.planning.page.charts import averaged, thinned
from shardwise.trainer.planning.page.content import LineChart, Mark, Points, Series, Span, Spans, Unit
from shardwise.trainer.spec.report import AttemptRecord, MemoryPoint

_WENT_BACK = re.compile(r"went back from step (\d+) to step (\d+)")
_LIMIT_IN_SIGHT = 3  # a limit this many times above what was measured would flatten the curve
_PARTS: tuple[tuple[str, Callable[[Step], float | None]], ...] = (
    ("data", lambda step: step.data_s),
    ("forward", lambda step: step.forward_s),
    ("backward", lambda step: step.backward_s),
    ("optimizer", lambda step: step.optimizer_s),
    ("waiting for ranks", lambda step: step.wait_s),
    ("other", lambda step: step.other_s),
    ("checkpoint", lambda step: step.checkpoint_s),
)


def loss_chart(run: RecordedRun) -> LineChart:
    """Training and held-out loss."""
    held_out = tuple((float(step), loss) for step, loss in run.eval_losses.items())
    return LineChart(
        caption="training and held-out loss",
        x_label="step",
        unit=Unit.NUMBER,
        series=(
            Series(name="training", points=points_of(run, lambda step: step.loss)),
            Series(name="held-out", points=held_out),
        ),
        marks=marks_of(run),
        from_zero=False,
    )


def throughput_chart(run: RecordedRun) -> LineChart:
    """Tokens a second of one device, beside what was predicted."""
    measured = points_of(run, lambda step: step.tokens_per_s_per_gpu)
    series = (
        Series(name="measured", points=measured),
        *_level("predicted", run.predicted.speed.tokens_per_s_per_gpu, measured),
    )
    return LineChart(
        caption="tokens/s of a device", x_label="step", unit=Unit.COUNT, series=series, marks=marks_of(run)
    )


def step_parts_chart(run: RecordedRun) -> LineChart:
    """Seconds of each step by phase."""
    steps = run.curve
    series = [
        Series(name=name, points=averaged((float(step.step), part_of(step)) for step in steps))
        for name, part_of in _PARTS
        if any(part_of(step) for step in steps)
    ]
    return LineChart(
        caption="seconds of a step", x_label="step", unit=Unit.SECONDS, series=tuple(series), is_stacked=True
    )


def memory_chart(run: RecordedRun) -> LineChart:
    """Memory of a device over the steps, beside its prediction and, where it is near, what is usable."""
    curves = (
        ("peak allocated", points_of(run, lambda step: step.memory_peak_bytes)),
        ("reserved", points_of(run, lambda step: step.memory_reserved_bytes)),
        ("device", points_of(run, lambda step: step.memory_device_bytes)),
    )
    measured = [Series(name=name, points=points) for name, points in curves if any(y for _, y in points)]
    if not measured:
        return LineChart(caption="memory", x_label="step", unit=Unit.BYTES, series=())
    highest = max(y for series in measured for _, y in series.points if y is not None)
    series = [*measured, *_level("predicted peak", run.predicted.memory.peak_allocated_bytes, measured[0].points)]
    usable = None if run.candidate is None else run.candidate.memory.usable_bytes
    if usable is not None and usable < _LIMIT_IN_SIGHT * highest:
        series += _level("usable", usable, measured[0].points)
    return LineChart(
        caption="memory of a device over the run",
        x_label="step",
        unit=Unit.BYTES,
        series=tuple(series),
        marks=marks_of(run),
    )


def timeline_chart(timeline: Sequence[MemoryPoint]) -> LineChart:
    """Allocated bytes over the profiled step, by phase."""
    points = tuple((point.at_s, float(point.allocated_bytes)) for point in timeline)
    return LineChart(
        caption="allocated during one step",
        x_label="time since the step began",
        unit=Unit.BYTES,
        x_unit=Unit.SECONDS,
        series=(Series(name="allocated", points=thinned(points)),),
        bands=tuple(_phases(timeline)),
    )


def attempts_chart(history: Sequence[AttemptRecord]) -> Spans:
    """Attempts one after the other; the time between two, in a queue perhaps, is not in it."""
    rows, begin = [], 0.0
    for record in history:
        end = begin + record.duration_s
        rows.append(Span(begin=begin, end=end, text=f"attempt {record.number}: {_end_words(record)}"))
        begin = end
    return Spans(caption="attempts over the time they ran", rows=tuple(rows), unit=Unit.SECONDS)


def marks_of(run: RecordedRun) -> tuple[Mark, ...]:
    """Restarts, ways back and skipped steps, by step."""
    history = () if run.report is None else run.report.history
    incidents = () if run.report is None else run.report.incidents
    found = [Mark(at=float(before.step), text=_end_words(before)) for before, _ in pairwise(history)]
    for incident in incidents:
        match = _WENT_BACK.search(incident)
        if match is not None:
            found.append(Mark(at=float(match[1]), text=f"went back to step {match[2]}"))
    skipped = dict.fromkeys(step.step for step in run.steps if step.skipped and step.skipped_rows)
    found += [Mark(at=float(step), text=f"step {step} skipped") for step in skipped]
    return tuple(sorted(found, key=lambda mark: mark.at))


def points_of(run: RecordedRun, figure_of: Callable[[Step], float | None]) -> Points:
    """A figure over the steps; nothing where no step has it."""
    points = [(float(step.step), figure_of(step)) for step in run.curve]
    return thinned(points) if any(y is not None for _, y in points) else ()


def _level(name: str, height: float | None, like: Points) -> tuple[Series, ...]:
    """A figure that is the same at every step, over those of another line."""
    if height is None or not like:
        return ()
    ends = dict.fromkeys((like[0][0], like[-1][0]))
    return (Series(name=name, points=tuple((x, float(height)) for x in ends), is_dashed=True),)


def _phases(timeline: Sequence[MemoryPoint]) -> Iterator[Span]:
    """Stretches of one phase, each until the next begins."""
    stretches = [(phase, next(points).at_s) for phase, points in groupby(timeline, key=lambda point: point.phase)]
    ends = [begin for _, begin in stretches[1:]] + [timeline[-1].at_s] if timeline else []
    for (phase, begin), end in zip(stretches, ends, strict=True):
        if phase:
            yield Span(begin=begin, end=end, text=phase)


def _end_words(record: AttemptRecord) -> str:
    words = ENDINGS[record.ending] if record.fault is None else FAULTS[record.fault]
    return f"{words} at step {record.step}"
