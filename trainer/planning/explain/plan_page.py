"""A plan as a page: the choice and its reasons, memory and speed by part, runners-up, fallbacks and rejections.

From the plan alone. `plan_page` makes the page, `explain_plan` writes it as plain text. Rejections that share a rule
are one line; those that a number decided are one line only if their numbers and remedies are equal.
"""

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from shardwise.trainer.planning.candidates import (
    ENERGY_RULE,
    RunTotals,
    configuration_of,
    run_time,
    run_totals,
    start_up_seconds,
)
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.device import machine_text
from shardwise.trainer.planning.explain.alternatives import Alternative, gains, opt_ins
from shardwise.trainer.planning.explain.coverage import coverage_lines
from shardwise.trainer.planning.explain.first_screen import memory_text
from shardwise.trainer.planning.page.content import Bars, Page, Section, Sentence, StackedBar, Table, page_text
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.policy.precision_policy import dims_of, policy_of
from shardwise.trainer.planning.search.certainty import error_text, is_least, part_errors
from shardwise.trainer.planning.speed.files import output_disk
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.data.shapes import SHAPES
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.messages.rank_files import saving_choice
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.optimizers import Optimizer, Pieces, StateKind
from shardwise.trainer.spec.plan import Candidate, Plan, Rejection
from shardwise.trainer.spec.report import TimePart
from shardwise.trainer.spec.strategy import LossHead, Method, Precision
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds


def explain_plan(
    plan: Plan, *, top: int = 3, width: int = 100, more: Sequence[Section] = (), show: Sequence[str] = ()
) -> str:
    """The plan as text of at most `width` columns, with the `top` runners-up; `show` names the sections, else all."""
    page = plan_page(plan, top=top, more=more)
    shown = tuple(section for section in page.sections if not show or section.name in show)
    return page_text(replace(page, sections=shown), width=width)


def plan_page(plan: Plan, *, top: int = 3, more: Sequence[Section] = ()) -> Page:
    """The page of one plan; the sections `more` come before the notes."""
    context = context_of(plan)
    sections = {
        "warnings": _sentences("warnings", plan.all_warnings),
        "choice": choice_section(plan, context),
        "memory": memory_section(plan, context),
        "speed": speed_section(plan, context),
        "generation": cache_section(plan) if has_usual_cache(plan.model_shape) else None,
        "why": _sentences("why", plan.chosen.reasons),
        "methods": methods_section(plan),
        "runners-up": runners_up_section(plan, context, top),
        "gains": _sentences("other settings", tuple(gain.text for gain in gains(context, plan))),
        "opt-ins": opt_in_section(tuple(opt_ins(context, plan)), plan),
        "fallbacks": fallbacks_section(plan),
        "rejected": rejections_section(plan.rejections),
    }
    notes = _sentences("notes", (*plan.notes, *(f"not used: {text}" for text in plan.hardware.excluded)))
    named = (*sections.items(), *(("nodes", section) for section in more), ("notes", notes))
    return Page(
        title=heading(plan),
        sections=tuple(replace(section, name=name) for name, section in named if section is not None),
    )


SECTIONS = (
    "warnings", "choice", "memory", "speed", "generation", "why", "methods", "runners-up", "gains", "opt-ins",
    "fallbacks", "rejected", "nodes", "notes",
)  # fmt: skip


def _sentences(title: str, texts: Sequence[str]) -> Section | None:
    return Section(title=title, blocks=tuple(Sentence(text=text) for text in texts)) if texts else None


_CACHE_BYTES = 2  # bf16


def heading(plan: Plan) -> str:
    """One line: which run, which model, which machine."""
    size = format_count(plan.model_shape.num_parameters)
    what = f"{plan.name}: {plan.chosen.method} training of {plan.model_shape.model_type}, {size} parameters"
    return f"{what}, on {machine_text(plan.hardware)}"


def choice_section(plan: Plan, context: PlanningContext) -> Section:
    """The chosen configuration."""
    chosen = plan.chosen
    sentences = (
        _batch_line(plan),
        "; ".join(_policy_parts(chosen, context)),
        *coverage_lines(plan),
        _steps_line(plan),
        _data_line(plan),
        _saving_line(plan),
    )
    return Section(title=f"chosen: {chosen.strategy.name}", blocks=tuple(Sentence(text=text) for text in sentences))


