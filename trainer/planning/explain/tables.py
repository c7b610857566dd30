"""The tables of an explanation: methods, runners-up, what leave would buy, fallbacks, and machines side by side."""

from collections.abc import Iterator, Sequence

from trainer.planning.context import PlanningContext
from trainer.planning.page.content import Bars, Section, Sentence, Table
from trainer.planning.planner import context_of
from trainer.planning.reasons.opt_in import Leave
from trainer.planning.search.run_totals import RunTotals, run_totals
from trainer.spec.errors import NothingFitsError
from trainer.spec.plan import Candidate, Plan
from trainer.spec.strategy import Optimizer
from trainer.spec.units import format_bytes, format_seconds

Answer = tuple[str, Plan | NothingFitsError]


def methods_section(plan: Plan) -> Section:
    """Memory and time of each method."""
    rows = [("method", "memory", "time", "GPU-hours", "kWh", "cost", "")]
    rows += [
        (
            str(row.method),
            "-" if row.memory_bytes is None else format_bytes(row.memory_bytes),
            "-" if row.hours is None else format_seconds(row.hours * 3600),
            _figure(row.gpu_hours),
            _figure(row.kwh),
            _money(row.cost),
            row.verdict,
        )
        for row in plan.methods
    ]
    needs = tuple(
        (str(row.method), float(row.memory_bytes), format_bytes(row.memory_bytes))
        for row in plan.methods
        if row.memory_bytes
    )
    return Section(
        title="methods",
        blocks=(
            Table(rows=tuple(rows), right=(1, 2, 3, 4, 5), wide=6),
            Bars(caption="memory of each device by method", rows=needs),
        ),
    )


def runners_up_section(plan: Plan, context: PlanningContext, top: int) -> Section:
    """The next best candidates and what they would cost."""
    num_others = len(plan.candidates) - 1
    others = list(enumerate(plan.candidates[1:], start=2))
    shown = (list(_unlike(plan.candidates)) or others)[:top]
    if not shown:
        return Section(title=f"runners-up: {num_others or 'none'}")
    rows: list[tuple[str, ...]] = [
        ("--take", "strategy", "batch", "recompute", "memory", "tokens/s", "time", "kWh", "cost", "")
    ]
    bars = []
    for number, candidate in ((1, plan.chosen), *shown):
        totals = run_totals(context, candidate)
        bars.append((candidate.strategy.name, totals.hours, format_seconds(totals.hours * 3600)))
        if number > 1:
            ratio = candidate.speed.step_s / plan.chosen.speed.step_s
            rows.append((str(number), *_figures(candidate, totals), f"{ratio:.2f}x time"))
    return Section(
        title=f"runners-up ({num_others} in all)",
        blocks=(
            Table(rows=tuple(rows), right=(0, 4, 5, 6, 7, 8), wide=1),
            Bars(caption="time of the run, the choice first", rows=tuple(bars)),
        ),
    )


def _unlike(candidates: Sequence[Candidate]) -> Iterator[tuple[int, Candidate]]:
    """The runners-up with their numbers, without those that differ from one before in AdamW's implementation alone."""
    seen = {_settings(candidates[0])}
    for number, candidate in enumerate(candidates[1:], start=2):
        if _settings(candidate) not in seen:
            seen.add(_settings(candidate))
            yield number, candidate


def _settings(candidate: Candidate) -> tuple[object, ...]:
    row = candidate.strategy
    optimizer = Optimizer.ADAMW if row.optimizer is Optimizer.ADAMW_FUSED else row.optimizer
    sizes = (candidate.micro_batch, candidate.accumulation)
    return row.sharding, row.offload, row.precision, optimizer, sizes, candidate.checkpointing


def leave_section(leaves: Sequence[Leave], plan: Plan) -> Section | None:
    """Opt-ins that the job does not allow, and their gains."""
    if not leaves:
        return None
    rows = [("allow", "memory", "time", "", "strategy")]
    for leave in leaves:
        candidate = leave.candidate
        effect = "rounds products" if candidate.tf32 else "changes the update"
        effect = "exact" if candidate.strategy.is_exact and not candidate.tf32 else effect
        ratio = candidate.speed.step_s / plan.chosen.speed.step_s
        rows.append(
            (
                str(leave.allowance),
                format_bytes(candidate.memory.need_bytes),
                f"{ratio:.2f}x",
                effect,
                candidate.strategy.name,
            )
        )
    return Section(
        title="what leave would buy, beside this plan", blocks=(Table(rows=tuple(rows), right=(1, 2), wide=4),)
    )


