"""The first screen of a plan: whether it fits, the time it needs, the choice in a sentence, and the alternatives.

At most MOST_LINES lines. Commands are never wrapped, so that they can be pasted; all other lines have at most `width`
columns. Alternatives differ from the choice in something that a user notices: time, memory of the card or of the host,
or the mathematics; each has the exact setting that selects it. If lines are short, warnings stay and alternatives go.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import chain, islice

from msgspec.structs import replace

from shardwise.trainer.planning.candidates import (
    candidate_of,
    configuration_of,
    prediction_error,
    run_hours,
    run_time,
    run_totals,
)
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.device import machine_text
from shardwise.trainer.planning.explain.alternatives import Alternative, gains, opt_ins
from shardwise.trainer.planning.explain.coverage import coverage_gap
from shardwise.trainer.planning.page.content import paragraph, table
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.reasons import fp8_obstacle
from shardwise.trainer.planning.search.certainty import error_text, peak_text, run_error
from shardwise.trainer.planning.tables.gpu_names import network_text
from shardwise.trainer.spec.data.shapes import SHAPES
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.packages import extra_lines
from shardwise.trainer.spec.plan import Candidate, MemoryEstimate, Plan
from shardwise.trainer.spec.strategy import Checkpointing, Method
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds
from shardwise.trainer.spec.value import Value

MOST_LINES = 20
MOST_WARNING_LINES = 5
MOST_ALTERNATIVES = 4


class Tone(StrEnum):
    """Meaning of a line, for a terminal that has colours."""

    TITLE = "title"
    FIGURE = "figure"
    PLAIN = "plain"
    NOTE = "note"
    WARNING = "warning"
    COMMAND = "command"


class Line(Value, frozen=True, kw_only=True):
    """One line; `share` is that of the device's memory which is used, for a bar."""

    text: str
    tone: Tone = Tone.PLAIN
    share: float | None = None


def first_screen(
    plan: Plan, *, start: Sequence[str] = (), more: str = "", remarks: Sequence[str] = (), width: int = 100
) -> tuple[Line, ...]:
    """The lines of the first screen, with further remarks and the commands that start the run and that show more."""
    context = context_of(plan)
    above = (*_verdict(plan, context, width), *_choice(plan, context, width))
    unused = (f"not used: {text}" for text in plan.hardware.excluded)
    remarked = (line for text in (*unused, *remarks) for line in _wrapped(text, width, Tone.PLAIN))
    below = (*_fallback(plan, width), *_fp8(plan, context, width), *remarked, *_warnings(plan, width))
    then = tuple(_next(start, more))
    room = MOST_LINES - len(above) - len(below) - len(then)
    found = tuple(islice(alternatives(plan, context), MOST_ALTERNATIVES))
    others = _alternative_lines(found, context, room, width)
    blocks = [block for block in (above, others, below, then) if block]
    is_spaced = sum(map(len, blocks)) + len(blocks) - 1 <= MOST_LINES
    lines = [line for block in blocks for line in (*block, *([Line(text="")] if is_spaced else []))]
    return tuple(map(_printable, lines[:-1] if is_spaced else lines))


def summary_lines(plan: Plan, *, width: int = 100) -> tuple[Line, ...]:
    """The verdict, the choice and the warnings, for one of several machines that are compared."""
    context = context_of(plan)
    lines = (*_verdict(plan, context, width), *_choice(plan, context, width), *_warnings(plan, width))
    return tuple(map(_printable, lines))


def text_of(lines: Sequence[Line]) -> str:
    """The lines as plain text."""
    return "\n".join(line.text for line in lines)


def _printable(line: Line) -> Line:
    """Names of a job, a model or a card may hold control characters, which a terminal would obey."""
    return replace(line, text="".join(each if each.isprintable() else " " for each in line.text))


def _wrapped(text: str, width: int, tone: Tone, indent: str = "  ") -> Iterator[Line]:
    for line in paragraph(text, width=width, indent=indent):
        yield Line(text=line, tone=tone)


_NO_BREAK = "\N{NO-BREAK SPACE}"  # of a figure and its unit, until the lines are wrapped


