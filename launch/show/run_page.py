"""Runs as pages: one in full, or several compared.

The page of one run has its end, recommendations, predictions and measurements, curves, the plan and its reasons, and
the machine. A section without content is left out. The page of a run without a report states that, and shows its
progress. The curves have optimizer steps as their axis; restarts, returns to a checkpoint and skipped steps are marked
on each.

A comparison has a table of figures with the best marked, the settings in which the jobs differ, and overlaid curves.
Losses are compared only if the data is the same; time, speed and memory always. Of many runs the first ones have a
curve.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from shardwise.launch.rundir.metrics import Step
from shardwise.launch.show.recorded_run import ENDINGS, RecordedRun, ending_text, labels_of, state_line
from shardwise.launch.show.report import (
    FAULTS,
    PROCESS_RAM,
    attempt_line,
    comparison_notes,
    comparison_rows,
    device_line,
    difference,
    format_size,
    loss_lines,
    parts_line,
    shown,
    verified_lines,
)
from shardwise.trainer.planning.device import machine_text
from shardwise.trainer.planning.explain.plan_page import choice_section, nearest_rejections, runners_up_section
from shardwise.trainer.planning.memory import grouped
from shardwise.trainer.planning.page.content import (
    Block,
    LineChart,
    Mark,
    Page,
    PairedBars,
    Points,
    Quote,
    Section,
    Sentence,
    Series,
    Span,
    Spans,
    StackedBar,
    Table,
    Unit,
)
from shardwise.trainer.planning.page.html import averaged, thinned
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.spec.hardware import DeviceKind, Gpu
from shardwise.trainer.spec.job.fields import job_tree
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import AttemptRecord, Ending, MemoryFigures, MemoryPoint
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds

_MOST_REJECTIONS = 5
_NUM_RUNNERS_UP = 3
# Of a comparison:
_MOST_CURVES = 12
_MOST_SETTINGS = 6
_NOT_COMPARED = ("output", "log", "slurm")  # of a job: where things go
_HEADER = ("run", "ending", "step", "held-out", "loss", "tokens/s", "step time", "peak", "time", "strategy")


def run_page(run: RecordedRun, *, smoothing: float = 0.0) -> Page:
    """The page of one run; with `smoothing` the loss has a smoothed line as well."""
    sections = {
        "end": _summary(run),
        "help": _section("what would help", [Sentence(text=each.text) for each in run.recommended]),
        "figures": _section("predicted and measured", _comparison(run)),
        "loss": _section("loss", [loss_chart(run, smoothing=smoothing)] if run.curve else []),
        "throughput": _section("throughput", [throughput_chart(run)] if run.curve else []),
        "gradients": _section("gradient norm", _charts(gradient_chart(run))),
        "lr": _section("learning rate", _charts(lr_chart(run))),
        "step": _section("time of a step", _step_time(run)),
        "device": _section("use of a device", _charts(*device_charts(run))),
        "memory": _section("memory of a device", _charts(memory_chart(run))),
        "step-memory": _section("memory of a device during one step", _step_memory(run.measured.memory)),
        "incidents": _section("incidents", _incidents(run)),
        "attempts": _section("attempts", _attempts(run)),
        **({} if run.plan is None else dict(_planned(run, run.plan))),
        "sample": _section("sample", _sample(run)),
        "verified": _section("verified engine", [] if run.report is None else _sentences(verified_lines(run.report))),
        "hardware": _section("hardware", [] if run.plan is None else list(_hardware(run.plan))),
        "versions": _section("versions", _versions(run)),
    }
    named = tuple(replace(section, name=name) for name, section in sections.items() if section is not None)
    title = run.run_dir.name if run.plan is None else f"{run.run_dir.name}: {run_text(run.plan)}"
    return Page(title=title, sections=named)


def _charts(*charts: LineChart) -> list[Block]:
    """The charts that have a line."""
    return [chart for chart in charts if chart.series]


def run_text(plan: Plan) -> str:
    """`lora training of llama on 1 x RTX-4090`."""
    return f"{plan.chosen.method} training of {plan.model_shape.model_type} on {machine_text(plan.hardware)}"


def _summary(run: RecordedRun) -> Section:
    lines = [*run.overrides]
    if run.report is not None:
        lines += [f"error: {line}" for line in (run.report.error or "").splitlines()]
        lines += loss_lines(run.report)
        lines += [f"checkpoint: {run.run_dir / run.report.checkpoint}"] if run.report.checkpoint else []
        lines += [f"model: {run.run_dir / run.report.export}"] if run.report.export else []
    elif run.final_loss is not None:
        lines.append(f"training loss {run.final_loss:.4f} at step {run.step}")
    return Section(title=state_line(run), blocks=tuple(_sentences(lines)))


def _comparison(run: RecordedRun) -> list[Block]:
    """The figures as a table, and the parts of memory as bars of one scale."""
    if run.candidate is None:
        return []
    rows = tuple(comparison_rows(run.predicted, run.measured, report=run.report))
    blocks: list[Block] = [Table(rows=rows, right=(1, 2, 3))]
    blocks += [] if run.report is None else _sentences(list(comparison_notes(run.report)))
    expected, found = grouped(run.predicted.memory.parts), run.measured.memory.parts
    parts = {name: (expected.get(name), found.get(name)) for name in dict.fromkeys((*expected, *found))}
    if found:
        bars = tuple(
            (name.replace("_", " "), size and float(size), held and float(held))
            for name, (size, held) in parts.items()
            if size or held
        )
        blocks.append(PairedBars(caption="memory at the peak, by part", rows=bars, unit=Unit.BYTES))
    measured, is_cpu = run.measured.memory, run.plan is not None and run.plan.device_kind is DeviceKind.CPU
    peak = measured.host_bytes if is_cpu else measured.peak_allocated_bytes
    if peak is not None:
        usable = run.candidate.memory.usable_bytes
        taken = {PROCESS_RAM if is_cpu else "allocated at the measured peak": peak}
        blocks.append(Sentence(text=f"of {format_bytes(usable)} usable:"))
        blocks.append(StackedBar(parts=taken, total=max(usable, peak)))
    return blocks


def _step_time(run: RecordedRun) -> list[Block]:
    """Seconds of a step: measured by phase, predicted by cause."""
    blocks: list[Block] = []
    for name, figures in (("measured", run.measured.speed), ("predicted", run.predicted.speed)):
        line = parts_line({part.removesuffix("_s"): seconds for part, seconds in figures.parts.items()})
        if line and figures.step_s is not None:
            blocks.append(Sentence(text=f"{name}: {format_seconds(figures.step_s)} {line}"))
    sampled = None if run.report is None else device_line(run.report.device_time)
    blocks += [Sentence(text=sampled)] if sampled else []
    return [*blocks, step_parts_chart(run)] if run.curve else blocks


def _step_memory(measured: MemoryFigures) -> list[Block]:
    blocks: list[Block] = []
    if measured.peaks:
        peaks = ", ".join(f"{phase} {format_bytes(peak)}" for phase, peak in measured.peaks.items())
        blocks.append(Sentence(text=f"allocated at most in each phase of the profiled step: {peaks}"))
    if measured.timeline:
        blocks.append(timeline_chart(measured.timeline))
    return blocks


def _incidents(run: RecordedRun) -> list[Block]:
    reported = () if run.report is None else run.report.incidents
    return _sentences(reported or [f"{mark.text} (step {mark.at:g})" for mark in marks_of(run)])


def _attempts(run: RecordedRun) -> list[Block]:
    history = () if run.report is None else run.report.history
    if len(history) < 2:
        return []
    return [attempts_chart(history), *_sentences(map(attempt_line, history))]


def _planned(run: RecordedRun, plan: Plan) -> Iterator[tuple[str, Section | None]]:
    """The choice and its reasons, the next candidates, and the nearest rejections, by name."""
    context = context_of(plan)
    choice = choice_section(plan, context)
    blocks = [*choice.blocks, *_sentences(plan.chosen.reasons)]
    if run.report is not None and run.report.plan.strategy.name != plan.chosen.strategy.name:
        blocks.insert(0, Sentence(text=f"a fallback ran in the end: {run.report.plan.strategy.name}"))
    yield "plan", Section(title=f"the plan and its reasons: {plan.chosen.strategy.name}", blocks=tuple(blocks))
    if len(plan.candidates) > 1:
        yield "runners-up", runners_up_section(plan, context, _NUM_RUNNERS_UP)
    if plan.rejections:
        nearest = nearest_rejections(plan.rejections, _MOST_REJECTIONS)
        title = f"not chosen: {len(plan.rejections)} strategies of the catalogue"
        yield "rejected", Section(title=title, blocks=tuple(_sentences(nearest)))
    yield "notes", _section("notes of the plan", _sentences(plan.notes))


def _sample(run: RecordedRun) -> list[Block]:
    sample = None if run.report is None else run.report.sample
    if sample is None:
        return []
    texts = (("prompt", sample.prompt), ("before", sample.before), ("after", sample.after))
    return [Quote(label=label, text=text) for label, text in texts if text is not None]


def _hardware(plan: Plan) -> Iterator[Block]:
    hardware = plan.hardware
    yield Sentence(text=machine_text(hardware))
    if hardware.gpus:
        rows = [("", "GPU", "memory", "driver", "power limit"), *map(_gpu_row, hardware.gpus)]
        yield Table(rows=tuple(rows), right=(0, 2, 4))
    host = hardware.host
    cores = "" if host.num_cores is None else f"{host.num_cores} cores"
    ram = "" if host.ram_bytes is None else f"{format_bytes(host.ram_bytes)} RAM"
    known = ", ".join(filter(None, (host.cpu_name, cores, ram)))
    yield from _sentences((*([f"host: {known}"] if known else []), *hardware.notes))
    yield from _sentences(f"not used: {excluded}" for excluded in hardware.excluded)


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    watts = "-" if gpu.power_limit_w is None else f"{gpu.power_limit_w:.0f} W"
    return str(gpu.index), gpu.name, format_bytes(gpu.memory_bytes), gpu.driver or "-", watts


def _versions(run: RecordedRun) -> list[Block]:
    versions = run.report.versions if run.report is not None else run.plan.versions if run.plan is not None else {}
    rows = [("package", "version"), *versions.items()]
    return [Table(rows=tuple(rows))] if versions else []


def _sentences(texts: Iterable[str]) -> list[Block]:
    return [Sentence(text=text) for text in texts]


def _section(title: str, blocks: Sequence[Block]) -> Section | None:
    return Section(title=title, blocks=tuple(blocks)) if blocks else None


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


def held_out_points(run: RecordedRun) -> Points:
    """Held-out loss by step."""
    return tuple((float(step), loss) for step, loss in run.eval_losses.items())


def loss_chart(run: RecordedRun, *, smoothing: float = 0.0) -> LineChart:
    """Training and held-out loss; `smoothing` is the weight of the past in an exponential mean, 0 for none."""
    measured = points_of(run, lambda step: step.loss)
    lines = [Series(name="training", points=measured, is_faint=smoothing > 0)]
    lines.append(Series(name="held-out", points=held_out_points(run)))
    if smoothing:
        lines.append(Series(name=f"training, smoothed by {smoothing:g}", points=smoothed(run, smoothing)))
    return _chart(run, "training and held-out loss", Unit.NUMBER, tuple(lines), from_zero=False)


def gradient_chart(run: RecordedRun) -> LineChart:
    """Norm of the gradients before clipping, with the norm to which they are clipped."""
    measured = _measured(("gradient norm", points_of(run, lambda step: step.grad_norm)))
    clip = None if run.plan is None else run.plan.job.train.clip
    level = _level("clipped to", clip, measured[0].points) if measured else ()
    return _chart(run, "norm of the gradients before clipping", Unit.NUMBER, (*measured, *level))


def lr_chart(run: RecordedRun) -> LineChart:
    """Learning rate of each step."""
    series = _measured(("learning rate", points_of(run, lambda step: step.lr)))
    return _chart(run, "learning rate", Unit.NUMBER, series)


def device_charts(run: RecordedRun) -> tuple[LineChart, ...]:
    """Shares of use, power and temperature of the device of rank 0; without a line where they are not measured."""
    has_padding = any(step.padding_share for step in run.curve)
    shares = _measured(
        ("GPU busy", points_of(run, lambda step: step.gpu_utilization)),
        ("MFU", points_of(run, lambda step: step.mfu)),
        ("padding", points_of(run, lambda step: step.padding_share) if has_padding else ()),
    )
    power = _measured(("power", points_of(run, lambda step: step.gpu_power_w)))
    heat = _measured(("temperature", points_of(run, lambda step: step.gpu_temperature_c)))
    return (
        _chart(run, ", ".join(each.name for each in shares), Unit.SHARE, shares),
        _chart(run, "power of the GPU in watts", Unit.NUMBER, power),
        _chart(run, "temperature of the GPU in degrees Celsius", Unit.NUMBER, heat, from_zero=False),
    )


def _measured(*curves: tuple[str, Points]) -> tuple[Series, ...]:
    """The lines that have a figure."""
    return tuple(Series(name=name, points=points) for name, points in curves if points)


def smoothed(run: RecordedRun, weight: float) -> Points:
    """The exponential mean of the training loss, without the bias of its start; a loss that is no number is a gap."""
    mean, total, points = 0.0, 0.0, []
    for step in run.curve:
        if step.loss is not None:
            mean, total = weight * mean + (1 - weight) * step.loss, weight * total + 1 - weight
        points.append((float(step.step), None if step.loss is None else mean / total))
    return thinned(points)


def throughput_chart(run: RecordedRun) -> LineChart:
    """Tokens a second of one device, with the prediction."""
    measured = points_of(run, lambda step: step.tokens_per_s_per_gpu)
    predicted = _level("predicted", run.predicted.speed.tokens_per_s_per_gpu, measured)
    return _chart(run, "tokens/s of a device", Unit.COUNT, (Series(name="measured", points=measured), *predicted))


def step_parts_chart(run: RecordedRun) -> LineChart:
    """Seconds of each step by phase."""
    steps = run.curve
    series = [
        Series(name=name, points=averaged((float(step.step), part_of(step)) for step in steps))
        for name, part_of in _PARTS
        if any(part_of(step) for step in steps)
    ]
    return LineChart(
        caption="seconds of a step",
        x_label=STEP_LABEL,
        unit=Unit.SECONDS,
        series=tuple(series),
        is_stacked=True,
        clips=True,
    )


def memory_chart(run: RecordedRun) -> LineChart:
    """Memory of a device over the steps, with its prediction and, if it is near, the usable memory."""
    curves = (
        ("peak allocated", points_of(run, lambda step: step.memory_peak_bytes)),
        ("reserved", points_of(run, lambda step: step.memory_reserved_bytes)),
        ("device", points_of(run, lambda step: step.memory_device_bytes)),
    )
    measured = [Series(name=name, points=points) for name, points in curves if any(y for _, y in points)]
    if not measured:
        return LineChart(caption="memory", x_label=STEP_LABEL, unit=Unit.BYTES, series=())
    highest = max(y for series in measured for _, y in series.points if y is not None)
    series = [*measured, *_level("predicted peak", run.predicted.memory.peak_allocated_bytes, measured[0].points)]
    usable = None if run.candidate is None else run.candidate.memory.usable_bytes
    if usable is not None and usable < _LIMIT_IN_SIGHT * highest:
        series += _level("usable", usable, measured[0].points)
    return _chart(run, "memory of a device over the run", Unit.BYTES, tuple(series))


def _chart(
    run: RecordedRun, caption: str, unit: Unit, series: tuple[Series, ...], *, from_zero: bool = True
) -> LineChart:
    """A chart over the steps of a run, with its marks; a peak of memory, unlike other values, always sets the scale."""
    return LineChart(
        caption=caption,
        x_label=STEP_LABEL,
        unit=unit,
        series=series,
        marks=marks_of(run),
        from_zero=from_zero,
        clips=unit is not Unit.BYTES,
    )


STEP_LABEL = "step"  # of the x axis of a chart over the steps


class XAxis(StrEnum):
    """The x axis of the charts over a run."""

    STEPS = "steps"
    TOKENS = "tokens"
    TIME = "time"


class _Places(NamedTuple):
    """Steps in ascending order, and where each is on another axis."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    def of(self, step: float) -> float:
        """The place of a step, between two known ones in proportion; the last one for a later step."""
        after = bisect_right(self.steps, step)
        if after == len(self.steps):
            return self.values[-1]
        begin, end = (self.steps[after - 1], self.steps[after]) if after else (0.0, self.steps[0])
        low, high = (self.values[after - 1], self.values[after]) if after else (0.0, self.values[0])
        return low + (high - low) * (step - begin) / (end - begin) if end > begin else high


