"""A plan in words: what runs and why, what it needs part by part, what else could run, and what could not and why.

Plain text, from the plan alone. Rejections that share a rule stand in one line with the members it ruled out, since
one rule takes many rows; a row that a number ruled out has its own.
"""

from collections.abc import Iterable, Iterator, Sequence

from trainer.planning.candidates import run_cost, run_hours, setting_of
from trainer.planning.catalogue import CATALOGUE
from trainer.planning.device import device_of
from trainer.planning.memory.recipe import dims_of, recipe_of
from trainer.planning.planner import situation_of
from trainer.planning.situation import Situation
from trainer.planning.text_layout import letters, paragraph, stacked_bar, table
from trainer.spec.errors import NothingFitsError
from trainer.spec.hardware import Hardware
from trainer.spec.plan import Candidate, Plan, Rejection
from trainer.spec.strategy import LossHead, Offload, Precision
from trainer.spec.units import format_bytes, format_count, format_seconds

_MEMBERS = frozenset(
    str(member) for row in CATALOGUE for member in (row.sharding, row.offload, row.optimizer, row.precision)
)
_TYPE_NAMES = {4: "fp32", 2: "bf16"}


def explain_plan(plan: Plan, *, top: int = 3, width: int = 100) -> str:
    """The plan as text of at most `width` columns, with the `top` runners-up."""
    situation = situation_of(plan)
    sections = [
        _choice(plan, situation, width),
        _memory(plan, situation, width),
        _speed(plan, situation, width),
        _reasons(plan, width),
        _methods(plan),
        _runners_up(plan, situation, top),
        _fallbacks(plan),
        _rejections(plan.rejections, width),
        _notes(plan, width),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def compare_plans(plans_or_errors: Sequence[tuple[str, Plan | NothingFitsError]]) -> str:
    """Several machines side by side: what each would run, how fast, for how much."""
    rows: list[tuple[str, ...]] = [("machine", "strategy", "batch", "memory", "tokens/s", "time", "GPU-hours", "cost")]
    details: list[str] = []
    for name, answer in plans_or_errors:
        if isinstance(answer, NothingFitsError):
            first, *rest = str(answer).splitlines()
            rows.append((name, "nothing fits", "-", "-", "-", "-", "-", "-"))
            details += [f"  {name}: {first.removeprefix('nothing fits: ')}", *(f"    {line}" for line in rest)]
        else:
            rows.append((name, *_comparison(answer)))
    return "\n".join([*table(rows, right=(3, 4, 5, 6, 7), indent=""), *details])


def machine_words(hardware: Hardware) -> str:
    """`4 nodes of 8 x H100-SXM5-80GB`, `1 x RTX-4090` or `2 ranks on Intel Xeon`."""
    device = device_of(hardware)
    nodes = f"{hardware.num_nodes} nodes of " if hardware.num_nodes > 1 else ""
    if hardware.gpus:
        return f"{nodes}{hardware.num_devices_per_node} x {device.name}"
    ranks = hardware.num_devices_per_node
    return f"{ranks} rank{'s' if ranks > 1 else ''} on {device.name}, {format_bytes(device.memory_bytes)} RAM each"


def _choice(plan: Plan, situation: Situation, width: int) -> Iterator[str] | list[str]:
    chosen, schedule = plan.chosen, plan.schedule
    size = format_count(plan.model_shape.num_parameters)
    rounds = f"{chosen.num_ranks} rank{'s' if chosen.num_ranks > 1 else ''}"
    batch = (
        f"micro batch {chosen.micro_batch} x {chosen.seq_len} tokens, accumulation {chosen.accumulation}, {rounds}: "
        f"{schedule.tokens_per_step:,} tokens a step"
    )
    steps = (
        f"{schedule.num_steps:,} steps, {schedule.warmup_steps:,} of warmup to lr {schedule.lr:g} "
        f"({schedule.lr_source})"
    )
    heading = f"{plan.name}: {chosen.method} training of {plan.model_shape.model_type}, {size} parameters"
    return [
        f"{heading}, on {machine_words(plan.hardware)}",
        "",
        f"takes {chosen.strategy.name}",
        *paragraph(batch, width=width),
        *paragraph(_recipe(chosen, situation), width=width),
        *paragraph(steps, width=width),
        *paragraph(_data_line(plan), width=width),
    ]


def _recipe(chosen: Candidate, situation: Situation) -> str:
    """The type of everything, since a figure without its recipe says little."""
    recipe = recipe_of(setting_of(situation, chosen), situation.device, dims_of(situation.shape))
    row = chosen.strategy
    half = "fp16" if row.precision is Precision.FP16_MIXED else "bf16"
    names = {4: "fp32", 2: half}
    weight, master, compute = names[recipe.weight_bytes], names[recipe.master_bytes], names[recipe.compute_bytes]
    masters = f" and {master} masters" if recipe.uses_deepspeed and weight != master else ""
    place = {Offload.NONE: "", Offload.OPTIMIZER: " in host RAM", Offload.OPTIMIZER_PARAMS: " in host RAM"}
    gradients = weight if recipe.uses_deepspeed else master
    chunk = f" of {chosen.loss_chunk_tokens} tokens" if chosen.loss is LossHead.CHUNKED else ""
    buckets = f"; buckets of {format_count(chosen.buckets.reduce_elements)} elements" if chosen.buckets else ""
    return (
        f"weights {weight}{masters}, computed in {'fp8' if row.precision is Precision.FP8 else compute}; "
        f"gradients {gradients}; {row.optimizer} with state in {master}{place.get(row.offload, ' on NVMe')}; "
        f"loss head {chosen.loss}{chunk}; attention {chosen.attention}; checkpointing {chosen.checkpointing}{buckets}"
    )


def _data_line(plan: Plan) -> str:
    data = plan.data
    kind = "packed rows" if data.is_packed else "rows, padded to the longest of a batch,"
    heldout = f"; {data.num_eval_rows:,} rows held out" if data.num_eval_rows else "; nothing held out"
    source = "counted" if data.source == "prepared" else "estimated from file sizes"
    return (
        f"data: {data.num_rows:,} {kind} of at most {data.longest_row:,} tokens, "
        f"{format_count(data.num_tokens)} tokens ({source}){heldout}"
    )


def _memory(plan: Plan, situation: Situation, width: int) -> list[str]:
    memory = plan.chosen.memory
    outside = memory.need_bytes - memory.peak_allocated_bytes
    parts = {**memory.parts, "context and margin": max(0, outside)}
    free = max(0, memory.usable_bytes - memory.need_bytes)
    total = max(memory.usable_bytes, memory.need_bytes)
    rows = [
        (letter, name, format_bytes(size))
        for letter, (name, size) in zip(letters(len(parts)), parts.items(), strict=True)
    ]
    rows += [(".", "free", format_bytes(free))]
    each = "rank" if situation.is_cpu else "GPU"
    likely = f"{format_bytes(memory.low_bytes)} to {format_bytes(memory.high_bytes)}"
    lines = [
        f"memory of each {each}: needs {format_bytes(memory.need_bytes)} of {format_bytes(memory.usable_bytes)} "
        f"usable; the peak is {format_bytes(memory.peak_allocated_bytes)} allocated, at {memory.peak_event}",
        f"  {stacked_bar(list(parts.values()), total=total, width=width - 4)}",
        *table(rows, right=(2,), indent="    "),
        f"  between steps {format_bytes(memory.steady_allocated_bytes)}; device total "
        f"{format_bytes(memory.device_bytes)}, likely {likely}",
    ]
    off_device = (
        ("pinned host RAM", memory.pinned_bytes),
        ("host RAM", memory.host_bytes),
        ("NVMe", memory.nvme_bytes),
    )
    lines += [f"  {name} of each node {format_bytes(size)}" for name, size in off_device if size]
    return lines


def _speed(plan: Plan, situation: Situation, width: int) -> list[str]:
    chosen = plan.chosen
    hours = run_hours(situation, chosen)
    words = [
        f"{chosen.speed.tokens_per_s_per_gpu * chosen.num_ranks:,.0f} tokens/s",
        f"{format_seconds(chosen.speed.step_s)} a step",
        f"{format_seconds(hours * 3600)} in all",
    ]
    if not situation.is_cpu:
        words.insert(1, f"{chosen.speed.tokens_per_s_per_gpu:,.0f} a GPU")
        words.append(f"{hours * chosen.num_ranks:.3g} GPU-hours")
    if chosen.speed.mfu is not None:
        words.append(f"MFU {chosen.speed.mfu:.0%}")
    cost = run_cost(situation, hours)
    if cost is not None:
        words.append(f"cost {cost:.2f} at {plan.job.price_per_gpu_hour:g} a GPU-hour")
    longest = sorted(chosen.speed.parts.items(), key=lambda part: -part[1])[:4]
    parts = ", ".join(f"{name.removesuffix('_s')} {format_seconds(seconds)}" for name, seconds in longest if seconds)
    return paragraph(f"speed: {', '.join(words)} (a step: {parts})", width=width, indent="")


def _reasons(plan: Plan, width: int) -> list[str]:
    lines = [line for reason in plan.chosen.reasons for line in paragraph(reason, width=width)]
    return ["why", *lines] if lines else []


def _methods(plan: Plan) -> list[str]:
    heading = ("method", "memory", "time", "GPU-hours", "cost", "")
    rows = [
        (
            str(row.method),
            "-" if row.memory_bytes is None else format_bytes(row.memory_bytes),
            "-" if row.hours is None else format_seconds(row.hours * 3600),
            "-" if row.gpu_hours is None else f"{row.gpu_hours:.3g}",
            "-" if row.cost is None else f"{row.cost:.2f}",
            row.verdict,
        )
        for row in plan.methods
    ]
    rows.insert(0, heading)
    return ["methods", *table(rows, right=(1, 2, 3, 4))]


def _runners_up(plan: Plan, situation: Situation, top: int) -> list[str]:
    rows = [("--take", "strategy", "batch", "checkpointing", "memory", "tokens/s", "time", "")]
    for number, candidate in enumerate(plan.candidates[1 : top + 1], start=2):
        ratio = candidate.speed.step_s / plan.chosen.speed.step_s
        hours = run_hours(situation, candidate)
        rows.append(
            (
                str(number),
                candidate.strategy.name,
                _batch(candidate),
                str(candidate.checkpointing),
                format_bytes(candidate.memory.need_bytes),
                f"{candidate.speed.tokens_per_s_per_gpu * candidate.num_ranks:,.0f}",
                format_seconds(hours * 3600),
                f"{ratio:.2f}x the time",
            )
        )
    if len(rows) == 1:
        return ["runners-up: none" if len(plan.candidates) == 1 else f"runners-up: {len(plan.candidates) - 1}"]
    return [f"runners-up ({len(plan.candidates) - 1} in all)", *table(rows, right=(0, 4, 5, 6))]


def _fallbacks(plan: Plan) -> list[str]:
    if not plan.fallbacks:
        return ["if memory runs out: nothing smaller is left"]
    rows = [
        (
            f"{number}.",
            fallback.strategy.name,
            _batch(fallback),
            f"checkpointing {fallback.checkpointing}",
            _loss_words(fallback),
            f"peak {format_bytes(fallback.memory.peak_allocated_bytes)}",
        )
        for number, fallback in enumerate(plan.fallbacks, start=1)
    ]
    return ["if memory runs out, in this order, at the same global batch", *table(rows, right=(0,))]


def _rejections(rejections: Sequence[Rejection], width: int) -> list[str]:
    lines = [f"rejected ({len(rejections)} rows of the catalogue)"] if rejections else []
    for rejection in rejections:
        if rejection.rule is None:
            remedy = f"; would fit with {rejection.remedy}" if rejection.remedy else ""
            lines += paragraph(f"{rejection.strategy}: {rejection.reason}{remedy}", width=width)
    for (_, tail, instead), (heads, num_rows) in _by_rule(rejections).items():
        what = f"{', '.join(heads)} ({_rows(num_rows)})" if heads else _rows(num_rows)
        lines += paragraph(f"{what}: {tail}" + (f"; instead: {instead}" if instead else ""), width=width)
    return lines


def _by_rule(
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
        heads, num_rows = groups.setdefault((rejection.rule, tail, _shared_remedy(rejection, head)), ([], 0))
        if head and head not in heads:
            heads.append(head)
        groups[rejection.rule, tail, _shared_remedy(rejection, head)] = (heads, num_rows + 1)
    return groups


def _shared_remedy(rejection: Rejection, head: str) -> str | None:
    """A remedy that names the row's own member would split the group."""
    return None if head and rejection.remedy and head in rejection.remedy.split() else rejection.remedy


def _notes(plan: Plan, width: int) -> list[str]:
    lines = [line for note in plan.notes for line in paragraph(note, width=width)]
    excluded = [line for words in plan.hardware.excluded for line in paragraph(f"not used: {words}", width=width)]
    return ["notes", *lines, *excluded] if lines or excluded else []


def _comparison(plan: Plan) -> tuple[str, ...]:
    situation, chosen = situation_of(plan), plan.chosen
    hours = run_hours(situation, chosen)
    cost = run_cost(situation, hours)
    return (
        chosen.strategy.name,
        _batch(chosen),
        f"{format_bytes(chosen.memory.need_bytes)} of {format_bytes(chosen.memory.usable_bytes)}",
        f"{chosen.speed.tokens_per_s_per_gpu * chosen.num_ranks:,.0f}",
        format_seconds(hours * 3600),
        "-" if situation.is_cpu else f"{hours * chosen.num_ranks:.3g}",
        "-" if cost is None else f"{cost:.2f}",
    )


def _batch(candidate: Candidate) -> str:
    return f"{candidate.micro_batch} x {candidate.accumulation}"


def _loss_words(candidate: Candidate) -> str:
    tokens = f" {candidate.loss_chunk_tokens}" if candidate.loss_chunk_tokens else ""
    return f"loss {candidate.loss}{tokens}"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"
