"""Comparisons of plans: one job on several machines, or on several numbers of nodes. Pure.

Speed on several nodes is tokens of data a second by all devices, relative to the smallest number of nodes that has a
plan. Only plans of the same method are compared, since LoRA on one node and full training on four are different work.
With more nodes than sequences in a step the ratio no longer rises.
"""

from collections.abc import Mapping, Sequence

from shardwise.trainer.planning.candidates import run_totals
from shardwise.trainer.planning.explain.plan_page import figure_text, figures_of
from shardwise.trainer.planning.page.content import Bars, Page, Section, Sentence, Table, page_text
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.spec.errors import ShardwiseError
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.units import format_seconds

MachineResult = tuple[str, Plan | ShardwiseError]


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
        if isinstance(result, ShardwiseError):
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


def counts_to_try(allowed: int, requested: int) -> tuple[int, ...]:
    """At most MOST_COUNTS numbers of nodes: powers of two up to `allowed`, those nearest to `requested`, and both."""
    doubling = {2**power for power in range(allowed.bit_length()) if 2**power <= allowed}
    near = sorted(
        doubling | {allowed, requested}, key=lambda count: (max(count, requested) / min(count, requested), count)
    )
    return tuple(sorted(near[:MOST_COUNTS]))


def speedups(results: Mapping[int, Plan | ShardwiseError]) -> dict[int, float]:
    """Speed on each number of nodes relative to the fewest that have a plan, among the plans of its method."""
    plans = {count: result for count, result in results.items() if isinstance(result, Plan)}
    speeds = {count: run_totals(context_of(plan), plan.chosen).tokens_per_s for count, plan in plans.items()}
    first = next(iter(plans), None)
    return {
        count: speeds[count] / speeds[first]
        for count, plan in plans.items()
        if first is not None and plan.chosen.method is plans[first].chosen.method
    }


def node_counts_section(
    results: Mapping[int, Plan | ShardwiseError], *, place: str, allowed: int, sentences: Sequence[str]
) -> Section:
    """`nodes: 2 are 1.9x as fast as 1, 4 are 3.4x; gpu allows 8`, with the comparison and further sentences."""
    named = [(f"{count} node{'s' if count > 1 else ''}", result) for count, result in results.items()]
    return Section(
        title=f"nodes: {'; '.join((*_ratio_text(speedups(results)), f'{place} allows {allowed}'))}",
        blocks=(
            *(comparison_section(named).blocks if len(named) > 1 else ()),
            *(Sentence(text=text) for text in sentences),
        ),
    )


def _ratio_text(ratios: dict[int, float]) -> list[str]:
    """`2 are 1.9x as fast as 1, 4 are 3.4x`; nothing for a single number."""
    first, *others = ratios or {1: 1.0}
    parts = [f"{count} are {ratios[count]:.3g}x" for count in others]
    return [", ".join((f"{parts[0]} as fast as {first}", *parts[1:]))] if parts else []