def fallbacks_section(plan: Plan) -> Section:
    """Fallbacks, which run if the prediction was wrong."""
    if not plan.fallbacks:
        return Section(title="if memory runs out: nothing smaller is left")
    rows = [("", "strategy", "batch", "recompute", "loss", "peak")]
    rows += [
        (
            f"{number}.",
            fallback.strategy.name,
            _batch(fallback),
            str(fallback.checkpointing),
            _loss_words(fallback),
            format_bytes(fallback.memory.peak_allocated_bytes),
        )
        for number, fallback in enumerate(plan.fallbacks, start=1)
    ]
    return Section(
        title="if memory runs out, in this order, at the same global batch",
        blocks=(Table(rows=tuple(rows), right=(0, 5), wide=1),),
    )


def comparison_section(answers: Sequence[Answer]) -> Section:
    """Several machines side by side, and the verdict."""
    rows: list[tuple[str, ...]] = [
        ("machine", "method", "batch", "memory", "tokens/s", "time", "GPU-hours", "kWh", "cost", "strategy")
    ]
    details: list[str] = []
    bars = []
    for name, answer in answers:
        if isinstance(answer, NothingFitsError):
            first, *rest = str(answer).splitlines()
            rows.append((name, "-", "-", "-", "-", "-", "-", "-", "-", "nothing fits"))
            details += [f"{name}: {first.removeprefix('nothing fits: ')}", *(f"  {line}" for line in rest)]
            continue
        context, chosen = context_of(answer), answer.chosen
        totals = run_totals(context, chosen)
        figures = _figures(chosen, totals)
        rows.append(
            (
                name,
                str(chosen.method),
                figures[1],
                *figures[3:6],
                _figure(totals.gpu_hours),
                *figures[6:],
                figures[0],
            )
        )
        bars.append((name, totals.hours, format_seconds(totals.hours * 3600)))
    return Section(
        title="machines compared",
        blocks=(
            Table(rows=tuple(rows), right=(3, 4, 5, 6, 7, 8), wide=9),
            Bars(caption="time of the run", rows=tuple(bars)),
            *(Sentence(text=text) for text in (*_verdict(answers), *details)),
        ),
    )


def _verdict(answers: Sequence[Answer]) -> list[str]:
    """The fastest, the cheapest and the most frugal, of those that fit."""
    totals = {
        name: run_totals(context_of(answer), answer.chosen) for name, answer in answers if isinstance(answer, Plan)
    }
    if len(totals) < 2:
        return []
    fastest = min(totals, key=lambda name: totals[name].hours)
    words = [f"fastest: {fastest} ({format_seconds(totals[fastest].hours * 3600)})"]
    costs = {name: each.cost for name, each in totals.items() if each.cost is not None}
    gpu_hours = {name: each.gpu_hours for name, each in totals.items() if each.gpu_hours is not None}
    energies = {name: each.kwh for name, each in totals.items() if each.kwh is not None}
    if costs:
        words.append(_least("cheapest", costs, "{:.2f}"))
    elif gpu_hours:
        words.append(_least("fewest GPU-hours", gpu_hours, "{:.3g}"))
    if energies:
        words.append(_least("least energy", energies, "{:.3g} kWh"))
    one_price = "; every machine at the same price_per_gpu_hour" if costs else ""
    return [", ".join(words) + one_price]


def _least(claim: str, figures: dict[str, float], form: str) -> str:
    name = min(figures, key=figures.__getitem__)
    return f"{claim}: {name} ({form.format(figures[name])})"


def _figures(candidate: Candidate, totals: RunTotals) -> tuple[str, ...]:
    return (
        candidate.strategy.name,
        _batch(candidate),
        str(candidate.checkpointing),
        format_bytes(candidate.memory.need_bytes),
        f"{totals.tokens_per_s:,.0f}",
        format_seconds(totals.hours * 3600),
        _figure(totals.kwh),
        _money(totals.cost),
    )


def _batch(candidate: Candidate) -> str:
    return f"{candidate.micro_batch} x {candidate.accumulation}"


def _loss_words(candidate: Candidate) -> str:
    tokens = f" {candidate.loss_chunk_tokens}" if candidate.loss_chunk_tokens else ""
    return f"{candidate.loss}{tokens}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
