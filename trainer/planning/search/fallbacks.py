"""Fallbacks after an out of memory, and the smallest change with which one strategy would fit.

Fallbacks have the same global batch and each a lower predicted peak. They are ordered by cost: half the micro batch and
twice the accumulation, embeddings in host RAM, recomputation, smaller slices of logits, smaller buffers, larger groups
of hybrid sharding, a rank's whole share at once if accumulated gradients need more than activations, and last another
place for the state.

Remedies are ordered by their cost to the user: shorter sequences (down to a quarter), more of the same devices, and a
larger device, whose size is named.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import cycle, islice

from msgspec.structs import replace

from shardwise.trainer.planning.candidates import (
    Excess,
    candidate_of,
    configuration_of,
    excess,
    run_cost,
    run_hours,
    whole_gib,
    with_micro_batch,
)
from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.device import device_of
from shardwise.trainer.planning.rules.rule import obstacle_to
from shardwise.trainer.planning.schedule import shares_rate
from shardwise.trainer.planning.search.configurations import (
    MIN_CHUNK_TOKENS,
    can_fit,
    embeddings_on_host,
    least_need,
    reductions,
    shard_groups,
    smallest_buckets,
    strategy_need,
)
from shardwise.trainer.spec.errors import Attempt, NothingFitsError
from shardwise.trainer.spec.plan import Candidate, MethodRow
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Method, Strategy
from shardwise.trainer.spec.units import format_bytes, format_count

MIN_GAIN = 0.02  # of the peak, to be worth a restart
MOST_TRIED = 3  # strategies that the error names


def fallbacks(context: PlanningContext, candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Configurations to try, in this order, after an out of memory of `candidates[0]`."""
    chain = [candidates[0]]
    configuration = configuration_of(context, candidates[0])
    while True:
        lower = _next_lower(context, configuration, chain[-1])
        if lower is None:
            break
        configuration, candidate = lower
        chain.append(candidate)
    for other in candidates[1:]:
        layouts = {link.strategy.layout for link in chain}
        if _keeps_the_update(other, candidates[0]) and other.strategy.layout not in layouts:
            if strategy_need(context, other.strategy) > chain[-1].memory.need_bytes:
                continue
            smallest = least_need(context, other.strategy)
            if _is_lower(smallest, chain[-1]) and excess(context, smallest) is None:
                chain.append(smallest)
    return tuple(chain[1:])


def _keeps_the_update(other: Candidate, chosen: Candidate) -> bool:
    has_same_rate = shares_rate(other.strategy.optimizer, chosen.strategy.optimizer)
    return has_same_rate and (other.is_exact or not chosen.is_exact)


def _next_lower(
    context: PlanningContext, configuration: Configuration, last: Candidate
) -> tuple[Configuration, Candidate] | None:
    for smaller in _smaller_configurations(context, configuration):
        if obstacle_to(context, smaller) is not None:
            continue
        candidate = candidate_of(context, smaller)
        # Half a micro batch also covers activations that were predicted too low: any gain suffices.
        if _is_lower(candidate, last, gain=0 if smaller.micro_batch < configuration.micro_batch else MIN_GAIN):
            return smaller, candidate
    return None


def _is_lower(candidate: Candidate, last: Candidate, *, gain: float = MIN_GAIN) -> bool:
    return (
        candidate.memory.peak_allocated_bytes < (1 - gain) * last.memory.peak_allocated_bytes
        and candidate.memory.need_bytes <= last.memory.need_bytes
    )