def _verdict(plan: Plan, context: PlanningContext, width: int) -> Iterator[Line]:
    method, shape = _METHODS[plan.chosen.method], plan.model_shape
    model = f"{shape.model_type} ({format_count(shape.num_parameters)})"
    length = _length(plan, context).replace(" ", _NO_BREAK)
    text = f"{plan.name}: {method} of {model} on {machine_text(plan.hardware)}: fits, {length}"
    for line in _wrapped(text, width, Tone.TITLE, indent=""):
        yield replace(line, text=line.text.replace(_NO_BREAK, " "))


def _length(plan: Plan, context: PlanningContext) -> str:
    if not context.device.has_known_speed:
        return "but the speed of this device is not known"
    return f"about {about(run_hours(context, plan.chosen) * 3600)}"


def about(seconds: float) -> str:
    """`24 h`, with two digits at most."""
    if seconds < 0.1:
        return "0.1 s"
    divisor, unit = _unit(seconds)
    return f"{_rounded(seconds / divisor, round)} {unit}"


def time_range(seconds: float, error: float) -> str:
    """`7 to 17 h`: from `seconds` divided by 1 + `error` to `seconds` times it, rounded away from each other."""
    divisor, unit = _unit(seconds)
    low, high = seconds / divisor / (1 + error), seconds / divisor * (1 + error)
    return f"{_rounded(low, math.floor)} to {_rounded(high, math.ceil)} {unit}"


def _unit(seconds: float) -> tuple[float, str]:
    for most, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < most:
            return divisor, unit
    return 86400, "days"


def _rounded(value: float, to_whole: Callable[[float], int]) -> str:
    return f"{to_whole(value):,}" if value >= 10 else f"{to_whole(10 * value) / 10:g}"


_METHODS = {
    Method.FULL: "full training",
    Method.GALORE: "GaLore training",
    Method.LORA: "LoRA",
    Method.QLORA: "QLoRA",
}


def _choice(plan: Plan, context: PlanningContext, width: int) -> Iterator[Line]:
    chosen, memory = plan.chosen, plan.chosen.memory
    place, peak = ("RAM of each process", "peak of tensors") if context.is_cpu else ("card", "peak")
    steps = f"{plan.schedule.num_steps:,} step{'s' if plan.schedule.num_steps > 1 else ''}"
    time = [*_certain_range(context, chosen), f"{steps} of {format_seconds(chosen.speed.step_s)}"]
    time += [text] if (text := without_text(context, chosen)) else []
    yield from _figures("time", time, width)
    stated = plan.hardware.network_bytes_per_s or plan.hardware.rates.between_nodes_bytes_per_s
    if plan.hardware.num_nodes > 1 and stated is None and context.device.network_bytes_per_s:
        yield from _figures("network", _network(context, chosen), width)
    sizes = [
        f"{place} {memory_text(memory)}",
        f"{peak} {format_bytes(memory.peak_allocated_bytes)} ({peak_text(context, chosen)})",
        *_host_sizes(context, chosen),
    ]
    yield from _figures("memory", sizes, width, share=memory.need_bytes / memory.usable_bytes)
    source = "" if plan.data.source == "prepared" else " (estimated from file sizes)"
    source = source if plan.job.data.train else " (assumed: no data is named)"
    tokens = format_count(plan.num_tokens)
    totals = run_totals(context, chosen)
    cost = [] if totals.cost is None else [f"cost {totals.cost:,.2f}"]
    yield from _figures("speed", [f"{totals.tokens_per_s:,.0f} tokens/s", f"{tokens} tokens{source}", *cost], width)
    yield from _labelled("how", f"{'; '.join(how(plan, context))} ({chosen.strategy.name})", width)
    gap = coverage_gap(plan)
    if gap is not None:
        yield from _labelled("covers", gap, width)


def _figures(label: str, figures: Sequence[str], width: int, *, share: float | None = None) -> Iterator[Line]:
    """The figures on one line; those for which it has no room on further ones."""
    text, *others = (f"  {label:8}{figures[0]}", *figures[1:])
    for figure in others:
        if len(text) + 3 + len(figure) > width:
            yield Line(text=text, tone=Tone.FIGURE, share=share)
            text, share = " " * _LABEL_COLUMNS + figure, None
        else:
            text += f"   {figure}"
    yield Line(text=text, tone=Tone.FIGURE, share=share)


