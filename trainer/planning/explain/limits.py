"""Limits of a machine: the longest sequence, the largest micro batch and the largest model that fit.

Each limit is reached in steps. The first step is the fastest configuration; each further one reaches higher at a cost
in speed: recomputation, another sharding, offload, and last another method. A mechanism that is slower than another
and reaches no further is omitted.

Memory and the budgets of host RAM, pinned RAM and NVMe decide; hours and money do not. Need grows with the length of
the rows at any micro batch, and with the micro batch at any length. Without accumulation no accumulated gradients are
needed, so configurations with and without it are searched separately.

`limits_section` and `limits_json` show the results.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec.structs import replace

from shardwise.trainer.planning.calibrate import NO_CORRECTIONS
from shardwise.trainer.planning.candidates import (
    candidate_of,
    excess,
    predicted_memory,
    predicted_speed,
    prediction_error,
    with_micro_batch,
)
from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.page.content import Bars, Section, Sentence, Table
from shardwise.trainer.planning.rules.rule import may_run, obstacle_to
from shardwise.trainer.planning.search.choice import one_a_kind, survey
from shardwise.trainer.planning.search.configurations import (
    activation_offloads,
    checkpointings,
    chunk_sizes,
    first_configuration,
    first_start,
    losses,
    micro_batches,
)
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.strategy import Method, Strategy
from shardwise.trainer.spec.units import format_bytes, format_count
from shardwise.trainer.spec.value import Value

SEQ_UNIT = 128  # tokens; lengths are multiples of it
MAX_SEQ_LEN = 2**22
MAX_MICRO_BATCH = 2**14
WORTH_A_STEP = 1.25  # times as far as the step before


class LimitStep(Value, frozen=True, kw_only=True):
    """The limit that one mechanism reaches, and its cost."""

    method: Method
    size: int  # tokens of a sequence, sequences of a micro batch, or parameters
    candidate: Candidate
    slowdown: float  # time of a token over that of the fastest step of the method
    error: float = 0.0  # of that time, by prediction
    name: str | None = None  # of a preset

    @property
    def price(self) -> float:
        """Order of the results: seconds per token at the upper end of their range."""
        return self.slowdown * (1 + self.error)


def longest_sequences(contexts: Mapping[Method, PlanningContext]) -> tuple[LimitStep, ...]:
    """The longest sequences that fit at micro batch 1, by method, in multiples of `SEQ_UNIT`."""
    return _by_method(contexts, _longest)


def largest_batches(contexts: Mapping[Method, PlanningContext]) -> tuple[LimitStep, ...]:
    """The largest micro batches that fit at the job's sequence length, by method."""
    return _by_method(contexts, _largest_batch)


def largest_models(
    contexts: Mapping[Method, PlanningContext], presets: Mapping[str, ModelShape]
) -> tuple[LimitStep, ...]:
    """The largest preset that fits, by method."""
    found = (_largest_model(_without_deadline(context), presets) for context in contexts.values())
    return tuple(step for step in found if step is not None)


def _without_deadline(context: PlanningContext) -> PlanningContext:
    """The context without limits on time and money, and with rows of full length."""
    job = context.job
    free = replace(job, limits=replace(job.limits, hours=None, cost=None))
    data = context.data if context.data is not None and context.data.is_packed else None
    return replace(context, job=free, data=data)


def _by_method(
    contexts: Mapping[Method, PlanningContext], reach: Callable[[PlanningContext, Configuration], Configuration | None]
) -> tuple[LimitStep, ...]:
    return tuple(
        step
        for context in contexts.values()
        for step in _with_slowdowns(_frontier(_reached(_without_deadline(context), reach)))
    )


