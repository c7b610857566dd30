"""How far a machine goes: the longest sequence, the largest micro batch and the largest model that fit.

Each answer is a ladder. Its first rung costs nothing, and each further one reaches higher for a price: recomputed
activations, another sharding, offload, and in the end another method. A mechanism that costs more than another and
reaches no further is left out.

Memory and the budgets of host RAM, pinned RAM and NVMe decide; hours and money do not. Whatever the micro batch, need
grows with the length of the rows, and whatever the length, with the micro batch; but a share of the global batch that
is taken at once keeps no gradients beside those being computed, so each of the two cases is searched by itself.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from shardwise.trainer.planning.calibrate import NO_CORRECTIONS
from shardwise.trainer.planning.candidates import candidate_of, predicted_memory, predicted_speed, with_micro_batch
from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.rules.rule import may_run, obstacle_to
from shardwise.trainer.planning.search.budget import excess
from shardwise.trainer.planning.search.choice import OFFLOAD_HANDICAP, one_a_layout, survey
from shardwise.trainer.planning.search.configurations import (
    activation_offloads,
    checkpointings,
    chunk_sizes,
    first_setting,
    losses,
    micro_batches,
)
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.strategy import Method, Strategy
from shardwise.trainer.spec.value import Value

SEQ_UNIT = 128  # tokens; lengths are multiples of it
MAX_SEQ_LEN = 2**22
MAX_MICRO_BATCH = 2**14
WORTH_A_STEP = 1.25  # times as far as the rung before


class Rung(Value, frozen=True, kw_only=True):
    """Limit that one mechanism reaches, and its cost."""

    method: Method
    size: int  # tokens of a sequence, sequences of a micro batch, or parameters
    candidate: Candidate
    slowdown: float  # time of a token beside the fastest rung of the method
    name: str | None = None  # of a preset

    @property
    def price(self) -> float:
        """Order of the results: seconds per token, with a margin for offload."""
        offloads = self.candidate.activation_offload or self.candidate.strategy.offload is not Offload.NONE
        return self.slowdown * (OFFLOAD_HANDICAP if offloads else 1.0)


def longest_sequences(contexts: Mapping[Method, PlanningContext]) -> tuple[Rung, ...]:
    """The longest sequences that fit at micro batch 1, by method, in multiples of `SEQ_UNIT`."""
    return _ladders(contexts, _longest)


def largest_batches(contexts: Mapping[Method, PlanningContext]) -> tuple[Rung, ...]:
    """The largest micro batches that fit at the job's sequence length, by method."""
    return _ladders(contexts, _largest_batch)


def largest_models(contexts: Mapping[Method, PlanningContext], presets: Mapping[str, ModelShape]) -> tuple[Rung, ...]:
    """The largest preset that fits, by method."""
    found = (_largest_model(_without_deadline(context), presets) for context in contexts.values())
    return tuple(rung for rung in found if rung is not None)


def _without_deadline(context: PlanningContext) -> PlanningContext:
    """The context with all the time there is, and every row as long as it may be."""
    job = context.job
    free = replace(job, limits=replace(job.limits, hours=math.inf, cost=None))
    data = context.data if context.data is not None and context.data.is_packed else None
    return replace(context, job=free, data=data)


def _ladders(
    contexts: Mapping[Method, PlanningContext], reach: Callable[[PlanningContext, Configuration], Configuration | None]
) -> tuple[Rung, ...]:
    return tuple(
        rung
        for context in contexts.values()
        for rung in _with_slowdowns(_frontier(_reached(_without_deadline(context), reach)))
    )


def _reached(
    context: PlanningContext, reach: Callable[[PlanningContext, Configuration], Configuration | None]
) -> list[Rung]:
    """Limits that each allowed mechanism reaches."""
    rows = [row for row in CATALOGUE if may_run(context, row)]
    starts = [
        replace(
            first_setting(context, row, checkpointing=checkpointing, loss=losses(context)[0]),
            activation_offload=offloads,
        )
        for row in one_a_layout(rows)
        for checkpointing in checkpointings(context)
        for offloads in activation_offloads(context)
    ]
    settings = [configuration for start in starts if (configuration := reach(context, start)) is not None]
    is_sequence = reach is _longest
    return [
        Rung(
            method=context.method,
            size=configuration.seq_len if is_sequence else configuration.micro_batch,
            candidate=candidate_of(context, configuration),
            slowdown=_seconds_per_token(
                context, configuration if not is_sequence else _at_the_jobs_length(context, configuration)
            ),
        )
        for configuration in settings
    ]


