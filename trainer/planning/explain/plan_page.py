"""A plan as a page: what runs and why, what it needs part by part, what else could run, and what could not and why.

From the plan alone. `plan_page` and `comparison_page` make the pages, `explain_plan` and `compare_plans` write them as
plain text. Rejections that share a rule are one line; those that a number decided are one line only if their numbers
and remedies are equal.
"""

from collections.abc import Iterable, Iterator, Sequence

from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.explain.choice import cache_section, choice_section, heading, machine_text
from shardwise.trainer.planning.page.content import Bars, Page, Section, Sentence, StackedBar, Table, page_text
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.reasons import OptIn, opt_ins
from shardwise.trainer.planning.search.budget import ENERGY_RULE, RunTotals, run_totals
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.errors import NothingFitsError
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Candidate, Plan, Rejection
from shardwise.trainer.spec.units import format_bytes, format_seconds


def memory_section(plan: Plan, context: PlanningContext) -> Section:
    """Bytes on one device at the peak, by part, and their uncertainty."""
    memory = plan.chosen.memory
    outside = max(0, memory.need_bytes - memory.peak_allocated_bytes)
    each = "rank" if context.is_cpu else "GPU"
    total = max(memory.usable_bytes, memory.need_bytes)
    events = tuple((name, float(size), format_bytes(size)) for name, size in memory.events.items())
    sentences = (
        f"peak allocated {format_bytes(memory.peak_allocated_bytes)}, low {format_bytes(memory.low_bytes)}, high "
        f"{format_bytes(memory.high_bytes)}; reserved {format_bytes(memory.peak_reserved_bytes)}; device total "
        f"{format_bytes(memory.device_bytes)}; between steps {format_bytes(memory.steady_allocated_bytes)}",
        *_off_device(plan),
    )
    return Section(
        title=f"memory of each {each}: needs {format_bytes(memory.need_bytes)} of "
        f"{format_bytes(memory.usable_bytes)} usable; the peak is {format_bytes(memory.peak_allocated_bytes)} "
        f"allocated, at {memory.peak_event}",
        blocks=(
            StackedBar(parts={**memory.parts, "context and margin": outside}, total=total),
            Bars(caption="allocated at every event of a step", rows=events),
            *(Sentence(text=text) for text in sentences),
        ),
    )


def speed_section(plan: Plan, context: PlanningContext) -> Section:
    """How fast, how long, and what the whole run takes."""
    chosen, totals = plan.chosen, run_totals(context, plan.chosen)
    words = [f"{totals.tokens_per_s:,.0f} tokens/s"]
    if not context.is_cpu:
        words.append(f"{totals.tokens_per_s / chosen.num_ranks:,.0f} a GPU")
    words += [f"{format_seconds(chosen.speed.step_s)} a step", f"{format_seconds(totals.hours * 3600)} in all"]
    if chosen.speed.mfu is not None:
        share_filled = totals.tokens_per_s / (chosen.speed.tokens_per_s_per_gpu * chosen.num_ranks)
        words.append(f"MFU {chosen.speed.mfu * share_filled:.0%}")
    ordered = sorted(((part, seconds) for part, seconds in chosen.speed.parts.items() if seconds), key=lambda p: -p[1])
    parts = ", ".join(f"{part.removesuffix('_s')} {format_seconds(seconds)}" for part, seconds in ordered[:4])
    bars = tuple((part.removesuffix("_s"), seconds, format_seconds(seconds)) for part, seconds in ordered)
    title = "speed" if context.device.has_known_speed else "speed is not known; these only rank strategies"
    return Section(
        title=f"{title}: {', '.join(words)}",
        blocks=(
            Sentence(text=f"a step: {parts}"),
            Bars(caption="parts of a step", rows=bars),
            *(Sentence(text=text) for text in _totals_lines(plan, totals)),
        ),
    )


def _totals_lines(plan: Plan, totals: RunTotals) -> Iterator[str]:
    words = []
    if totals.gpu_hours is not None:
        words.append(f"{totals.gpu_hours:.3g} GPU-hours")
    if totals.kwh is not None:
        words.append(f"{totals.kwh:.3g} kWh ({ENERGY_RULE})")
    if totals.cost is not None:
        words.append(f"cost {totals.cost:.2f} at {plan.job.price_per_gpu_hour:g} a GPU-hour")
    if words:
        yield f"the run takes {', '.join(words)}"


def _off_device(plan: Plan) -> Iterator[str]:
    memory = plan.chosen.memory
    sizes = (
        ("pinned host RAM", memory.pinned_bytes),
        ("host RAM", memory.host_bytes),
        ("NVMe", memory.nvme_bytes),
    )
    words = [f"{name} {format_bytes(size)}" for name, size in sizes if size]
    if words:
        yield f"of each node: {', '.join(words)}"


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


def opt_in_section(opt_ins: Sequence[OptIn], plan: Plan) -> Section | None:
    """Opt-ins that the job does not allow, and their gains."""
    if not opt_ins:
        return None
    rows = [("allow", "memory", "time", "", "strategy")]
    for leave in opt_ins:
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
            _loss_text(fallback),
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


