"""Comparisons of plans: one job on several machines, or on several numbers of nodes. Pure.

Speed on several nodes is tokens of data a second by all devices, relative to the smallest number of nodes that has a
plan. Only plans of the same method are compared, since LoRA on one node and full training on four are different work.
With more nodes than sequences in a step the ratio no longer rises.
"""

from collections.abc import Sequence

from shardwise.trainer.planning.candidates import RunTotals, run_totals
from shardwise.trainer.planning.explain.plan_page import figure_text, figures_of
from shardwise.trainer.planning.page.content import Bars, Page, Section, Sentence, Table, page_text
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.spec.errors import NothingFitsError
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.units import format_seconds
from shardwise.trainer.spec.value import Value

MachineResult = tuple[str, Plan | NothingFitsError]


def compare_plans(results: Sequence[MachineResult], *, width: int = 100) -> str:
    """A comparison of machines as text: the strategy of each, its speed and cost, and the best by each measure."""
    _, _, text = page_text(comparison_page(results), width=width).partition("\n\n")
    return text


def comparison_page(results: Sequence[MachineResult]) -> Page:
    """Several machines for one job."""
    names = [result.name for _, result in results if isinstance(result, Plan)]
    title = f"{names[0] if names else 'the job'} on {len(results)} machines"
    return Page(title=title, sections=(comparison_section(results),))


def comparison_section(results: Sequence[MachineResult]) -> Section:
    """Several machines side by side, and the verdict."""
    rows: list[tuple[str, ...]] = [
        ("machine", "method", "batch", "memory", "tokens/s", "time", "GPU-hours", "kWh", "cost", "strategy")
    ]
    details: list[str] = []
    bars = []
    for name, result in results:
        if isinstance(result, NothingFitsError):
            first, *rest = str(result).splitlines()
            rows.append((name, "-", "-", "-", "-", "-", "-", "-", "-", "nothing fits"))
            details += [f"{name}: {first.removeprefix('nothing fits: ')}", *(f"  {line}" for line in rest)]
            continue
        context, chosen = context_of(result), result.chosen
        totals = run_totals(context, chosen)
        figures = figures_of(chosen, totals)
        rows.append(
            (
                name,
                str(chosen.method),
                figures[1],
                *figures[3:6],
                figure_text(totals.gpu_hours),
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
            *(Sentence(text=text) for text in (*_verdict(results), *details)),
        ),
    )


def _verdict(results: Sequence[MachineResult]) -> list[str]:
    """The fastest, the cheapest and the most frugal, of those that fit."""
    totals = {
        name: run_totals(context_of(result), result.chosen) for name, result in results if isinstance(result, Plan)
    }
    if len(totals) < 2:
        return []
    fastest = min(totals, key=lambda name: totals[name].hours)
    figures = [f"fastest: {fastest} ({format_seconds(totals[fastest].hours * 3600)})"]
    costs = {name: each.cost for name, each in totals.items() if each.cost is not None}
    gpu_hours = {name: each.gpu_hours for name, each in totals.items() if each.gpu_hours is not None}
    energies = {name: each.kwh for name, each in totals.items() if each.kwh is not None}
    if costs:
        figures.append(_least("cheapest", costs, "{:.2f}"))
    elif gpu_hours:
        figures.append(_least("fewest GPU-hours", gpu_hours, "{:.3g}"))
    if energies:
        figures.append(_least("least energy", energies, "{:.3g} kWh"))
    one_price = "; every machine at the same price_per_gpu_hour" if costs else ""
    return [", ".join(figures) + one_price]


def _least(claim: str, figures: dict[str, float], form: str) -> str:
    name = min(figures, key=figures.__getitem__)
    return f"{claim}: {name} ({form.format(figures[name])})"


MOST_COUNTS = 5


class NodeCount(Value, frozen=True, kw_only=True):
    """A number of nodes and the job's plan on them."""

    num_nodes: int
    totals: RunTotals | None = None  # None: nothing fits, for `reason`
    method: str = ""
    strategy: str = ""
    reason: str = ""


def counts_to_try(allowed: int, requested: int) -> tuple[int, ...]:
    """At most MOST_COUNTS numbers of nodes: powers of two up to `allowed`, those nearest to `requested`, and both."""
    doubling = {2**power for power in range(allowed.bit_length()) if 2**power <= allowed}
    near = sorted(
        doubling | {allowed, requested}, key=lambda count: (max(count, requested) / min(count, requested), count)
    )
    return tuple(sorted(near[:MOST_COUNTS]))


def planned(num_nodes: int, plan: Plan) -> NodeCount:
    """Time and cost of a plan for a number of nodes."""
    chosen = plan.chosen
    return NodeCount(
        num_nodes=num_nodes,
        totals=run_totals(context_of(plan), chosen),
        method=str(chosen.method),
        strategy=chosen.strategy.name,
    )


def speedups(counts: Sequence[NodeCount]) -> dict[int, float]:
    """Speed of each relative to the first that fits, among those of its method."""
    first = next((count for count in counts if count.totals is not None), None)
    if first is None or first.totals is None:
        return {}
    return {
        count.num_nodes: count.totals.tokens_per_s / first.totals.tokens_per_s
        for count in counts
        if count.totals is not None and count.method == first.method
    }


def node_counts_section(counts: Sequence[NodeCount], *, place: str, allowed: int, sentences: Sequence[str]) -> Section:
    """`nodes: 2 are 1.9x as fast as 1, 4 are 3.4x; gpu allows 8`, with a table, bars and further sentences."""
    ratios = speedups(counts)
    rows: list[tuple[str, ...]] = [("nodes", "tokens/s", "speed", "time", "GPU-hours", "method", "strategy")]
    rows += [_row(count, ratios.get(count.num_nodes)) for count in counts]
    bars = [
        (f"{count.num_nodes} nodes", count.totals.tokens_per_s, f"{count.totals.tokens_per_s:,.0f} tokens/s")
        for count in counts
        if count.totals is not None
    ]
    return Section(
        title=f"nodes: {'; '.join((*_ratio_text(ratios), f'{place} allows {allowed}'))}",
        blocks=(
            *([Table(rows=tuple(rows), right=(0, 1, 2, 3, 4), wide=6)] if len(counts) > 1 else []),
            Bars(caption="tokens a second", rows=tuple(bars)),
            *(Sentence(text=text) for text in sentences),
        ),
    )


def _row(count: NodeCount, ratio: float | None) -> tuple[str, ...]:
    totals = count.totals
    if totals is None:
        return (str(count.num_nodes), "-", "-", "-", "-", "-", count.reason)
    return (
        str(count.num_nodes),
        f"{totals.tokens_per_s:,.0f}",
        "-" if ratio is None else f"{ratio:.2f}x",
        format_seconds(totals.hours * 3600),
        "-" if totals.gpu_hours is None else f"{totals.gpu_hours:.3g}",
        count.method,
        count.strategy,
    )


def _ratio_text(ratios: dict[int, float]) -> list[str]:
    """`2 are 1.9x as fast as 1, 4 are 3.4x`; nothing for a single number."""
    first, *others = ratios or {1: 1.0}
    parts = [f"{count} are {ratios[count]:.3g}x" for count in others]
    return [", ".join((f"{parts[0]} as fast as {first}", *parts[1:]))] if parts else []