def _places(run: RecordedRun, axis: XAxis) -> _Places | None:
    """The places of the steps; None if the steps lack the figure. A step that has no line took as long as the next."""
    found: dict[float, float] = {}
    total, last, highest = 0.0, 0, 0.0
    for step in run.curve:
        if axis is XAxis.TOKENS:
            value = None if step.tokens is None else float(step.tokens)
        else:
            total += (step.step - last) * (step.step_s or 0.0)
            value, last = total, step.step
        if value is not None and value >= highest:
            found[float(step.step)] = highest = value
    return _Places(tuple(found), tuple(found.values())) if highest > 0 else None


def on_axis(chart: LineChart, run: RecordedRun, axis: XAxis) -> LineChart:
    """A chart over the steps of a run on another axis; as it is if the run lacks the figure."""
    places = None if axis is XAxis.STEPS else _places(run, axis)
    return chart if places is None else _moved(chart, places, axis)


def _moved(chart: LineChart, places: _Places, axis: XAxis) -> LineChart:
    series = [replace(each, points=tuple((places.of(x), y) for x, y in each.points)) for each in chart.series]
    return replace(
        chart,
        x_label="tokens" if axis is XAxis.TOKENS else "time in steps",
        x_unit=Unit.COUNT if axis is XAxis.TOKENS else Unit.SECONDS,
        series=tuple(series),
        marks=tuple(replace(mark, at=places.of(mark.at)) for mark in chart.marks),
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
    """Attempts one after the other, without the time between two, for example in a queue."""
    rows, begin = [], 0.0
    for record in history:
        end = begin + record.duration_s
        rows.append(Span(begin=begin, end=end, text=f"attempt {record.number}: {_end_text(record)}"))
        begin = end
    return Spans(caption="attempts over the time they ran", rows=tuple(rows), unit=Unit.SECONDS)


def marks_of(run: RecordedRun) -> tuple[Mark, ...]:
    """Restarts, returns to a checkpoint and skipped steps, by step."""
    found: list[Mark] = []
    if run.report is not None:
        found += [Mark(at=float(each.step), text=_end_of(each)) for each in run.report.history[:-1]]
        found += [
            Mark(at=float(each.from_step), text=f"went back to step {each.to_step}") for each in run.report.roll_backs
        ]
    skipped = dict.fromkeys(step.step for step in run.steps if step.skipped and step.skipped_rows)
    found += [Mark(at=float(step), text="skipped") for step in skipped]
    return tuple(sorted(found, key=lambda mark: mark.at))


def points_of(run: RecordedRun, figure_of: Callable[[Step], float | None]) -> Points:
    """A figure over the steps; empty if no step has it."""
    points = [(float(step.step), figure_of(step)) for step in run.curve]
    return thinned(points) if any(y is not None for _, y in points) else ()


def _level(name: str, height: float | None, like: Points) -> tuple[Series, ...]:
    """A horizontal line over the steps of another one."""
    if height is None or not like:
        return ()
    ends = dict.fromkeys((like[0][0], like[-1][0]))
    return (Series(name=name, points=tuple((x, float(height)) for x in ends), is_dashed=True),)


def _phases(timeline: Sequence[MemoryPoint]) -> Iterator[Span]:
    """One span for each phase, until the next begins."""
    stretches = [(phase, next(points).at_s) for phase, points in groupby(timeline, key=lambda point: point.phase)]
    ends = [begin for _, begin in stretches[1:]] + [timeline[-1].at_s] if timeline else []
    for (phase, begin), end in zip(stretches, ends, strict=True):
        if phase:
            yield Span(begin=begin, end=end, text=phase)


def _end_text(record: AttemptRecord) -> str:
    return f"{_end_of(record)} at step {record.step}"


def _end_of(record: AttemptRecord) -> str:
    return ENDINGS[record.ending] if record.fault is None else FAULTS[record.fault]


def comparison_page(runs: Sequence[RecordedRun], *, axis: XAxis = XAxis.STEPS) -> Page:
    """The runs side by side, their curves over `axis`."""
    labels = labels_of(runs)
    curves = _Curves(runs, labels, axis)
    sections = (
        Section(title="figures (* the best)", blocks=tuple(_figures(runs, labels))),
        Section(title="what differs", blocks=tuple(_differences(runs, labels))),
        Section(title="predicted and measured", blocks=tuple(_predictions(runs, labels))),
        curves.section("held-out loss", held_out_points, Unit.NUMBER),
        curves.section("training loss", lambda run: points_of(run, lambda step: step.loss), Unit.NUMBER),
        curves.section("tokens/s of all devices", _rate_points, Unit.COUNT),
        curves.section("peak memory of a device", _peak_points, Unit.BYTES),
        Section(title="what would help", blocks=tuple(_recommended(runs, labels))),
    )
    return Page(
        title=f"{len(runs)} runs side by side",
        sections=tuple(section for section in sections if section is not None and section.blocks),
    )


def _rate_points(run: RecordedRun) -> Points:
    return points_of(run, lambda step: step.tokens_per_s)


def _peak_points(run: RecordedRun) -> Points:
    return points_of(run, lambda step: step.memory_peak_bytes)


def _figures(runs: Sequence[RecordedRun], labels: Sequence[str]) -> Iterator[Block]:
    rows = [_row(run, label) for run, label in zip(runs, labels, strict=True)]
    yield Table(rows=(_HEADER, *rows), right=tuple(range(2, 9)), wide=9, best=tuple(_best(runs)))
    if not _has_same_data(runs):
        yield Sentence(text="the data is not the same in all runs, so no loss is the best")
    for run, label in zip(runs, labels, strict=True):
        if run.report is None:
            yield Sentence(text=f"{label}: {state_line(run)}")


def _row(run: RecordedRun, label: str) -> tuple[str, ...]:
    speed, memory = run.measured.speed, run.measured.memory
    not_ended = "not begun" if run.plan is None else "not ended"
    return (
        label,
        not_ended if run.report is None else ending_text(run.report),
        str(run.step),
        shown(_score(run), "{:.4f}".format),
        shown(run.final_loss, "{:.4f}".format),
        shown(_rate(run), format_count),
        shown(speed.step_s, format_seconds),
        shown(memory.peak_allocated_bytes, format_size),
        shown(None if run.report is None else run.report.duration_s, format_seconds),
        "-" if run.candidate is None else run.candidate.strategy.name,
    )


def _best(runs: Sequence[RecordedRun]) -> Iterator[tuple[int, int]]:
    """(row, column) of the best figures; none in a column if all are equal."""
    scores = [_score(run) if _has_same_data(runs) else None for run in runs]
    times = [_whole_time(run) for run in runs]
    for column, figures, sign in (
        (3, scores, 1),
        (5, [_rate(run) for run in runs], -1),
        (6, [run.measured.speed.step_s if _has_same_steps(runs) else None for run in runs], 1),
        (7, [run.measured.memory.peak_allocated_bytes for run in runs], 1),
        (8, times if _has_same_steps(runs) else [], 1),
    ):
        known = [sign * figure for figure in figures if figure is not None]
        if len(set(known)) > 1:
            yield from (
                (number, column)
                for number, figure in enumerate(figures, start=1)
                if figure is not None and sign * figure == min(known)
            )


def _has_same_data(runs: Iterable[RecordedRun]) -> bool:
    return len({run.plan.data.fingerprint for run in runs if run.plan is not None}) <= 1


def _has_same_steps(runs: Iterable[RecordedRun]) -> bool:
    """True if all runs have the same number of steps and of tokens per step."""
    schedules = [run.plan.schedule for run in runs if run.plan is not None]
    return len({(schedule.num_steps, schedule.tokens_per_step) for schedule in schedules}) <= 1


def _whole_time(run: RecordedRun) -> float | None:
    """Duration of a run that finished without a restart."""
    report = run.report
    if report is None or report.ending is not Ending.FINISHED or report.resumed_from_step is not None:
        return None
    return report.duration_s


def _score(run: RecordedRun) -> float | None:
    """The last held-out loss."""
    return next(reversed(run.eval_losses.values()), None)


def _rate(run: RecordedRun) -> float | None:
    """Tokens a second of all devices."""
    each = run.measured.speed.tokens_per_s_per_gpu
    return None if each is None or run.candidate is None else each * run.candidate.num_ranks


def _differences(runs: Sequence[RecordedRun], labels: Sequence[str]) -> Iterator[Block]:
    """Settings of the jobs that are not the same in all of them."""
    jobs = [dict(_flattened(msgspec.to_builtins(run.plan.job))) if run.plan is not None else {} for run in runs]
    known = [job for job in jobs if job]
    names = dict.fromkeys(key for job in known for key in job)
    keys = [key for key in names if any(job.get(key) != known[0].get(key) for job in known[1:])]
    if not keys:
        return
    first = keys[:_MOST_SETTINGS]
    rows = [
        (label, *(shown(job.get(key), setting_text) for key in first)) for label, job in zip(labels, jobs, strict=True)
    ]
    yield Table(rows=(("run", *first), *rows))
    if len(keys) > _MOST_SETTINGS:
        yield Sentence(text=f"and {', '.join(keys[_MOST_SETTINGS:])}")


def _predictions(runs: Sequence[RecordedRun], labels: Sequence[str]) -> Iterator[Block]:
    """Predicted figures of each run next to the measured ones: its time, peak memory and speed of a device."""
    rows, times = [], []
    for run, label in zip(runs, labels, strict=True):
        if run.report is not None and run.report.predicted_s is not None:
            is_whole, whole = run.report.ending is Ending.FINISHED, (run.report.predicted_s, run.report.duration_s)
            times.append((label, *map(format_seconds, whole), difference(*whole) if is_whole else ""))
        memory, speed = (run.predicted.memory, run.measured.memory), (run.predicted.speed, run.measured.speed)
        peaks = [each.peak_allocated_bytes for each in memory]
        rates = [each.tokens_per_s_per_gpu for each in speed]
        if any(figure is not None for figure in (peaks[1], rates[1])):
            sizes, counts = [shown(peak, format_size) for peak in peaks], [shown(rate, format_count) for rate in rates]
            rows.append((label, *sizes, difference(*peaks), *counts, difference(*rates)))
    if times:
        yield Table(rows=(("run", "time predicted", "measured", "difference"), *times), right=(1, 2, 3))
    if rows:
        header = ("run", "peak predicted", "measured", "difference", "tokens/s predicted", "measured", "difference")
        yield Table(rows=(header, *rows), right=tuple(range(1, 7)))


def settings_of(job: Job) -> dict[str, Any]:
    """Every setting of a job by its path in a job file."""
    return dict(_flattened(job_tree(job), excluded=()))


def settings_table(job: Job) -> Table:
    """The settings of a job that differ from the defaults."""
    given, usual = settings_of(job), settings_of(Job())
    changed = [
        (name, setting_text(value), setting_text(usual.get(name)))
        for name, value in given.items()
        if value != usual.get(name)
    ]
    return Table(rows=(("setting", "value", "default"), *changed))


def setting_text(value: object) -> str:
    """A value of a setting in a table."""
    if isinstance(value, list | tuple):
        return ", ".join(map(setting_text, value)) or "none"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _flattened(
    value: Any,  # noqa: ANN401  # a tree of builtins
    key: str = "",
    *,
    excluded: Sequence[str] = _NOT_COMPARED,
) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, part in value.items():
        if key or name not in excluded:
            yield from _flattened(part, f"{key}.{name}" if key else name)


class _Curves(NamedTuple):
    """Runs whose figures are drawn over one another."""

    runs: Sequence[RecordedRun]
    labels: Sequence[str]
    axis: XAxis

    def section(self, caption: str, points: Callable[[RecordedRun], Points], unit: Unit) -> Section | None:
        """One line for each run; None if no run has the figure. Runs are on the other axis if all of them have it."""
        curves = [(label, run, points(run)) for run, label in zip(self.runs, self.labels, strict=True)]
        known = [each for each in curves if any(y is not None for _, y in each[2])]
        if not known:
            return None
        axis = self.axis if all(_places(run, self.axis) is not None for _, run, _ in known) else XAxis.STEPS
        charts = [
            on_axis(
                LineChart(
                    caption=caption,
                    x_label=STEP_LABEL,
                    unit=unit,
                    series=(Series(name=label, points=each),),
                    from_zero=unit is not Unit.NUMBER,
                    clips=unit is not Unit.BYTES,
                ),
                run,
                axis,
            )
            for label, run, each in known[:_MOST_CURVES]
        ]
        chart = replace(charts[0], series=tuple(series for each in charts for series in each.series))
        blocks: tuple[Block, ...] = (chart,)
        if len(known) > _MOST_CURVES:
            blocks = (Sentence(text=f"the first {_MOST_CURVES} of {len(known)} runs"), chart)
        return Section(title=caption, blocks=blocks)


def _recommended(runs: Sequence[RecordedRun], labels: Sequence[str]) -> Iterator[Block]:
    """The first recommendation of each run."""
    for run, label in zip(runs, labels, strict=True):
        for each in run.recommended[:1]:
            yield Sentence(text=f"{label}: {each.text}")