def _certain_range(context: PlanningContext, chosen: Candidate) -> Iterator[str]:
    error = run_error(context, chosen)
    if error is None:
        return
    num_runs = context.corrections.of(chosen.strategy, chosen.method).step.num_runs
    source = f"runs on this device: {num_runs}" if num_runs else "no run on this device yet"
    if chosen.strategy.name in context.corrections.tried:
        source = "timed by a trial"
    yield f"{time_range(run_hours(context, chosen) * 3600, error)} ({error_text(error)}; {source})"


SHORT_RUN_S = 600.0  # the parts that no prediction has weigh in a shorter run


def without_text(context: PlanningContext, chosen: Candidate) -> str:
    """`without start-up, saving, export`: what the predicted time of a short run lacks; empty of a long one."""
    time = run_time(context, chosen)
    is_short = context.device.has_known_speed and time.total_s < SHORT_RUN_S
    return f"without {', '.join(time.not_predicted)}" if is_short and time.not_predicted else ""


_LABEL_COLUMNS = 10


def _labelled(label: str, text: str, width: int) -> Iterator[Line]:
    first, *rest = paragraph(text, width=width - _LABEL_COLUMNS, indent="")
    yield Line(text=f"  {label:8}{first}")
    for line in rest:
        yield Line(text=f"          {line.strip()}")


def _in_unit_of(whole: str, *sizes: str) -> list[str]:
    """The sizes, without their unit where all have that of the whole: `5.79` of `7.75 GiB`."""
    unit = whole.split()[1]
    is_same = all(size.endswith(f" {unit}") for size in sizes)
    return [size.split()[0] if is_same else size for size in sizes]


def memory_text(memory: MemoryEstimate) -> str:
    """`62.9 needed + 16.2 reserved of 79.1 GiB`: what the allocator reserves beyond the need, it gives back."""
    needed, usable = format_bytes(memory.need_bytes), format_bytes(memory.usable_bytes)
    beyond = format_bytes(max(0, memory.device_bytes - memory.need_bytes))
    if beyond == "0 B":
        return f"{_in_unit_of(usable, needed)[0]} needed of {usable}"
    needed, beyond = _in_unit_of(usable, needed, beyond)
    return f"{needed} needed + {beyond} reserved of {usable}"


def _network(context: PlanningContext, chosen: Candidate) -> list[str]:
    """The network that is assumed, and the time of the run over 100 Gbit/s, or over a tenth where less is assumed."""
    assumed = context.device.network_bytes_per_s or 0
    other = _ETHERNET_BYTES_PER_S if assumed > _ETHERNET_BYTES_PER_S else assumed // 10
    slower = replace(context, device=replace(context.device, network_bytes_per_s=other))
    hours = run_hours(slower, candidate_of(slower, configuration_of(context, chosen)))
    return [f"{network_text(assumed)} a node (assumed)", f"over {network_text(other)} about {about(hours * 3600)}"]


_ETHERNET_BYTES_PER_S = 100 * 10**9 // 8


def _host_sizes(context: PlanningContext, chosen: Candidate) -> Iterator[str]:
    memory, granted = chosen.memory, context.host_ram_bytes
    host = memory.pinned_bytes + memory.host_bytes
    if host and not context.is_cpu:
        held, whole = format_bytes(host), format_bytes(granted or 0)
        yield f"RAM {_in_unit_of(whole, held)[0]} of {whole}" if granted else f"RAM {held}"
    if memory.nvme_bytes:
        yield f"NVMe {format_bytes(memory.nvme_bytes)}"