def cache_section(plan: Plan) -> Section:
    """The KV cache of generation: bytes per token and of the whole context."""
    shape = plan.model_shape
    tokens = shape.max_positions or plan.job.train.seq_len
    whole = kv_cache_bytes(shape, tokens)
    window = ""
    if shape.sliding_window is not None and shape.num_sliding_layers:
        window = (
            f"; {shape.num_sliding_layers} of {shape.num_layers} blocks keep the last {shape.sliding_window:,} tokens"
        )
    text = (
        f"a KV cache in bf16 needs {format_bytes(kv_cache_bytes(shape, 1))} a token, {format_bytes(whole)} for all "
        f"{tokens:,} positions at batch 1{window}"
    )
    return Section(title="generation", blocks=(Sentence(text=text),))


def has_usual_cache(shape: ModelShape) -> bool:
    """True if every block keeps keys and values of all its heads; false if some keep a state or a product of them."""
    if shape.timed is None:
        return True
    blocks, query = shape.timed.modes[0].blocks, shape.query_size
    return all(abs(blocks[kind].attended / query - 1) < 0.01 for kind in shape.timed.order)


def kv_cache_bytes(shape: ModelShape, num_tokens: int) -> int:
    """Keys and values of `num_tokens` tokens of one sequence in bf16; blocks with a window keep no more than it."""
    per_block = 2 * shape.kv_size * _CACHE_BYTES
    sliding = shape.num_sliding_layers if shape.sliding_window is not None else 0
    within = min(num_tokens, shape.sliding_window) if shape.sliding_window is not None else num_tokens
    return per_block * ((shape.num_layers - sliding) * num_tokens + sliding * within)


def _policy_parts(chosen: Candidate, context: PlanningContext) -> Iterator[str]:
    """Dtypes of weights, gradients and optimizer state, with the kernels that affect memory and speed."""
    policy = policy_of(configuration_of(context, chosen), context.device, dims_of(context.shape))
    row = chosen.strategy
    half = "fp16" if row.precision is Precision.FP16_MIXED else "bf16"
    names = {4: "fp32", 2: half}
    weight, compute, trained = names[policy.weight_bytes], names[policy.compute_bytes], names[policy.trained_bytes]
    frozen = chosen.method.freezes_base
    stored = f"nf4, embeddings, head and norms {weight}" if chosen.method is Method.QLORA else weight
    masters = f" and {trained} masters" if policy.pieces is Pieces.FLAT and not frozen and weight != trained else ""
    yield (
        f"weights {stored}{' (frozen), adapters ' + trained if frozen else ''}{masters}"
        f"{', embedding table in host RAM' if chosen.embedding_on_host else ''}, computed in "
        f"{'fp8' if row.precision is Precision.FP8 else compute}{', products in tf32' if chosen.tf32 else ''}"
    )
    gradients = compute if policy.pieces is Pieces.FLAT else trained
    added = f", added up over ranks in {names[policy.reduce_bytes]}" if chosen.num_ranks > 1 else ""
    added += " with every micro batch" if chosen.reduce_every_micro_batch else ""
    yield f"gradients {gradients}{added}"
    if chosen.prefetch_two_blocks:
        yield "weights of two blocks gathered ahead of the one at work"
    if chosen.fused_adapters:
        yield "each adapter fused with its layer, added in place"
    yield f"{row.optimizer} {_state_text(row.optimizer, trained)}{_PLACES[row.offload]}"
    chunk = f" of {chosen.loss_chunk_tokens} tokens" if chosen.loss_chunk_tokens else ""
    compiled = ", slices compiled" if chosen.compiled_head else ""
    yield f"loss head {chosen.loss}{chunk}, {_LOGITS[chosen.loss]}{compiled}"
    yield f"attention {chosen.attention}"
    moved = ", saved activations in host RAM" if chosen.activation_offload else ""
    every = f", n = {chosen.checkpoint_every_n}" if chosen.checkpoint_every_n else ""
    yield f"checkpointing {chosen.checkpointing}{every}{moved}"
    if chosen.fused_kernels:
        yield "Liger's kernels for RMSNorm, rotary embedding and SwiGLU, because blocks are not compiled"
    if chosen.shard_group:
        copies = chosen.num_ranks // chosen.shard_group
        yield f"{copies} copies of the state, each spread over {chosen.shard_group} ranks"
    if chosen.compile:
        start_up = format_seconds(start_up_seconds(context, configuration_of(context, chosen)))
        yield f"torch.compile, about {start_up} before the first step"
    if chosen.buckets:
        yield f"buckets of {format_count(chosen.buckets.reduce_elements)} elements"


