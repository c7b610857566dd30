"""A profile as text for a terminal and as JSON. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from shardwise.launch.show.report import format_size, shown
from shardwise.trainer.planning.memory import grouped
from shardwise.trainer.planning.page.content import Page, Section, Sentence, Table
from shardwise.trainer.spec.plan import PROFILE_FOLDER, Candidate, Plan, ProfileFigures, RetainedBytes
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds


class Forecast(NamedTuple):
    """Time and cost of a step, extrapolated to the whole job."""

    step_s: float
    num_steps: int
    num_epoch_steps: float | None  # None for a stream, whose length is not known
    tokens_per_step: int

    @property
    def epoch_s(self) -> float | None:
        return None if self.num_epoch_steps is None else self.step_s * self.num_epoch_steps

    @property
    def job_s(self) -> float:
        return self.step_s * self.num_steps

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s

    @property
    def figures(self) -> dict[str, float | None]:
        return {name: getattr(self, name) for name in ("step_s", "tokens_per_s", "epoch_s", "job_s")}


def forecast(plan: Plan, step_s: float) -> Forecast:
    """The forecast for the job of `plan` at `step_s` seconds a step, without saving and evaluation."""
    schedule = plan.schedule
    epoch = None if plan.data.is_stream else plan.data.num_rows / schedule.sequences_per_step
    return Forecast(step_s, schedule.num_steps, epoch, schedule.tokens_per_step)


def profile_page(plan: Plan, report: Report, figures: ProfileFigures | None, steps_s: Sequence[float]) -> Page:
    """`plan` is the job's, `report` that of its few steps, `steps_s` are those that were timed."""
    sections = [Section(title="Time", blocks=(*_time_blocks(plan, report, steps_s),))]
    if figures is not None:
        sections.append(
            Section(title="Time of a step by phase and operator", blocks=(*_part_blocks(report), _operators(figures)))
        )
        sections.append(Section(title="Memory", blocks=(_memory(report), *_phases(report))))
        sections.append(
            Section(title="Activations that one forward saves for its backward", blocks=(*_retained(figures),))
        )
        sections.append(Section(title="Files", blocks=(*_files(figures),)))
    return Page(title=f"{plan.name}: {_candidate_text(report.plan)}", sections=tuple(sections))


def profile_json(
    plan: Plan, report: Report, figures: ProfileFigures | None, steps_s: Sequence[float]
) -> dict[str, Any]:
    """The same figures, plain."""
    measured_s, predicted_s = report.measured.speed.step_s, report.plan.speed.step_s
    return {
        "measured": None if measured_s is None else forecast(plan, measured_s).figures,
        "predicted": forecast(plan, predicted_s).figures,
        "steps_s": list(steps_s),
        "parts_s": report.measured.speed.parts,
        "memory": msgspec.to_builtins(report.measured.memory),
        "predicted_memory": msgspec.to_builtins(report.predicted.memory),
        "profile": None if figures is None else msgspec.to_builtins(figures),
    }


def _candidate_text(candidate: Candidate) -> str:
    ranks = f" x{candidate.num_ranks}" if candidate.num_ranks > 1 else ""
    return f"{candidate.strategy.name}{ranks}, micro batch {candidate.micro_batch} x {candidate.accumulation}"


def _time_blocks(plan: Plan, report: Report, steps_s: Sequence[float]) -> Iterator[Sentence | Table]:
    measured_s = report.measured.speed.step_s
    expected = forecast(plan, report.plan.speed.step_s)
    found = None if measured_s is None else forecast(plan, measured_s)
    rows = [
        (label, shown(getattr(found, name, None), form), shown(getattr(expected, name), form))
        for label, name, form in (
            ("a step", "step_s", format_seconds),
            ("tokens a second", "tokens_per_s", format_count),
            ("an epoch", "epoch_s", format_seconds),
            (f"the job, {plan.schedule.num_steps} steps", "job_s", format_seconds),
        )
    ]
    yield Table(rows=(("", "measured", "predicted"), *rows), right=(1, 2))
    spread = f", from {format_seconds(min(steps_s))} to {format_seconds(max(steps_s))}" if len(steps_s) > 1 else ""
    timed = "1 step was timed" if len(steps_s) == 1 else f"{len(steps_s)} steps were timed"
    yield Sentence(text=f"{timed}{spread}; saving, evaluation and loading are not included.")


def _part_blocks(report: Report) -> Iterator[Table]:
    parts, whole = report.measured.speed.parts, report.measured.speed.step_s
    rows = [
        (name, format_seconds(seconds), f"{seconds / whole:.1%}")
        for name, seconds in parts.items()
        if whole and seconds
    ]
    if rows:
        yield Table(rows=(("phase", "seconds", "share"), *rows), right=(1, 2))


def _operators(figures: ProfileFigures) -> Table:
    total = sum(each.seconds for each in figures.operators) or 1.0
    rows = [
        (each.name, str(each.num_calls), format_seconds(each.seconds), f"{each.seconds / total:.1%}")
        for each in figures.operators
    ]
    return Table(rows=(("operator, by its own time", "calls", "time", "of these"), *rows), right=(1, 2, 3))


def _memory(report: Report) -> Table:
    measured, predicted = report.measured.memory, grouped(report.plan.memory.parts)
    found = {"at the peak": measured.peak_allocated_bytes, **measured.parts}
    expected = {"at the peak": report.plan.memory.peak_allocated_bytes, **predicted}
    rows = [
        (name.replace("_", " "), shown(found.get(name), format_size), format_bytes(size))
        for name, size in expected.items()
    ]
    return Table(rows=(("", "measured", "predicted"), *rows), right=(1, 2))


def _phases(report: Report) -> Iterator[Table]:
    peaks = report.measured.memory.peaks
    if peaks:
        rows = [(name, format_bytes(size)) for name, size in peaks.items()]
        yield Table(rows=(("phase", "peak"), *rows), right=(1,))


def _retained(figures: ProfileFigures) -> Iterator[Sentence | Table]:
    shown = sum(each.num_bytes for each in figures.retained)
    yield Sentence(
        text=f"{format_bytes(figures.retained_bytes)} of the first micro batch; those that allocated most of it, "
        f"{format_bytes(shown)} together:"
    )
    yield _retained_table("module", figures.retained)
    if figures.retained_in_all_blocks:
        yield _retained_table("over all transformer blocks", figures.retained_in_all_blocks)


def _retained_table(header: str, retained: Sequence[RetainedBytes]) -> Table:
    return Table(
        rows=((header, "saved"), *((each.place, format_bytes(each.num_bytes)) for each in retained)), right=(1,)
    )


def _files(figures: ProfileFigures) -> Iterator[Sentence]:
    for name, what in figures.files.items():
        yield Sentence(text=f"{PROFILE_FOLDER}/{name}: {what}")
