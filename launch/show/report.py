"""A report as plain text: the end of the run, and every prediction with its measurement; and a profile as a page."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shardwise.launch.show.recorded_run import ENDINGS, RecordedRun, end_line, state_line
from shardwise.trainer.planning.explain.recommend import Recommendation
from shardwise.trainer.planning.memory import grouped
from shardwise.trainer.planning.page.content import Page, Section, Sentence, Table, paragraph, table
from shardwise.trainer.spec.plan import PROFILE_FOLDER, Candidate, Plan, ProfileFigures
from shardwise.trainer.spec.report import (
    AttemptRecord,
    DeviceTime,
    Ending,
    Fault,
    Figures,
    Report,
    TimePart,
    busy_cores,
    relative_difference,
)
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds

FAULTS = {
    Fault.OUT_OF_MEMORY: "ran out of memory",
    Fault.HOST_OUT_OF_MEMORY: "was ended because host memory ran out",
    Fault.KILLED: "was killed",
    Fault.HUNG: "hung",
    Fault.ERROR: "failed",
}


PROCESS_RAM = "RAM of each process"
NOT_PREDICTED = "not predicted"
LEAST_KIND = 0.01  # of the time of the sampled steps
_MOST_LEARNED = 0.9  # of the tokens: where more are learned, their rate is no line of its own


def render_run(run: RecordedRun) -> str:
    """The report of one run for a terminal; without report.json, its progress."""
    if run.report is not None:
        return render_report(run.report, run_dir=run.run_dir, recommended=run.recommended)
    lines = [f"{run.run_dir}: {state_line(run)}", f"  its current state: shardwise status {run.run_dir}"]
    if run.final_loss is not None:
        lines.append(f"  training loss {run.final_loss:.4f} at step {run.step}")
    if run.plan is not None:
        lines += ["", *table(comparison_rows(run.predicted, run.measured), right=(1, 2, 3), indent="")]
    return "\n".join(lines)


def render_report(
    report: Report, *, run_dir: Path, recommended: Sequence[Recommendation] = (), width: int | None = None
) -> str:
    """The report of one run, for a terminal of `width` columns, without it for the one at hand."""
    width = terminal_width() if width is None else width
    lines = [f"{run_dir}: {end_line(report)}"]
    if report.error:
        lines.append(f"  error: {report.error}")
    if report.resumed_from_step is not None:
        lines.append(f"  resumed from step {report.resumed_from_step}")
    if len(report.history) > 1:
        lines += [f"  {attempt_line(attempt)}" for attempt in report.history]
    lines += [f"  incident: {incident}" for incident in report.incidents]
    lines += [line for text in loss_lines(report) for line in paragraph(text, width=width)]
    lines += ["", *table(comparison_rows(report.predicted, report.measured, report=report), right=(1, 2, 3), indent="")]
    times = [text for text in (parts_line(report.measured.speed.parts), device_line(report.device_time)) if text]
    lines += ["", *(line for text in times for line in paragraph(text, width=width, indent=""))] if times else []
    lines += [line for text in comparison_notes(report) for line in paragraph(text, width=width, indent="")]
    verified = [line for text in verified_lines(report) for line in paragraph(text, width=width, indent="")]
    lines += ["", *verified] if verified else []
    lines += _sample_lines(report)
    if recommended:
        lines += ["", "what would help:", *(line for each in recommended for line in paragraph(each.text, width=width))]
    lines += [f"checkpoint: {run_dir / report.checkpoint}"] if report.checkpoint else []
    lines += [f"model: {run_dir / report.export}"] if report.export else []
    return "\n".join(lines)


def terminal_width() -> int:
    """Columns of text: those of the terminal, at most 100."""
    return min(100, shutil.get_terminal_size((100, 24)).columns)


def attempt_line(attempt: AttemptRecord) -> str:
    """`attempt 2: ddp/fp32/adamw x2, micro batch 2 x 4: from step 3, ran out of memory at step 5 after 12 s`."""
    begin = "from the beginning" if attempt.resumed_from_step is None else f"from step {attempt.resumed_from_step}"
    end = ENDINGS[attempt.ending] if attempt.fault is None else FAULTS[attempt.fault]
    ranks = f" x{attempt.num_ranks}" if attempt.num_ranks > 1 else ""
    line = (
        f"attempt {attempt.number}: {attempt.strategy}{ranks}, micro batch {attempt.micro_batch} x "
        f"{attempt.accumulation}: {begin}, {end} at step {attempt.step} after {format_seconds(attempt.duration_s)}"
    )
    if attempt.fault is None or not attempt.fault.is_memory:
        return line
    line += f"; predicted peak {format_bytes(attempt.predicted_peak_bytes)}"
    return line + f", held {format_bytes(attempt.measured_peak_bytes)}" if attempt.measured_peak_bytes else line


def loss_lines(report: Report) -> list[str]:
    """The training loss and the last score of the held-out rows."""
    lines = []
    if report.final_loss is not None:
        lines.append(f"training loss {report.final_loss:.4f} at the last step")
    if report.evaluations:
        last = report.evaluations[-1]
        line = f"held-out loss {last.loss:.4f} (perplexity {last.perplexity:.1f}) over {last.num_tokens:,} tokens"
        if last.unigram_entropy_nats is not None:
            share = last.loss / last.unigram_entropy_nats
            line += f"; unigram entropy of the same tokens {last.unigram_entropy_nats:.4f}, ratio {share:.2f}"
        if last.accuracy is not None:
            line += f"; {last.accuracy:.1%} of them are the most likely token"
        if last.reward_accuracy is not None and last.reward_margin is not None:
            line = f"held-out loss of pairs {last.loss:.4f}; the chosen answer has the higher reward in "
            line += f"{last.reward_accuracy:.1%}, mean margin {last.reward_margin:.3f}, its perplexity is "
            line += f"{last.perplexity:.1f}"
        lines.append(line)
    return lines


def parts_line(parts: Mapping[str, float]) -> str:
    """`a step: backward 240 ms, forward 110 ms`, the longest first; parts below a thousandth are left out."""
    least = sum(parts.values()) / 1000
    ordered = sorted(((name, seconds) for name, seconds in parts.items() if seconds > least), key=lambda part: -part[1])
    return f"a step: {', '.join(f'{name} {format_seconds(each)}' for name, each in ordered)}" if ordered else ""


def device_line(sampled: DeviceTime | None) -> str:
    """`the GPU, in 2 sampled steps: idle 31%, matrix products 42%`; kinds below a hundredth are left out."""
    if sampled is None:
        return ""
    kinds = [f"{kind} {share:.0%}" for kind, share in sampled.kinds.items() if share >= LEAST_KIND]
    return f"the GPU, in {sampled.num_steps} sampled steps: {', '.join((f'idle {sampled.idle_share:.0%}', *kinds))}"


def comparison_rows(
    predicted: Figures, measured: Figures, *, report: Report | None = None
) -> list[tuple[str, str, str, str]]:
    """(figure, predicted, measured, difference), the header first; without a report not the time of the run."""

    def row(
        label: str,
        expected: float | None,
        found: float | None,
        form: Callable[[float], str],
        *,
        is_comparable: bool = True,
    ) -> tuple[str, str, str, str]:
        off = difference(expected, found) if is_comparable else ""
        return label, shown(expected, form), shown(found, form), off

    rows = [("", "predicted", "measured", "difference")]
    if report is not None:
        is_whole = report.ending is Ending.FINISHED
        whole = ("time of the run", report.predicted_s, report.duration_s)
        rows.append(row(*whole, format_seconds, is_comparable=is_whole))
        rows += [
            (f"  {part}", expected, found, difference(*seconds) if is_whole else "")
            for part, expected, found, seconds in _parts_of_time(report)
        ]
    same_rows = report is None or not report.predicts_longest_row
    is_cpu = measured.memory.device_bytes is None and measured.memory.peak_reserved_bytes is None
    for label, name in (
        ("peak allocated", "peak_allocated_bytes"),
        ("steady allocated", "steady_allocated_bytes"),
        ("peak reserved", "peak_reserved_bytes"),
        ("device", "device_bytes"),
        (PROCESS_RAM if is_cpu else "host", "host_bytes"),
    ):
        expected, found = getattr(predicted.memory, name), getattr(measured.memory, name)
        if is_cpu and name == "host_bytes" and report is not None:
            expected = report.plan.memory.need_bytes
        comparable = same_rows or name == "steady_allocated_bytes"
        rows += (
            [row(label, expected or None, found, format_size, is_comparable=comparable)] if found is not None else []
        )
        if name == "peak_allocated_bytes":  # whose parts they are
            expected_parts, found_parts = grouped(predicted.memory.parts), measured.memory.parts
            for part in dict.fromkeys((*expected_parts, *found_parts)):
                sizes = expected_parts.get(part), found_parts.get(part)
                label = f"  {part.replace('_', ' ')}"
                rows += [row(label, *sizes, format_size, is_comparable=same_rows)] if any(sizes) else []
    before, after = predicted.speed, measured.speed
    rate, learned = after.tokens_per_s_per_gpu, after.targets_per_s_per_gpu
    counts_targets = rate is not None and learned is None  # an earlier version
    label = "tokens/s per device" + (" (measured: learned ones)" if counts_targets else "")
    rows.append(row(label, before.tokens_per_s_per_gpu, rate, format_count))
    if rate and learned is not None and learned < _MOST_LEARNED * rate:
        rows.append(row("learned tokens/s per device", None, learned, format_count))
    rows.append(row("step", before.step_s, after.step_s, format_seconds))
    if after.mfu is not None:
        rows.append(("MFU", shown(before.mfu, "{:.1%}".format), f"{after.mfu:.1%}", ""))
    return rows


def _parts_of_time(report: Report) -> Iterator[tuple[str, str, str, tuple[float | None, float | None]]]:
    """Of each part of the time, predicted and measured as text and as seconds."""
    measured, predicted = report.parts_s, report.predicted_parts_s
    missing = NOT_PREDICTED if predicted else "-"
    for part in TimePart:
        expected, found = predicted.get(part), measured.get(part)
        if found is not None or (measured and expected is not None):
            text = missing if expected is None else format_seconds(expected)
            yield part.value, text, shown(found, format_seconds), (expected, found)


def comparison_notes(report: Report) -> Iterator[str]:
    """Reasons that limit the comparison: other programs used the cores, parts of the time, or the rows' lengths."""
    if (busy := busy_cores(report)) is not None:
        yield busy
    lacking = [part for part in report.parts_s if report.predicted_parts_s and part not in report.predicted_parts_s]
    if lacking:
        yield f"the predicted time of the run is without {', '.join(lacking)}"
    if report.predicts_longest_row:
        yield (
            "memory is predicted for the longest row, and was measured in one step, whose rows may be shorter: no "
            "difference is given"
        )