def _reached(
    context: PlanningContext, reach: Callable[[PlanningContext, Configuration], Configuration | None]
) -> list[LimitStep]:
    """Limits that each allowed mechanism reaches."""
    rows = [row for row in CATALOGUE if may_run(context, row)]
    starts = [
        replace(
            first_configuration(context, row, checkpointing=checkpointing, loss=losses(context)[0]),
            activation_offload=offloads,
        )
        for row in one_a_kind(rows)
        for checkpointing in checkpointings(context)
        for offloads in activation_offloads(context, checkpointing)
    ]
    configurations = [configuration for start in starts if (configuration := reach(context, start)) is not None]
    is_sequence = reach is _longest
    return [
        LimitStep(
            method=context.method,
            size=configuration.seq_len if is_sequence else configuration.micro_batch,
            candidate=candidate_of(context, configuration),
            error=prediction_error(configuration),
            slowdown=_seconds_per_token(
                context, configuration if not is_sequence else _at_the_jobs_length(context, configuration)
            ),
        )
        for configuration in configurations
    ]


def _frontier(steps: Iterable[LimitStep]) -> list[LimitStep]:
    """Steps that no cheaper one reaches, exact ones first, each `WORTH_A_STEP`; the farthest is always among them."""
    retained: list[LimitStep] = []
    for is_exact in (True, False):
        reached = max((step.size for step in retained), default=0)
        ordered = sorted(
            (step for step in steps if step.candidate.is_exact is is_exact),
            key=lambda step: (step.price, -step.size),
        )
        farthest = max((step.size for step in ordered), default=0)
        for step in ordered:
            if step.size > reached and (step.size >= WORTH_A_STEP * reached or step.size == farthest):
                retained.append(step)
                reached = step.size
    return retained


def _with_slowdowns(steps: Sequence[LimitStep]) -> list[LimitStep]:
    fastest = min((step.slowdown for step in steps), default=1.0)
    return [replace(step, slowdown=step.slowdown / fastest) for step in steps]


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
    """The largest size that fits: first without accumulation, then smaller sizes with it."""
    for low, high in ((first_at_once, limit), (unit, first_at_once - unit)):
        if low <= high and _fits(context, at(low)):
            return at(_bisect(lambda size: _fits(context, at(size)), low, high, unit))
    return None


def _bisect(fits: Callable[[int], bool], low: int, high: int, unit: int) -> int:
    """The largest of low, low + unit, ... up to `high` that fits; `low` does, and the sizes that fit have no gap."""
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


def _largest_model(context: PlanningContext, presets: Mapping[str, ModelShape]) -> LimitStep | None:
    seq_len = context.job.train.seq_len
    long_enough = {name: shape for name, shape in presets.items() if seq_len <= (shape.max_positions or seq_len)}
    for name, shape in sorted(long_enough.items(), key=lambda preset: -preset[1].num_parameters):
        requested = replace(context, shape=shape, corrections=NO_CORRECTIONS)
        ranking = survey(requested) if _may_fit(requested) else None
        if ranking is not None and ranking.candidates:
            return LimitStep(
                method=context.method,
                size=shape.num_parameters,
                candidate=ranking.candidates[0],
                slowdown=1.0,
                name=name,
            )
    return None


def _may_fit(context: PlanningContext) -> bool:
    """True if the smallest configuration of any strategy fits the device; this alone excludes most presets."""
    rows = [row for row in CATALOGUE if may_run(context, row)]
    sizes = micro_batches(context)
    return any(
        predicted_memory(context, with_micro_batch(context, start, micro_batch)).fits
        for row in one_a_kind(rows)
        for start in (_smallest_start(context, row),)
        for micro_batch in {sizes[0], sizes[-1]}
    )


def _smallest_start(context: PlanningContext, row: Strategy) -> Configuration:
    start = first_start(context, row)
    return replace(
        start,
        activation_offload=activation_offloads(context, start.checkpointing)[-1],
        loss_chunk_tokens=chunk_sizes(context.shape, start.loss)[-1],
    )


class Question(StrEnum):
    """Questions about the limits of a machine."""

    LONGEST_SEQ = "longest_seq"
    LARGEST_BATCH = "largest_batch"
    LARGEST_MODEL = "largest_model"