_PLACES = {
    Offload.NONE: "",
    Offload.OPTIMIZER: " in host RAM",
    Offload.OPTIMIZER_PARAMS: " in host RAM, and the weights too",
    Offload.NVME_OPTIMIZER: " on NVMe",
    Offload.NVME_ALL: " on NVMe, and the weights too",
}
_LOGITS = {
    LossHead.EAGER: "all logits and their fp32 copy",
    LossHead.CHUNKED: "fp32 logits of one slice at a time",
    LossHead.FUSED: "all logits once, their gradient in place",
    LossHead.FUSED_LINEAR: "no logits",
}


def _state_text(optimizer: Optimizer, trained: str) -> str:
    if optimizer.facts.num_moments == 0:
        return "without state"
    if optimizer.facts.is_8bit:
        return "with state in 8 bit"
    return f"with {'factored ' if optimizer.facts.state is StateKind.FACTORED else ''}state in {trained}"


def _batch_line(plan: Plan) -> str:
    chosen = plan.chosen
    ranks = f"{chosen.num_ranks} rank{'s' if chosen.num_ranks > 1 else ''}"
    size, source = f"{chosen.micro_batch} x {chosen.seq_len} tokens", plan.schedule.batch_source
    if SHAPES[plan.data.format].rows_per_example == 2:
        size = f"{chosen.micro_batch} pair{'s' if chosen.micro_batch > 1 else ''} of rows of {chosen.seq_len} tokens"
    return (
        f"micro batch {size}, accumulation {chosen.accumulation}, {ranks}: "
        f"{plan.schedule.tokens_per_step:,} tokens a step{f' ({source})' if source else ''}"
    )


def _steps_line(plan: Plan) -> str:
    schedule = plan.schedule
    length = f" ({schedule.length_source})" if schedule.length_source else ""
    return (
        f"{schedule.num_steps:,} steps{length}, {schedule.warmup_steps:,} of warmup ({schedule.warmup_source}) "
        f"to lr {schedule.lr:g} ({schedule.lr_source})"
    )


def _saving_line(plan: Plan) -> str:
    schedule, num_bytes = plan.schedule, plan.chosen.memory.checkpoint_bytes
    size = f" of {format_bytes(num_bytes)}" if num_bytes else ""
    steps, seconds = schedule.checkpoint_every_steps, schedule.checkpoint_every_s
    every = [f"{steps:,} steps"] if steps else []
    every += [f"{seconds / 60:g} min"] if seconds else []
    often = f"every {' or '.join(every)}" if every else "at the end"
    if schedule.saving_max_share is not None:
        often += f", for at most {schedule.saving_max_share:.0%} of the time"
    choice = saving_choice(plan.job, plan.hardware, plan.chosen)
    how = "in the background" if choice.is_background else "while training waits"
    return f"checkpoints{size} {often}; written {how}: {choice.reason}"


def _data_line(plan: Plan) -> str:
    data = plan.data
    kind = "packed rows" if data.is_packed else "rows, padded to the longest of a batch,"
    heldout = f"; {data.num_eval_rows:,} rows held out" if data.num_eval_rows else "; nothing held out"
    source = "counted" if data.source == "prepared" else "estimated from file sizes"
    what = "data: a stream; its first window has" if data.is_stream else "data:"
    return (
        f"{what} {data.num_rows:,} {kind} of at most {data.longest_row:,} tokens, "
        f"{format_count(data.num_tokens)} tokens ({source}){heldout}"
    )