def how(plan: Plan, context: PlanningContext) -> Iterator[str]:
    """The choice in short phrases: adapters, batch, recomputation, where the state is."""
    chosen, job = plan.chosen, plan.job
    if chosen.method.freezes_base:
        yield f"adapters of rank {job.train.lora.rank}"
    if chosen.method is Method.GALORE:
        yield f"gradients projected to rank {job.train.galore.rank}"
    each = "rank" if context.is_cpu else "GPU"
    ranks = f" on each of {chosen.num_ranks} {each}s" if chosen.num_ranks > 1 else ""
    schedule = plan.schedule
    yield f"{_batch(plan, chosen)} at a time{ranks}, {schedule.sequences_per_step:,} rows a step{_epochs(plan)}"
    yield f"learning rate {schedule.lr:g}"
    yield _recomputation(chosen)
    yield from _state(chosen)
    if chosen.compile:
        yield "torch.compile"


def _epochs(plan: Plan) -> str:
    """`, 3 epochs`, as the data is counted or estimated; nothing for a stream, whose length is not known."""
    if plan.data.is_stream or not plan.data.num_rows:
        return ""
    epochs = plan.schedule.num_steps * plan.schedule.sequences_per_step / plan.data.num_rows
    return f", {epochs:.2g} epochs" if round(epochs, 2) != 1 else ", 1 epoch"


def _batch(plan: Plan, candidate: Candidate) -> str:
    pairs = " pairs of" if SHAPES[plan.data.format].rows_per_example == 2 else ""
    return f"{candidate.micro_batch} x{pairs} {candidate.seq_len:,} tokens"


_RECOMPUTED = {
    Checkpointing.NONE: "activations saved",
    Checkpointing.SELECTIVE: "some activations recomputed",
    Checkpointing.FULL: "activations recomputed",
    Checkpointing.EVERY_N: "activations of some blocks recomputed",
    Checkpointing.ATTENTION: "attention recomputed",
}


def _recomputation(candidate: Candidate) -> str:
    moved = " in host RAM" if candidate.checkpointing is Checkpointing.NONE else " from inputs in host RAM"
    return f"{_RECOMPUTED[candidate.checkpointing]}{moved if candidate.activation_offload else ''}"


_STAGES = {0: "", 1: "optimizer state", 2: "gradients and optimizer state", 3: "weights, gradients and optimizer state"}
_OFFLOADED = {
    Offload.NONE: "",
    Offload.OPTIMIZER: "optimizer in RAM",
    Offload.OPTIMIZER_PARAMS: "weights, optimizer in RAM",
    Offload.NVME_OPTIMIZER: "optimizer on NVMe",
    Offload.NVME_ALL: "weights, optimizer on NVMe",
}


def _state(candidate: Candidate) -> Iterator[str]:
    """Where weights and optimizer state are; nothing if all of it is on the one device."""
    row = candidate.strategy
    spread = _STAGES[row.sharding.facts.zero_stage]
    if spread and candidate.num_ranks > 1:
        groups = f"{candidate.shard_group} of " if candidate.shard_group else ""
        yield f"{spread} spread over {groups}the devices"
    if candidate.reduce_every_micro_batch and candidate.accumulation > 1:
        yield "gradients reduced with every micro batch"
    if candidate.bf16_reduction:
        yield "gradients summed over the devices in bf16"
    if candidate.embedding_on_host:
        yield "embedding table in RAM"
    if candidate.prefetch_two_blocks:
        yield "weights of two blocks gathered ahead"
    if candidate.fused_adapters:
        yield "adapters fused with their layers"
    if candidate.compiled_head:
        yield "loss head compiled"
    if row.offload is not Offload.NONE:
        yield _OFFLOADED[row.offload]
    if row.optimizer.facts.is_paged:
        yield "optimizer state paged to RAM"


def alternatives(plan: Plan, context: PlanningContext) -> Iterator[Alternative]:
    """Alternatives, the most useful first: the best runner-up, method and opt-in, then the others of each.

    Each is searched when the iterator reaches it, so that a first screen does not search opt-ins that it cannot show.
    """
    runners_up, methods = _runners_up(plan, context), _methods(plan)
    changes = chain(gains(context, plan), opt_ins(context, plan))
    for found in (runners_up, methods, changes):
        yield from islice(found, 1)
    yield from chain(methods, changes, runners_up)


FASTER, MUCH_LESS, TOO_SLOW = 0.97, 0.85, 1.5
LONGEST_NAME = 28


