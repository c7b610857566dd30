"""A profile as text for a terminal and as JSON. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from shardwise.launch.show.report import format_size, shown
from shardwise.trainer.planning.memory import grouped
from shardwise.trainer.planning.page.content import Page, Section, Sentence, Table
from shardwise.trainer.spec.plan import PROFILE_FOLDER, Candidate, Plan, ProfileFigures
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds


def forecast(plan: Plan, step_s: float) -> dict[str, float | None]:
    """Seconds of a step, an epoch and the job of `plan`, and tokens a second, without saving and evaluation.

    A stream, whose length is not known, has no epoch.
    """
    schedule = plan.schedule
    epoch_s = None if plan.data.is_stream else step_s * (plan.data.num_rows / schedule.sequences_per_step)
    tokens_per_s = schedule.tokens_per_step / step_s
    return {"step_s": step_s, "tokens_per_s": tokens_per_s, "epoch_s": epoch_s, "job_s": step_s * schedule.num_steps}


def profile_page(plan: Plan, report: Report, figures: ProfileFigures | None, steps_s: Sequence[float]) -> Page:
    """The page of a profile: the plan of the job, the report of its few steps, and the durations of the timed ones."""
    sections = [Section(title="Time", blocks=(*_time_blocks(plan, report, steps_s),))]
    if figures is not None:
        sections.append(
            Section(title="Time of a step by phase and operator", blocks=(*_part_blocks(report), _operators(figures)))
        )
        sections.append(Section(title="Memory", blocks=(_memory(report), *_phases(report))))
        sections.append(
            Section(title="Activations that one forward saves for its backward", blocks=(*_retained(figures),))
        )
        files = (Sentence(text=f"{PROFILE_FOLDER}/{name}: {content}") for name, content in figures.files.items())
        sections.append(Section(title="Files", blocks=tuple(files)))
    return Page(title=f"{plan.name}: {_candidate_text(report.plan)}", sections=tuple(sections))


def profile_json(
    plan: Plan, report: Report, figures: ProfileFigures | None, steps_s: Sequence[float]
) -> dict[str, Any]:
    """The same figures, plain."""
    measured_s, predicted_s = report.measured.speed.step_s, report.plan.speed.step_s
    return {
        "measured": None if measured_s is None else forecast(plan, measured_s),
        "predicted": forecast(plan, predicted_s),
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
    found = {} if measured_s is None else forecast(plan, measured_s)
    rows = [
        (label, shown(found.get(name), form), shown(expected[name], form))
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
    tables = {"module": figures.retained, "over all transformer blocks": figures.retained_in_all_blocks}
    for header, retained in tables.items():
        rows = ((each.place, format_bytes(each.num_bytes)) for each in retained)
        if retained:
            yield Table(rows=((header, "saved"), *rows), right=(1,))