def memory_section(plan: Plan, context: PlanningContext) -> Section:
    """Bytes on one device at the peak, by part, and their uncertainty."""
    memory = plan.chosen.memory
    outside = max(0, memory.need_bytes - memory.peak_allocated_bytes)
    each = "rank" if context.is_cpu else "GPU"
    total = max(memory.usable_bytes, memory.need_bytes)
    events = tuple((readable(name), float(size), format_bytes(size)) for name, size in memory.events.items())
    parts = {readable(name): size for name, size in memory.parts.items()}
    sentences = (
        f"peak allocated {format_bytes(memory.peak_allocated_bytes)}, low {format_bytes(memory.low_bytes)}, high "
        f"{format_bytes(memory.high_bytes)}; reserved {format_bytes(memory.peak_reserved_bytes)}; device total "
        f"{format_bytes(memory.device_bytes)}; between steps {format_bytes(memory.steady_allocated_bytes)}",
        *_off_device(plan),
    )
    return Section(
        title=f"memory of each {each}: {memory_text(memory)}; the peak is "
        f"{format_bytes(memory.peak_allocated_bytes)} allocated, at {readable(memory.peak_event)}",
        blocks=(
            StackedBar(parts={**parts, "context and margin": outside}, total=total),
            Bars(caption="allocated at every event of a step", rows=events),
            *(Sentence(text=text) for text in sentences),
        ),
    )


_READABLE = {
    "block_backward_top": "backward of the last block",
    "block_backward_middle": "backward of a middle block",
    "block_backward_bottom": "backward of the first block",
    "forward_end": "end of the forward",
    "recomputed_block": "a block that is recomputed",
    "gradients_complete": "all gradients complete",
    "optimizer_step": "update of the weights",
}


def readable(name: str) -> str:
    """The name of a part or an event of memory as it is shown."""
    return _READABLE.get(name, name.replace("_", " "))


def speed_section(plan: Plan, context: PlanningContext) -> Section:
    """Speed of a step, and time, energy and cost of the whole run."""
    chosen, totals = plan.chosen, run_totals(context, plan.chosen)
    figures = [f"{totals.tokens_per_s:,.0f} tokens/s"]
    if not context.is_cpu:
        figures.append(f"{totals.tokens_per_s / chosen.num_ranks:,.0f} a GPU")
    figures += [f"{format_seconds(chosen.speed.step_s)} a step", f"{format_seconds(totals.hours * 3600)} in all"]
    if chosen.speed.mfu is not None:
        figures.append(f"MFU {chosen.speed.mfu:.0%}")
    least = chosen.speed.step_s / 1000  # less is no part that anybody could see
    seen = ((part, seconds) for part, seconds in chosen.speed.parts.items() if seconds > least)
    ordered = sorted(seen, key=lambda part: -part[1])
    parts = ", ".join(f"{part.removesuffix('_s')} {format_seconds(seconds)}" for part, seconds in ordered[:4])
    bars = tuple((part.removesuffix("_s"), seconds, format_seconds(seconds)) for part, seconds in ordered)
    title = "speed" if context.device.has_known_speed else "speed is not known; these only rank strategies"
    return Section(
        title=f"{title}: {', '.join(figures)}",
        blocks=(
            Sentence(text=f"a step: {parts}"),
            Bars(caption="parts of a step", rows=bars),
            *(Sentence(text=text) for text in (*_time_lines(plan, context), *_totals_lines(plan, totals))),
        ),
    )


def _time_lines(plan: Plan, context: PlanningContext) -> Iterator[str]:
    """The parts of the predicted time of the run, each with its error, and the parts that are not predicted."""
    if not context.device.has_known_speed:
        return
    chosen, time = plan.chosen, run_time(context, plan.chosen)
    errors = part_errors(context, chosen)
    known = {
        part: f"{format_seconds(time_s)} ({'at least' if is_least(context, part) else error_text(errors[part])})"
        for part, time_s in time.parts_s.items()
    }
    known |= dict.fromkeys(time.not_predicted, "not predicted")
    parts = [f"{part} {known[part]}" for part in TimePart if part in known]
    yield f"time of the run, {format_seconds(time.total_s)}: {', '.join(parts)}"
    yield from _sources_of_time(context)