def _runners_up(plan: Plan, context: PlanningContext) -> Iterator[Alternative]:
    """Candidates that are faster, or need clearly less card or host memory for at most half more time."""
    chosen, seen = plan.chosen, set()
    seconds, host, granted = run_hours(context, chosen) * 3600, _host_bytes(chosen), context.host_ram_bytes
    is_much_host = granted is not None and not context.is_cpu and host > granted / 2
    for number, candidate in enumerate(plan.candidates[1:], start=2):
        its_seconds = run_hours(context, candidate) * 3600
        gains = [
            text
            for text, applies in (
                (_faster(context, candidate, chosen), its_seconds < FASTER * seconds),
                (
                    "less RAM" if context.is_cpu else "less of the card",
                    candidate.memory.need_bytes < MUCH_LESS * chosen.memory.need_bytes,
                ),
                ("less host RAM", is_much_host and _host_bytes(candidate) < host / 2),
            )
            if applies
        ]
        if not gains or its_seconds > TOO_SLOW * seconds or tuple(gains) in seen:
            continue
        seen.add(tuple(gains))
        yield Alternative(
            name=_difference(plan, candidate),
            effect=", ".join((*gains, *([] if candidate.is_exact else ["changes the update"]))),
            setting=f"--take {number}",
            seconds=its_seconds,
            need_bytes=candidate.memory.need_bytes,
        )


def _faster(context: PlanningContext, candidate: Candidate, chosen: Candidate) -> str:
    its, ours = (prediction_error(configuration_of(context, each)) for each in (candidate, chosen))
    return "faster, but less certain" if its > ours else "faster"


def _host_bytes(candidate: Candidate) -> int:
    return candidate.memory.pinned_bytes + candidate.memory.host_bytes


def _difference(plan: Plan, candidate: Candidate) -> str:
    """The most important property in which a candidate differs from the choice, with a second if both are short."""
    pairs = zip(_properties(plan, candidate), _properties(plan, plan.chosen), strict=True)
    differing = [its for its, chosen in pairs if its and its != chosen] or [candidate.strategy.name]
    both = ", ".join(differing[:2])
    return both if len(both) <= LONGEST_NAME else differing[0]


def _properties(plan: Plan, candidate: Candidate) -> tuple[str, ...]:
    row = candidate.strategy
    return (
        f"{row.precision}",
        f"{row.optimizer}" if row.optimizer.facts.is_paged or not candidate.is_exact else "",
        _OFFLOADED[row.offload] or ("embedding table in RAM" if candidate.embedding_on_host else "state on the card"),
        "" if row.sharding.facts.is_one_rank else f"{row.sharding}",
        _recomputation(candidate),
        f"{_batch(plan, candidate)} at a time",
    )


_METHOD_EFFECTS = {
    Method.FULL: "trains every weight",
    Method.GALORE: "trains every weight, approximates AdamW",
    Method.LORA: "trains adapters only",
    Method.QLORA: "adapters on weights in 4 bit",
}


def _methods(plan: Plan) -> Iterator[Alternative]:
    """The other methods that fit, the fastest first, and what full training lacks."""
    from_scratch = plan.job.model.config is not None
    others = [
        row
        for row in plan.methods
        if row.method is not plan.chosen.method and not (from_scratch and row.method.freezes_base)
    ]
    fitting = sorted((row for row in others if row.is_within_limits), key=lambda row: row.hours or 0.0)
    refused = [row for row in others if not row.is_within_limits and row.method is Method.FULL]
    for row in (*fitting, *refused):
        yield Alternative(
            name=_METHODS[row.method],
            effect=_METHOD_EFFECTS[row.method] if row.is_within_limits else row.verdict,
            setting=f"train.method={row.method}" if row.is_within_limits else "",
            seconds=None if row.hours is None or not row.is_within_limits else row.hours * 3600,
            need_bytes=row.memory_bytes,
        )


def _alternative_lines(
    found: Sequence[Alternative], context: PlanningContext, room: int, width: int
) -> tuple[Line, ...]:
    """A table of the alternatives for which there is room."""
    for most in range(len(found), 0, -1):
        lines = tuple(_table_lines(found[:most], "RAM" if context.is_cpu else "card", width))
        if len(lines) <= room:
            return lines
    return ()


