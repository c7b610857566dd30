"""One run as a page: how it ended, what would help, predicted beside measured, curves, the plan and why, the machine.

A section without anything to say is left out. Of a run without a report the page says so, and shows how far it got.
"""

from collections.abc import Iterable, Iterator, Sequence

from shardwise.launch.show.report.charts import (
    attempts_chart,
    loss_chart,
    marks_of,
    memory_chart,
    step_parts_chart,
    throughput_chart,
    timeline_chart,
)
from shardwise.launch.show.report.runs import RecordedRun, state_line
from shardwise.launch.show.report.text import attempt_line, comparison_rows, engaged_lines, loss_lines, parts_line
from shardwise.trainer.planning.explain.choice import choice_section, machine_words
from shardwise.trainer.planning.explain.sections import nearest_rejections, runners_up_section
from shardwise.trainer.planning.memory.parts import grouped
from shardwise.trainer.planning.page.content import (
    Block,
    Page,
    PairedBars,
    Quote,
    Section,
    Sentence,
    StackedBar,
    Table,
    Unit,
)
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.spec.hardware import Gpu
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.units import format_bytes, format_seconds

_MOST_REJECTIONS = 5
_NUM_RUNNERS_UP = 3


def run_page(run: RecordedRun) -> Page:
    """Everything there is to show of one run."""
    sections = (
        _summary(run),
        _section("what would help", [Sentence(text=each.text) for each in run.recommended]),
        _section("predicted beside measured", _comparison(run)),
        _section("loss", [loss_chart(run)] if run.curve else []),
        _section("throughput", [throughput_chart(run)] if run.curve else []),
        _section("time of a step", _step_time(run)),
        _section("memory of a device", _memory(run)),
        _section("incidents", _incidents(run)),
        _section("attempts", _attempts(run)),
        *_planned(run),
        _section("sample", _sample(run)),
        _section("seen to run", [] if run.report is None else _sentences(engaged_lines(run.report))),
        _section("hardware", [] if run.plan is None else list(_hardware(run.plan))),
        _section("versions", _versions(run)),
    )
    title = run.run_dir.name if run.plan is None else f"{run.run_dir.name}: {_what(run.plan)}"
    return Page(title=title, sections=tuple(section for section in sections if section is not None))


def _what(plan: Plan) -> str:
    return f"{plan.chosen.method} training of {plan.model_shape.model_type} on {machine_words(plan.hardware)}"


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
    """The figures, and of memory the parts as bars of one scale."""
    if run.candidate is None:
        return []
    rows = tuple(comparison_rows(run.predicted, run.measured))
    blocks: list[Block] = [Table(rows=rows, right=(1, 2, 3))]
    expected, found = grouped(run.predicted.memory.parts), run.measured.memory.parts
    parts = {name: (expected.get(name), found.get(name)) for name in dict.fromkeys((*expected, *found))}
    if found:
        bars = tuple(
            (name.replace("_", " "), _float(size), _float(held)) for name, (size, held) in parts.items() if size or held
        )
        blocks.append(PairedBars(caption="memory at the peak, by part", rows=bars, unit=Unit.BYTES))
    peak = run.measured.memory.peak_allocated_bytes
    if peak is not None:
        usable = run.candidate.memory.usable_bytes
        taken = {"allocated at the measured peak": peak}
        blocks.append(Sentence(text=f"of {format_bytes(usable)} usable:"))
        blocks.append(StackedBar(parts=taken, total=max(usable, peak)))
    return blocks


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)


def _step_time(run: RecordedRun) -> list[Block]:
    """Seconds of a step: measured by phase, predicted by cause."""
    measured, predicted = run.measured.speed, run.predicted.speed
    blocks: list[Block] = []
    for name, figures in (("measured", measured), ("predicted", predicted)):
        parts = {part.removesuffix("_s"): seconds for part, seconds in figures.parts.items()}
        words = parts_line(parts)
        if words and figures.step_s is not None:
            whole = format_seconds(figures.step_s)
            blocks.append(Sentence(text=f"{name}: {whole} {words}"))
    return [*blocks, step_parts_chart(run)] if run.curve else blocks


def _memory(run: RecordedRun) -> list[Block]:
    measured = run.measured.memory
    blocks: list[Block] = []
    if measured.peaks:
        words = ", ".join(f"{phase} {format_bytes(peak)}" for phase, peak in measured.peaks.items())
        blocks.append(Sentence(text=f"allocated at most in each phase of the profiled step: {words}"))
    if measured.timeline:
        blocks.append(timeline_chart(measured.timeline))
    chart = memory_chart(run)
    return [*blocks, chart] if chart.series else blocks


def _incidents(run: RecordedRun) -> list[Block]:
    told = () if run.report is None else run.report.incidents
    marks = [f"{mark.text} (step {mark.at:g})" for mark in marks_of(run)] if not told else []
    return _sentences((*told, *marks))


def _attempts(run: RecordedRun) -> list[Block]:
    history = () if run.report is None else run.report.history
    if len(history) < 2:
        return []
    return [attempts_chart(history), *_sentences(map(attempt_line, history))]


def _planned(run: RecordedRun) -> Iterator[Section]:
    """The choice and its reasons, what came next, what was nearest of those that were not taken."""
    if run.plan is None:
        return
    plan, context = run.plan, context_of(run.plan)
    choice = choice_section(plan, context)
    blocks = [*choice.blocks, *_sentences(plan.chosen.reasons)]
    if run.report is not None and run.report.plan.strategy.name != plan.chosen.strategy.name:
        blocks.insert(0, Sentence(text=f"what ran in the end is a fallback: {run.report.plan.strategy.name}"))
    yield Section(title=f"what was planned, and why: {plan.chosen.strategy.name}", blocks=tuple(blocks))
    if len(plan.candidates) > 1:
        yield runners_up_section(plan, context, _NUM_RUNNERS_UP)
    if plan.rejections:
        nearest = nearest_rejections(plan.rejections, _MOST_REJECTIONS)
        title = f"not taken: {len(plan.rejections)} rows of the catalogue"
        yield Section(title=title, blocks=tuple(_sentences(nearest)))
    notes = _section("notes of the plan", _sentences(plan.notes))
    if notes is not None:
        yield notes


def _sample(run: RecordedRun) -> list[Block]:
    sample = None if run.report is None else run.report.sample
    if sample is None:
        return []
    texts = (("prompt", sample.prompt), ("before", sample.before), ("after", sample.after))
    return [Quote(label=label, text=text) for label, text in texts if text is not None]


def _hardware(plan: Plan) -> Iterator[Block]:
    hardware = plan.hardware
    yield Sentence(text=machine_words(hardware))
    if hardware.gpus:
        rows = [("", "GPU", "memory", "driver", "power limit"), *map(_gpu_row, hardware.gpus)]
        yield Table(rows=tuple(rows), right=(0, 2, 4))
    host = hardware.host
    cores = "" if host.num_cores is None else f"{host.num_cores} cores"
    ram = "" if host.ram_bytes is None else f"{format_bytes(host.ram_bytes)} RAM"
    words = ", ".join(word for word in (host.cpu_name or "", cores, ram) if word)
    yield from _sentences((*([f"host: {words}"] if words else []), *hardware.notes))
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