def verified_lines(report: Report) -> list[str]:
    """Lines about the verified engine; empty if no attempt got that far."""
    verified = report.verified
    if verified is None:
        return []
    facts = verified.facts
    fp8 = [facts[name] for name in ("fp8 library", "fp8 recipe", "fp8 gain") if name in facts]
    ranks = "1 process" if verified.world_size == 1 else f"{verified.world_size} processes"
    return [
        f"verified: {ranks}, {verified.engine_class}, {verified.optimizer_class}, {verified.precision}, "
        f"attention {verified.attention}, loss {verified.loss}, accumulation {verified.accumulation}"
        + (f", {verified.sharded_parameters} sharded parameters" if verified.sharded_parameters else ""),
        *([f"fp8: {', '.join(fp8)}"] if fp8 else []),
    ]


def _sample_lines(report: Report) -> list[str]:
    sample = report.sample
    if sample is None:
        return []
    lines = ["", "sample:"]
    for label, text in (("prompt", sample.prompt), ("before", sample.before), ("after", sample.after)):
        if text is not None:
            lines.append(f"  {label}: " + text.replace("\n", "\n          "))
    return lines


def shown(value: float | None, form: Callable[[float], str]) -> str:
    """The figure formatted by `form`; `-` for None."""
    return "-" if value is None else form(value)


