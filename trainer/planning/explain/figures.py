"""The parts of an explanation that are figures of the chosen candidate: its memory, its speed, what the run takes."""

from collections.abc import Iterator

from trainer.planning.context import PlanningContext
from trainer.planning.page.content import Bars, Section, Sentence, StackedBar
from trainer.planning.search.run_totals import ENERGY_RULE, RunTotals, run_totals
from trainer.spec.plan import Plan
from trainer.spec.units import format_bytes, format_seconds


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
