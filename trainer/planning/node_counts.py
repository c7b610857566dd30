"""How many nodes are worth it: the same job planned for several numbers of them, side by side. Pure.

Speed is that of the data (tokens a second by all devices), held against the smallest number that has a plan; only the
same method is compared, since LoRA on one node and full training on four are not the same work. More nodes than a step
has sequences for show as a ratio that stays where it is.
"""

from collections.abc import Sequence

from shardwise.trainer.planning.page.content import Bars, Section, Sentence, Table
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.search.budget import RunTotals, run_totals
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.units import format_seconds
from shardwise.trainer.spec.value import Value

MOST_COUNTS = 5


class NodeCount(Value, frozen=True, kw_only=True):
    """A number of nodes and what the job would be on them."""

    num_nodes: int
    totals: RunTotals | None = None  # None: nothing fits, for `reason`
    method: str = ""
    strategy: str = ""
    reason: str = ""


def counts_to_try(allowed: int, requested: int) -> tuple[int, ...]:
    """At most MOST_COUNTS numbers of nodes up to what is allowed, doubling, those near `asked` first to be kept."""
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
    """How much faster each is than the first that fits, of the same method."""
    first = next((count for count in counts if count.totals is not None), None)
    if first is None or first.totals is None:
        return {}
    return {
        count.num_nodes: count.totals.tokens_per_s / first.totals.tokens_per_s
        for count in counts
        if count.totals is not None and count.method == first.method
    }


def node_counts_section(counts: Sequence[NodeCount], *, place: str, allowed: int, sentences: Sequence[str]) -> Section:
    """`nodes: 2 are 1.9x as fast as 1, 4 are 3.4x; gpu allows 8`, as a table, and what else is to say."""
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
    """`2 are 1.9x as fast as 1, 4 are 3.4x`; nothing where there is one number alone."""
    first, *others = ratios or {1: 1.0}
    words = [f"{count} are {ratios[count]:.3g}x" for count in others]
    return [", ".join((f"{words[0]} as fast as {first}", *words[1:]))] if words else []