def _loss_text(candidate: Candidate) -> str:
    tokens = f" {candidate.loss_chunk_tokens}" if candidate.loss_chunk_tokens else ""
    return f"{candidate.loss}{tokens}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


_MEMBERS = frozenset(
    str(member) for row in CATALOGUE for member in (row.sharding, row.offload, row.optimizer, row.precision)
)


def rejections_section(rejections: Sequence[Rejection]) -> Section | None:
    """Rejected strategies with their reasons."""
    if not rejections:
        return None
    lines = (*_by_number(rejections), *_by_rule(rejections))
    return Section(
        title=f"rejected ({len(rejections)} rows of the catalogue)",
        blocks=tuple(Sentence(text=text) for text in lines),
    )


def nearest_rejections(rejections: Sequence[Rejection], most: int) -> tuple[str, ...]:
    """At most so many lines, rows that a number ruled out before the rules, and how many lines are left out."""
    lines = (*_by_number(rejections), *_by_rule(rejections))
    more = len(lines) - most
    return (*lines[:most], *([f"and {more} more reasons: shardwise plan names them all"] if more > 0 else []))


def _by_number(rejections: Iterable[Rejection]) -> Iterator[str]:
    groups: dict[tuple[str, str | None], list[str]] = {}
    for rejection in rejections:
        if rejection.rule is None:
            groups.setdefault((rejection.reason, rejection.remedy), []).append(rejection.strategy)
    for (reason, remedy), names in groups.items():
        yield f"{', '.join(names)}: {reason}" + (f"; would fit with {remedy}" if remedy else "")


def _by_rule(rejections: Iterable[Rejection]) -> Iterator[str]:
    for (_, tail, instead), (heads, num_rows) in _rule_groups(rejections).items():
        rows = "1 row" if num_rows == 1 else f"{num_rows} rows"
        what = f"{', '.join(heads)} ({rows})" if heads else rows
        yield f"{what}: {tail}" + (f"; instead: {instead}" if instead else "")


def _rule_groups(
    rejections: Iterable[Rejection],
) -> dict[tuple[str, str, str | None], tuple[list[str], int]]:
    """Rejections of one rule with one wording; what opens the sentence (`adamw_8bit`) is collected."""
    groups: dict[tuple[str, str, str | None], tuple[list[str], int]] = {}
    for rejection in rejections:
        if rejection.rule is None:
            continue
        head, _, tail = rejection.reason.partition(" ")
        if head not in _MEMBERS:
            head, tail = "", rejection.reason
        key = (rejection.rule, tail, _shared_remedy(rejection, head))
        heads, num_rows = groups.setdefault(key, ([], 0))
        if head and head not in heads:
            heads.append(head)
        groups[key] = (heads, num_rows + 1)
    return groups


def _shared_remedy(rejection: Rejection, head: str) -> str | None:
    """A remedy that names the row's own member would split the group."""
    return None if head and rejection.remedy and head in rejection.remedy.split() else rejection.remedy


__all__ = ["Answer", "compare_plans", "comparison_page", "explain_plan", "machine_text", "plan_page"]


def explain_plan(plan: Plan, *, top: int = 3, width: int = 100, more: Sequence[Section] = ()) -> str:
    """The plan as text of at most `width` columns, with the `top` runners-up."""
    return page_text(plan_page(plan, top=top, more=more), width=width)


def compare_plans(answers: Sequence[Answer], *, width: int = 100) -> str:
    """Several machines side by side: what each would run, how fast, for how much, and which is best at what."""
    _, _, text = page_text(comparison_page(answers), width=width).partition("\n\n")
    return text


def plan_page(plan: Plan, *, top: int = 3, more: Sequence[Section] = ()) -> Page:
    """All that is said of one plan; `more` stands before the notes."""
    context = context_of(plan)
    sections = (
        choice_section(plan, context),
        memory_section(plan, context),
        speed_section(plan, context),
        cache_section(plan),
        _sentences("why", plan.chosen.reasons),
        methods_section(plan),
        runners_up_section(plan, context, top),
        opt_in_section(opt_ins(context, plan), plan),
        fallbacks_section(plan),
        rejections_section(plan.rejections),
        *more,
        _sentences("notes", (*plan.notes, *(f"not used: {words}" for words in plan.hardware.excluded))),
    )
    return Page(title=heading(plan), sections=tuple(section for section in sections if section is not None))


def comparison_page(answers: Sequence[Answer]) -> Page:
    """Several machines for one job."""
    names = [answer.name for _, answer in answers if isinstance(answer, Plan)]
    title = f"{names[0] if names else 'the job'} on {len(answers)} machines"
    return Page(title=title, sections=(comparison_section(answers),))


def _sentences(title: str, texts: Sequence[str]) -> Section | None:
    return Section(title=title, blocks=tuple(Sentence(text=text) for text in texts)) if texts else None