def format_size(value: float) -> str:
    """Bytes that may be a mean."""
    return format_bytes(round(value))


def difference(predicted: float | None, measured: float | None) -> str:
    """The measured difference relative to the prediction, such as `-3.2%`; empty if a figure is missing."""
    off = relative_difference(predicted, measured)
    return "" if off is None else f"{off:+.1%}"


def forecast(plan: Plan, step_s: float) -> dict[str, float | None]:
    """Seconds of a step, an epoch and the job of `plan`, tokens a second without padding; no saving and evaluation.

    A stream, whose length is not known, has no epoch.
    """
    schedule = plan.schedule
    epoch_s = None if plan.data.is_stream else step_s * (plan.data.num_rows / schedule.sequences_per_step)
    tokens_per_s = plan.num_tokens / schedule.num_steps / step_s
    return {"step_s": step_s, "tokens_per_s": tokens_per_s, "epoch_s": epoch_s, "job_s": step_s * schedule.num_steps}


def profile_page(plan: Plan, report: Report, figures: ProfileFigures | None, steps_s: Sequence[float]) -> Page:
    """The page of a profile: the plan of the job, the report of its few steps, and the durations of the timed ones."""
    sections = [Section(title="Time", blocks=(*_time_blocks(plan, report, steps_s),))]
    if figures is not None:
        sections.append(
            Section(title="Time of a step by phase and operator", blocks=(*_part_blocks(report), _operators(figures)))
        )
        sections.append(Section(title="Memory", blocks=(_memory(report), *_phases(report))))
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