def _sources_of_time(context: PlanningContext) -> Iterator[str]:
    times, disk = context.corrections.times, output_disk(context)
    by_runs = {
        TimePart.START_UP: times.start_up_s is not None,
        TimePart.SAVING: times.saved_bytes_per_s is not None,
        TimePart.EXPORT: times.exported_bytes_per_s is not None,
    }
    measured = [part for part, is_measured in by_runs.items() if is_measured]
    if measured:
        runs = "1 run" if times.num_runs == 1 else f"{times.num_runs} runs"
        yield f"{' and '.join(measured)} as measured in {runs} on this device"
    by_disk = [part for part in (TimePart.SAVING, TimePart.EXPORT) if part not in measured]
    if by_disk and disk is not None and disk.write_bytes_per_s is not None:
        yield f"{' and '.join(by_disk)} at {format_bytes(disk.write_bytes_per_s)}/s, as {disk.path} was measured"


def _totals_lines(plan: Plan, totals: RunTotals) -> Iterator[str]:
    figures = []
    if totals.gpu_hours is not None:
        figures.append(f"{totals.gpu_hours:.3g} GPU-hours")
    if totals.kwh is not None:
        figures.append(f"{totals.kwh:.3g} kWh ({ENERGY_RULE})")
    if totals.cost is not None:
        figures.append(f"cost {totals.cost:.2f} at {plan.job.price_per_gpu_hour:g} a GPU-hour")
    if figures:
        yield f"the run needs {', '.join(figures)}"


def _off_device(plan: Plan) -> Iterator[str]:
    memory = plan.chosen.memory
    sizes = (
        ("pinned host RAM", memory.pinned_bytes),
        ("host RAM", memory.host_bytes),
        ("NVMe", memory.nvme_bytes),
    )
    figures = [f"{name} {format_bytes(size)}" for name, size in sizes if size]
    if figures:
        yield f"of each node: {', '.join(figures)}"


def methods_section(plan: Plan) -> Section:
    """Memory and time of each method."""
    rows = [("method", "memory", "time", "GPU-hours", "kWh", "cost", "")]
    rows += [
        (
            str(row.method),
            "-" if row.memory_bytes is None else format_bytes(row.memory_bytes),
            "-" if row.hours is None else format_seconds(row.hours * 3600),
            figure_text(row.gpu_hours),
            figure_text(row.kwh),
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
    shown = list(enumerate(plan.candidates[1:], start=2))[:top]
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
            rows.append((str(number), *figures_of(candidate, totals), f"{ratio:.2f}x time"))
    return Section(
        title=f"runners-up ({num_others} in all)",
        blocks=(
            Table(rows=tuple(rows), right=(0, 4, 5, 6, 7, 8), wide=1),
            Bars(caption="time of the run, the choice first", rows=tuple(bars)),
        ),
    )


def opt_in_section(found: Sequence[Alternative], plan: Plan) -> Section | None:
    """Opt-ins that the job does not allow, and their gains."""
    if not found:
        return None
    rows = [("allow", "memory", "time", "", "strategy")]
    for each in found:
        assert each.candidate is not None, "an opt-in has the candidate that it adds"
        ratio = each.candidate.speed.step_s / plan.chosen.speed.step_s
        need, strategy = format_bytes(each.candidate.memory.need_bytes), each.candidate.strategy.name
        rows.append((str(each.allowance), need, f"{ratio:.2f}x", each.effect, strategy))
    return Section(
        title="what opting in would gain, compared with this plan",
        blocks=(Table(rows=tuple(rows), right=(1, 2), wide=4),),
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


def figures_of(candidate: Candidate, totals: RunTotals) -> tuple[str, ...]:
    return (
        candidate.strategy.name,
        _batch(candidate),
        str(candidate.checkpointing),
        format_bytes(candidate.memory.need_bytes),
        f"{totals.tokens_per_s:,.0f}",
        format_seconds(totals.hours * 3600),
        figure_text(totals.kwh),
        _money(totals.cost),
    )


def _batch(candidate: Candidate) -> str:
    return f"{candidate.micro_batch} x {candidate.accumulation}"


def _loss_text(candidate: Candidate) -> str:
    tokens = f" {candidate.loss_chunk_tokens}" if candidate.loss_chunk_tokens else ""
    return f"{candidate.loss}{tokens}"


def figure_text(value: float | None) -> str:
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
    """At most `most` lines, those decided by a number first, and the number of lines that are omitted."""
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
    """Rejections with the same rule and text but for the name that they begin with (`adamw_8bit`), and those names."""
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