# Title, head of the column and JSON key of each.
_TITLES = {
    Question.LONGEST_SEQ: ("the longest sequence that fits, at micro batch 1", "tokens", "seq_len"),
    Question.LARGEST_BATCH: (
        "the largest micro batch that fits, at {seq_len:,} tokens a sequence", "sequences", "micro_batch",
    ),
    Question.LARGEST_MODEL: (
        "the largest preset that fits, at {seq_len:,} tokens a sequence", "parameters", "num_parameters",
    ),
}  # fmt: skip


def limits_section(
    question: Question, steps: Sequence[LimitStep], *, machine: str, seq_len: int, shape: ModelShape
) -> Section:
    """The limits by method, from the fastest mechanism to the one that reaches farthest."""
    opening, head, _ = _TITLES[question]
    title = f"{opening.format(seq_len=seq_len)}, on {machine}"
    if not steps:
        return Section(title=title, blocks=(Sentence(text="nothing fits under any method that the job allows"),))
    rows: list[tuple[str, ...]] = [("method", head, "recompute", "memory", "tokens/s", "time a token", "strategy")]
    rows += [_row(question, step) for step in steps]
    bars = tuple(
        (f"{step.method}, {step.candidate.strategy.name}", float(step.size), _size(question, step)) for step in steps
    )
    notes = tuple(Sentence(text=text) for text in _notes(question, steps, shape))
    table = Table(rows=tuple(rows), right=(1, 3, 4, 5), wide=6)
    return Section(title=title, blocks=(table, Bars(caption=head, rows=bars), *notes))


def limits_json(question: Question, steps: Sequence[LimitStep], *, machine: str) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "question": str(question),
        "machine": machine,
        "answers": [
            {
                "method": str(step.method),
                _TITLES[question][2]: step.size,
                "preset": step.name,
                "strategy": step.candidate.strategy.name,
                "checkpointing": str(step.candidate.checkpointing),
                "activation_offload": step.candidate.activation_offload,
                "is_exact": step.candidate.is_exact,
                "need_bytes": step.candidate.memory.need_bytes,
                "tokens_per_s": step.candidate.speed.tokens_per_s_per_gpu * step.candidate.num_ranks,
                "slowdown": step.slowdown,
            }
            for step in steps
        ],
    }


def _row(question: Question, step: LimitStep) -> tuple[str, ...]:
    candidate = step.candidate
    strategy = candidate.strategy.name + ("" if candidate.is_exact else " (changes the update)")
    place = ", saved in host RAM" if candidate.activation_offload else ""
    return (
        str(step.method),
        _size(question, step),
        f"{candidate.checkpointing}{place}",
        format_bytes(candidate.memory.need_bytes),
        f"{candidate.speed.tokens_per_s_per_gpu * candidate.num_ranks:,.0f}",
        "-" if question is Question.LARGEST_MODEL else f"{step.slowdown:.2f}x",
        strategy,
    )


def _size(question: Question, step: LimitStep) -> str:
    if question is Question.LARGEST_MODEL:
        return f"{step.name}, {format_count(step.size)}"
    return f"{step.size:,}"


def _notes(question: Question, steps: Sequence[LimitStep], shape: ModelShape) -> list[str]:
    if question is Question.LARGEST_MODEL:
        return []
    notes = []
    if question is Question.LONGEST_SEQ:
        notes.append("time a token is compared at the job's own sequence length; tokens/s is at the length shown")
        if shape.max_positions is not None and any(step.size > shape.max_positions for step in steps):
            notes.append(
                f"the model has {shape.max_positions:,} positions: train.seq_len cannot be more, even where more fits"
            )
    largest = max(step.candidate.num_ranks * step.candidate.micro_batch * step.candidate.seq_len for step in steps)
    notes.append(
        f"the largest of these computes {largest:,} tokens at once: train.tokens_per_step must be at least as many"
    )
    return notes