def _smaller_configurations(context: PlanningContext, configuration: Configuration) -> Iterator[Configuration]:
    """One step down on each axis without a pin, the cheapest first."""
    pin = context.job.pin
    is_one = pin.micro_batch is not None or configuration.updates_in_backward
    micro_batch = 1 if is_one else configuration.micro_batch
    reduced = replace(configuration, reduce_every_micro_batch=reductions(context, configuration.strategy)[-1])
    while micro_batch > 1:  # the first halves may need more: accumulated gradients need memory of their own
        micro_batch //= 2
        yield with_micro_batch(context, configuration, micro_batch)
        yield with_micro_batch(context, reduced, micro_batch)
    yield reduced
    yield replace(configuration, embedding_on_host=embeddings_on_host(context, configuration.strategy)[-1])
    if configuration.checkpointing in (Checkpointing.NONE, Checkpointing.SELECTIVE) and pin.checkpointing is None:
        yield replace(configuration, checkpointing=Checkpointing.FULL)
    if configuration.loss is LossHead.EAGER and pin.loss is None and LossHead.CHUNKED in context.shape.loss_heads:
        yield replace(configuration, loss=LossHead.CHUNKED, loss_chunk_tokens=MIN_CHUNK_TOKENS)
    if configuration.loss_chunk_tokens is not None and configuration.loss_chunk_tokens > MIN_CHUNK_TOKENS:
        half = min(configuration.loss_chunk_tokens, configuration.tokens_per_micro_batch) // 2
        yield replace(configuration, loss_chunk_tokens=max(MIN_CHUNK_TOKENS, half))
    least = smallest_buckets(context.shape, configuration.strategy)
    if configuration.buckets != least:
        yield replace(configuration, buckets=least)
    if pin.shard_group is None:
        larger = (group for group in shard_groups(context, configuration.strategy) if group is not None)
        yield from (
            replace(configuration, shard_group=group)
            for group in sorted(larger)
            if group > (configuration.shard_group or 0)
        )
    if configuration.accumulation > 1 and pin.micro_batch is None:  # a share at once accumulates no gradients
        yield with_micro_batch(context, configuration, context.sequences_per_rank)


_MIN_SEQ_LEN = 128
_MAX_DEVICE_FACTOR = 64


def memory_remedy(context: PlanningContext, smallest: Candidate) -> str:
    """The smallest change that makes the smallest configuration of a strategy fit its device."""
    for change in (_shorter_sequences, _more_devices):
        remedy = change(context, smallest.strategy)
        if remedy is not None:
            return remedy
    need = whole_gib(smallest.memory.need_bytes)
    hardware = context.hardware
    if hardware.vram_cap_bytes is not None and not context.is_cpu:
        uncapped = device_of(replace(hardware, vram_cap_bytes=None))
        if smallest.memory.need_bytes <= uncapped.usable_bytes:
            return f"limits.vram (or --vram): {need}"
    return f"a device with {need} usable"


def least_short(methods: Mapping[Method, tuple[PlanningContext, Iterable[Candidate]]]) -> Method:
    """The method that exceeds its budgets by the least factor: the smallest change makes it fit."""
    found = {
        method: min((_shortage(context, candidate) for candidate in smallest), default=math.inf)
        for method, (context, smallest) in methods.items()
    }
    return min(found, key=lambda method: found[method])


def _shortage(context: PlanningContext, candidate: Candidate) -> float:
    """The largest of the factors by which a candidate exceeds its budgets."""
    return max(need / granted for _, need, granted in _budgets(context, candidate) if need and granted)


def _budgets(context: PlanningContext, candidate: Candidate) -> Iterator[tuple[str, float, float | None]]:
    """Each resource with what a candidate needs of it and what is granted: bytes, seconds, money; None: unknown."""
    memory, limits = candidate.memory, context.job.limits
    yield "RAM of a rank" if context.is_cpu else "card", memory.need_bytes, memory.usable_bytes
    if not context.is_cpu:
        yield "host RAM", memory.pinned_bytes + memory.host_bytes, context.host_ram_bytes
        yield "pinned host RAM", memory.pinned_bytes, context.pinnable_ram_bytes
    yield "NVMe", memory.nvme_bytes, context.nvme_bytes
    hours = run_hours(context, candidate)
    if limits.hours is not None:
        yield "time", hours * 3600, limits.hours * 3600
    if limits.cost is not None:
        yield "cost", run_cost(context, hours) or 0.0, limits.cost


def _tried(context: PlanningContext, smallest: Sequence[Candidate]) -> Iterator[Attempt]:
    """The candidates that exceed their budgets least, each with every budget that it exceeds."""
    for candidate in sorted(smallest, key=lambda each: _shortage(context, each))[:MOST_TRIED]:
        for resource, need, granted in _budgets(context, candidate):
            if granted is not None and need > granted:
                yield Attempt(str(context.method), candidate.strategy.name, resource, need, granted)