def _frontier(rungs: Iterable[Rung]) -> list[Rung]:
    """Rungs that no cheaper one reaches, exact ones first, each worth its step; the farthest is always among them."""
    retained: list[Rung] = []
    for is_exact in (True, False):
        reached = max((rung.size for rung in retained), default=0)
        ordered = sorted(
            (rung for rung in rungs if rung.candidate.strategy.is_exact is is_exact),
            key=lambda rung: (rung.price, -rung.size),
        )
        farthest = max((rung.size for rung in ordered), default=0)
        for rung in ordered:
            if rung.size > reached and (rung.size >= WORTH_A_STEP * reached or rung.size == farthest):
                retained.append(rung)
                reached = rung.size
    return retained


def _with_slowdowns(rungs: Sequence[Rung]) -> list[Rung]:
    fastest = min((rung.slowdown for rung in rungs), default=1.0)
    return [replace(rung, slowdown=rung.slowdown / fastest) for rung in rungs]


def _seconds_per_token(context: PlanningContext, configuration: Configuration) -> float:
    return 1 / predicted_speed(context, configuration).tokens_per_s_per_gpu


def _at_the_jobs_length(context: PlanningContext, configuration: Configuration) -> Configuration:
    return with_micro_batch(context, replace(configuration, seq_len=context.job.train.seq_len), 1)


def _longest(context: PlanningContext, start: Configuration) -> Configuration | None:
    tokens, num_ranks = context.schedule.tokens_per_step, context.num_ranks

    def at(seq_len: int) -> Configuration:
        sequences = max(1, tokens // seq_len)
        return replace(start, micro_batch=1, seq_len=seq_len, accumulation=-(-sequences // num_ranks))

    at_once = (tokens // (num_ranks + 1) // SEQ_UNIT + 1) * SEQ_UNIT  # from here on a rank has one sequence a step
    return _largest_fitting(context, at, first_at_once=max(SEQ_UNIT, at_once), unit=SEQ_UNIT, limit=MAX_SEQ_LEN)


def _largest_batch(context: PlanningContext, start: Configuration) -> Configuration | None:
    def at(micro_batch: int) -> Configuration:
        return with_micro_batch(context, start, micro_batch)

    return _largest_fitting(context, at, first_at_once=context.sequences_per_rank, unit=1, limit=MAX_MICRO_BATCH)


def _largest_fitting(
    context: PlanningContext, at: Callable[[int], Configuration], *, first_at_once: int, unit: int, limit: int
) -> Configuration | None:
    """The largest size that fits: a share taken at once is searched first, then smaller ones that add up."""
    for low, high in ((first_at_once, limit), (unit, first_at_once - unit)):
        if low <= high and _fits(context, at(low)):
            return at(_bisect(lambda size: _fits(context, at(size)), low, high, unit))
    return None


def _bisect(fits: Callable[[int], bool], low: int, high: int, unit: int) -> int:
    """The largest of low, low + unit, ... up to `high` that fits; `low` does, and what fits has no gap."""
    step = unit
    while low + step <= high and fits(low + step):
        low, step = low + step, 2 * step
    while step >= unit:
        if low + step <= high and fits(low + step):
            low += step
        else:
            step //= 2
    return low


def _fits(context: PlanningContext, configuration: Configuration) -> bool:
    return obstacle_to(context, configuration) is None and excess(context, candidate_of(context, configuration)) is None


def _largest_model(context: PlanningContext, presets: Mapping[str, ModelShape]) -> Rung | None:
    seq_len = context.job.train.seq_len
    long_enough = {name: shape for name, shape in presets.items() if seq_len <= (shape.max_positions or seq_len)}
    for name, shape in sorted(long_enough.items(), key=lambda preset: -preset[1].num_parameters):
        requested = replace(context, shape=shape, corrections=NO_CORRECTIONS)
        ranking = survey(requested) if _may_fit(requested) else None
        if ranking is not None and ranking.candidates:
            return Rung(
                method=context.method,
                size=shape.num_parameters,
                candidate=ranking.candidates[0],
                slowdown=1.0,
                name=name,
            )
    return None


def _may_fit(context: PlanningContext) -> bool:
    """True if the smallest setting of any strategy fits the device; most presets are excluded by this alone."""
    rows = [row for row in CATALOGUE if may_run(context, row)]
    sizes = micro_batches(context)
    return any(
        predicted_memory(context, with_micro_batch(context, start, micro_batch)).fits
        for row in one_a_layout(rows)
        for start in (_smallest_start(context, row),)
        for micro_batch in {sizes[0], sizes[-1]}
    )


def _smallest_start(context: PlanningContext, row: Strategy) -> Configuration:
    start = first_setting(context, row, checkpointing=checkpointings(context)[0], loss=losses(context)[0])
    return replace(
        start,
        activation_offload=activation_offloads(context)[-1],
        loss_chunk_tokens=chunk_sizes(context.shape, start.loss)[-1],
    )