def _table_lines(found: Sequence[Alternative], place: str, width: int) -> Iterator[Line]:
    rows = alternative_rows(found, ("other ways", "time", place, "changes"))
    header, *lines = table(rows, right=(1, 2))
    yield Line(text=header, tone=Tone.NOTE)
    column = max(len(line) + 2 for line, each in zip(lines, found, strict=True) if each.setting or line is lines[0])
    for line, each in zip(lines, found, strict=True):
        together = f"{line.ljust(column)}{each.setting}".rstrip()
        if len(together) <= width:
            yield Line(text=together)
        elif each.setting:
            yield Line(text=line[:width])
            yield Line(text=f"      {each.setting}")
        else:
            yield Line(text=line.removesuffix(each.effect).rstrip())
            yield from _wrapped(each.effect, width, Tone.PLAIN, indent="      ")


def alternative_rows(found: Sequence[Alternative], heads: tuple[str, str, str, str]) -> list[tuple[str, ...]]:
    """The rows of a table: name, time, memory and effect of each."""
    return [
        heads,
        *(
            (
                each.name,
                "-" if each.seconds is None else about(each.seconds),
                "-" if each.need_bytes is None else format_bytes(each.need_bytes),
                each.effect,
            )
            for each in found
        ),
    ]


def _fallback(plan: Plan, width: int) -> Iterator[Line]:
    if not plan.fallbacks:
        text = "if memory runs out, the run ends: nothing smaller is left to try"
    else:
        last, steps = plan.chosen, []
        for fallback in plan.fallbacks[:2]:
            steps.append(_step_down(plan, last, fallback))
            last = fallback
        more = f" ({len(plan.fallbacks)} steps in all)" if len(plan.fallbacks) > 2 else ""
        text = f"if memory runs out, the run continues by itself with {', then '.join(steps)}{more}"
    yield from _wrapped(text, width, Tone.PLAIN)


def _fp8(plan: Plan, context: PlanningContext, width: int) -> Iterator[Line]:
    """Why FP8 is not used, where the job allows it, and what to do."""
    reason, instead = fp8_obstacle(context, plan.candidates) or ("", None)
    if not reason:
        return
    is_command = instead in extra_lines().values()
    remedy = "" if instead is None or is_command else f"; use {instead}"
    yield from _wrapped(f"fp8 is allowed and not used: {reason}{remedy}{':' if is_command else ''}", width, Tone.PLAIN)
    if is_command:
        yield Line(text=f"    {instead}", tone=Tone.COMMAND)


def _step_down(plan: Plan, last: Candidate, fallback: Candidate) -> str:
    if fallback.strategy != last.strategy:
        state = _OFFLOADED[fallback.strategy.offload]
        return f"{fallback.strategy.sharding} ({state})" if state else str(fallback.strategy.sharding)
    if fallback.micro_batch != last.micro_batch:
        return f"{_batch(plan, fallback)} at a time"
    if fallback.embedding_on_host != last.embedding_on_host:
        return "the embedding table in RAM"
    if fallback.checkpointing != last.checkpointing:
        return _recomputation(fallback)
    if (fallback.loss, fallback.loss_chunk_tokens) != (last.loss, last.loss_chunk_tokens):
        return "smaller slices of the loss"
    return "smaller buffers"


def _warnings(plan: Plan, width: int) -> Iterator[Line]:
    lines = [line for text in plan.all_warnings for line in _wrapped(f"WARNING: {text}", width, Tone.WARNING)]
    yield from lines[:MOST_WARNING_LINES]
    if len(lines) > MOST_WARNING_LINES:
        yield Line(text="  WARNING: there are more warnings; -v shows all of them", tone=Tone.WARNING)


def _next(start: Sequence[str], more: str) -> Iterator[Line]:
    for label, command in zip(("start", *[""] * len(start)), start, strict=False):
        yield Line(text=f"  {label:8}{command}", tone=Tone.COMMAND)
    if more:
        yield Line(text=f"  more    {more}", tone=Tone.NOTE)