def nothing_fits(
    context: PlanningContext, smallest: Sequence[Candidate], methods: Sequence[MethodRow]
) -> NothingFitsError:
    """The error with both numbers and a change that suffices; `smallest` has the smallest configurations.

    Changes of the job that fit, such as an opt-in, are searched by `launch.commands.ways_out`.
    """
    size = format_count(context.shape.num_parameters)
    model = f"{context.method} training of {size} parameters"
    fitting = [candidate for candidate in smallest if candidate.memory.fits]
    if fitting:
        timely = [candidate for candidate in fitting if excess(_untimed(context), candidate) is None]
        nearest = min(timely or fitting, key=lambda candidate: run_hours(context, candidate))
        over = excess(context, nearest)
        assert over is not None, "a row within every budget is a candidate"
        first = f"nothing fits: {model} ({nearest.strategy.name}) {over.reason}"
        remedy = " and ".join((over.remedy, *_more_time(context, nearest, over)))
    else:
        nearest = min(smallest, key=lambda candidate: candidate.memory.need_bytes)
        need = format_bytes(nearest.memory.need_bytes)
        first = f"nothing fits: {model} needs at least {need} ({nearest.strategy.name}); {context.device_text}"
        remedy = memory_remedy(context, nearest)
        held = replace(nearest, memory=replace(nearest.memory, usable_bytes=nearest.memory.need_bytes))
        over = excess(context, held)  # a larger device does not help if the host's RAM does not suffice
        if over is not None and over.is_host:
            remedy += f" and {over.remedy}"
    lines = [first, f"would fit with {remedy}"]
    others = [f"{row.method} ({format_bytes(row.memory_bytes or 0)})" for row in methods if row.is_within_limits]
    if others:
        lines.append(f"what would fit: {', '.join(others)}")
    return NothingFitsError("\n".join(lines), tuple(_tried(context, smallest)))


def _untimed(context: PlanningContext) -> PlanningContext:
    """The same job without a limit on hours and money; if it still exceeds a budget it needs another machine."""
    limits = replace(context.job.limits, hours=None, cost=None)
    return replace(context, job=replace(context.job, limits=limits))


def _more_time(context: PlanningContext, candidate: Candidate, first: Excess) -> Iterator[str]:
    """Limits on hours and money that are exceeded besides the `first` budget."""
    limits, hours = context.job.limits, run_hours(context, candidate)
    cost = run_cost(context, hours)
    named = first.remedy.partition(":")[0]
    if limits.hours is not None and hours > limits.hours and named != "limits.hours":
        yield f"limits.hours: {math.ceil(hours)}"
    if cost is not None and limits.cost is not None and cost > limits.cost and named != "limits.cost":
        yield f"limits.cost: {math.ceil(cost)}"


def _shorter_sequences(context: PlanningContext, strategy: Strategy) -> str | None:
    """Sequences half or a quarter as long; a step has the more of them."""
    job, schedule = context.job, context.schedule
    for divisor in (2, 4):
        seq_len = job.train.seq_len // divisor
        if seq_len < _MIN_SEQ_LEN:
            return None
        shorter = replace(
            context,
            job=replace(job, train=replace(job.train, seq_len=seq_len)),
            schedule=replace(schedule, sequences_per_step=schedule.tokens_per_step // seq_len),
        )
        if can_fit(shorter, strategy):
            return f"train.seq_len: {seq_len}"
    return None


def _more_devices(context: PlanningContext, strategy: Strategy) -> str | None:
    """More nodes of the same kind, or more devices in the one node; only if state is sharded over ranks."""
    if context.is_cpu or not strategy.sharding.shards_optimizer:
        return None
    factor = 2
    while factor <= _MAX_DEVICE_FACTOR:
        more = _with_ranks(context, factor * context.num_ranks)
        if can_fit(more, strategy):
            return f"{more.num_ranks} such GPUs"
        factor *= 2
    return None


def _with_ranks(context: PlanningContext, num_ranks: int) -> PlanningContext:
    """The same job on `num_ranks` GPUs of the same kind or more: several nodes are full, of at least eight each."""
    hardware = context.hardware
    per_node = min(num_ranks, max(8, hardware.num_devices_per_node))
    num_nodes = -(-num_ranks // per_node)
    gpus = tuple(islice(cycle(hardware.gpus), per_node))
    return replace(
        context,
        hardware=replace(hardware, gpus=gpus, num_nodes=num_nodes),
        device=replace(context.device, num_nodes=num_nodes, devices_per_node=per_node),
    )
