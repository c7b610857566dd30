"""Several runs as one page: a table of figures with the best marked, what their jobs differ in, overlaid curves.

Losses are compared only where the data is the same; time, speed and memory always. Of many runs the first ones have a
curve.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from shardwise.launch.show.recorded_run import RecordedRun, ending_text, labels_of, state_line
from shardwise.launch.show.report import difference, format_size, shown
from shardwise.launch.show.run_page import held_out_points, points_of
from shardwise.trainer.planning.page.content import (
    Block,
    LineChart,
    Page,
    Points,
    Section,
    Sentence,
    Series,
    Table,
    Unit,
)
from shardwise.trainer.spec.report import Ending
from shardwise.trainer.spec.units import format_count, format_seconds

_MOST_CURVES = 12
_MOST_SETTINGS = 6
_NOT_COMPARED = ("output", "log", "slurm")  # of a job: where things go
_HEADER = ("run", "ending", "step", "held-out", "loss", "tokens/s", "step time", "peak", "time", "strategy")


def comparison_page(runs: Sequence[RecordedRun]) -> Page:
    """The runs side by side."""
    labels = labels_of(runs)
    sections = (
        Section(title="figures (* the best)", blocks=tuple(_figures(runs, labels))),
        Section(title="what differs", blocks=tuple(_differences(runs, labels))),
        Section(title="predicted and measured", blocks=tuple(_predictions(runs, labels))),
        _curves("held-out loss", runs, labels, held_out_points, Unit.NUMBER),
        _curves("training loss", runs, labels, lambda run: points_of(run, lambda step: step.loss), Unit.NUMBER),
        _curves("tokens/s of all devices", runs, labels, _rate_points, Unit.COUNT),
        _curves("peak memory of a device", runs, labels, _peak_points, Unit.BYTES),
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
    rows = [(label, *(shown(job.get(key), _setting) for key in first)) for label, job in zip(labels, jobs, strict=True)]
    yield Table(rows=(("run", *first), *rows))
    if len(keys) > _MOST_SETTINGS:
        yield Sentence(text=f"and {', '.join(keys[_MOST_SETTINGS:])}")


def _predictions(runs: Sequence[RecordedRun], labels: Sequence[str]) -> Iterator[Block]:
    """Predicted figures of each run next to the measured ones, peak memory and speed of a device."""
    rows = []
    for run, label in zip(runs, labels, strict=True):
        memory, speed = (run.predicted.memory, run.measured.memory), (run.predicted.speed, run.measured.speed)
        peaks = [each.peak_allocated_bytes for each in memory]
        rates = [each.tokens_per_s_per_gpu for each in speed]
        if any(figure is not None for figure in (peaks[1], rates[1])):
            sizes, counts = [shown(peak, format_size) for peak in peaks], [shown(rate, format_count) for rate in rates]
            rows.append((label, *sizes, difference(*peaks), *counts, difference(*rates)))
    if rows:
        header = ("run", "peak predicted", "measured", "", "tokens/s predicted", "measured", "")
        yield Table(rows=(header, *rows), right=tuple(range(1, 7)))


def _setting(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flattened(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401  # a tree of builtins
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, part in value.items():
        if key or name not in _NOT_COMPARED:
            yield from _flattened(part, f"{key}.{name}" if key else name)


def _curves(
    caption: str,
    runs: Sequence[RecordedRun],
    labels: Sequence[str],
    points: Callable[[RecordedRun], Points],
    unit: Unit,
) -> Section | None:
    """One line for each run; None if no run has the figure."""
    curves = [(label, points(run)) for run, label in zip(runs, labels, strict=True)]
    lines = [Series(name=label, points=each) for label, each in curves if any(y is not None for _, y in each)]
    if not lines:
        return None
    chart = LineChart(
        caption=caption,
        x_label="step",
        unit=unit,
        series=tuple(lines[:_MOST_CURVES]),
        from_zero=unit is not Unit.NUMBER,
    )
    blocks: tuple[Block, ...] = (chart,)
    if len(lines) > _MOST_CURVES:
        blocks = (Sentence(text=f"the first {_MOST_CURVES} of {len(lines)} runs"), chart)
    return Section(title=caption, blocks=blocks)


def _recommended(runs: Sequence[RecordedRun], labels: Sequence[str]) -> Iterator[Block]:
    """The first recommendation of each run."""
    for run, label in zip(runs, labels, strict=True):
        for each in run.recommended[:1]:
            yield Sentence(text=f"{label}: {each.text}")
