"""From a setting to a candidate and back: a candidate is a setting with its predicted memory and speed.

The one place where the closed forms meet what is known of this data and this device: rows that are padded need room
for the longest and time for the average, and both figures are corrected by what earlier runs measured.
"""

from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from shardwise.trainer.planning.calibrate import corrected_memory, corrected_speed
from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.memory import estimate_memory, held_bytes, least_bytes, needed_bytes
from shardwise.trainer.planning.run import longest_width, mean_width, row_policy
from shardwise.trainer.planning.speed.step import estimate_speed, evaluation_seconds, step_seconds
from shardwise.trainer.spec.plan import Candidate, MemoryEstimate, SpeedEstimate
from shardwise.trainer.spec.strategy import Checkpointing

_SHARED_FIELDS = tuple(
    field.name for field in msgspec.structs.fields(Configuration) if field.name in Candidate.__struct_fields__
)


def candidate_of(context: PlanningContext, configuration: Configuration) -> Candidate:
    """A setting with what it needs and how fast it is predicted to be."""
    return Candidate(
        **{name: getattr(configuration, name) for name in _SHARED_FIELDS},
        memory=predicted_memory(context, configuration),
        speed=predicted_speed(context, configuration),
    )


def predicted_memory(context: PlanningContext, configuration: Configuration) -> MemoryEstimate:
    """Bytes at the worst event of a step whose micro batch has the longest row."""
    memory = estimate_memory(context.shape, at_longest(context, configuration), context.device)
    return corrected_memory(memory, context.corrections.of(configuration.strategy, configuration.method))


def predicted_need(context: PlanningContext, configuration: Configuration) -> int:
    """`need_bytes` of `predicted_memory`, sooner where no run corrects it."""
    if _is_corrected(context, configuration):
        return predicted_memory(context, configuration).need_bytes
    return needed_bytes(context.shape, at_longest(context, configuration), context.device)


def need_floor(context: PlanningContext, start: Configuration) -> Callable[[Configuration], int]:
    """A lower bound of `predicted_need` for settings that differ from `start` only in micro batch and loss head.

    0 where runs correct it.
    """
    if _is_corrected(context, start):
        return lambda _: 0
    least = least_bytes(context.shape, at_longest(context, start), context.device)
    return lambda configuration: least(configuration.micro_batch, configuration.accumulation)


def least_needy(context: PlanningContext, settings: Iterable[Configuration]) -> Configuration:
    """The first of the settings of a row whose `predicted_need` is the least."""
    first, *others = settings
    least, found = predicted_need(context, first), first
    floors: dict[tuple[Checkpointing, bool, bool], Callable[[Configuration], int]] = {}
    for configuration in others:
        retained = configuration.checkpointing, configuration.compile, configuration.activation_offload
        if retained not in floors:
            floors[retained] = need_floor(context, configuration)
        if floors[retained](configuration) < least and (need := predicted_need(context, configuration)) < least:
            least, found = need, configuration
    return found


def never_fits(context: PlanningContext, configuration: Configuration) -> bool:
    """True if the bytes between steps alone exceed the device."""
    return not _is_corrected(context, configuration) and (
        held_bytes(context.shape, configuration, context.device) > context.device.usable_bytes
    )


def _is_corrected(context: PlanningContext, configuration: Configuration) -> bool:
    return bool(context.corrections.of(configuration.strategy, configuration.method).peak.num_runs)


def at_longest(context: PlanningContext, configuration: Configuration) -> Configuration:
    """The setting as its memory is predicted: with the longest row that this data has."""
    widest = longest_width(context.data, seq_len=configuration.seq_len)
    if widest == configuration.seq_len:
        return configuration
    return replace(configuration, policy=replace(configuration.policy, longest_seq=widest))


def predicted_speed(context: PlanningContext, configuration: Configuration) -> SpeedEstimate:
    """Seconds of a step as earlier runs correct it."""
    speed = relative_speed(context, configuration)
    return corrected_speed(speed, context.corrections.of(configuration.strategy, configuration.method))


def relative_speed(context: PlanningContext, configuration: Configuration) -> SpeedEstimate:
    """Seconds of a step of average rows, uncorrected; its tokens are those that are no padding.

    Settings of one row are compared by it: what was measured of a row never changes which of them is its best.
    """
    data, width = context.data, _mean_width(context, configuration)
    if data is None or data.mean_cut_tokens is None or width is None:
        return estimate_speed(context.shape, configuration, context.device)
    speed = estimate_speed(context.shape, replace(configuration, seq_len=round(width)), context.device)
    real = min(1.0, data.mean_cut_tokens / width)
    return replace(
        speed,
        tokens_per_s_per_gpu=real * speed.tokens_per_s_per_gpu,
        mfu=None if speed.mfu is None else real * speed.mfu,
    )


def relative_seconds(context: PlanningContext, configuration: Configuration) -> float:
    """`step_s` of `relative_speed` alone, for a search over settings."""
    width = _mean_width(context, configuration)
    average = configuration if width is None else replace(configuration, seq_len=round(width))
    return step_seconds(context.shape, average, context.device)


def _mean_width(context: PlanningContext, configuration: Configuration) -> float | None:
    """Of rows that are padded to less than their longest; None where all have `seq_len` tokens."""
    data, seq_len = context.data, configuration.seq_len
    width = mean_width(data, configuration.micro_batch, seq_len=seq_len)
    return None if data is None or data.mean_cut_tokens is None or width >= seq_len else width


def configuration_of(context: PlanningContext, candidate: Candidate) -> Configuration:
    """The setting a candidate was estimated from."""
    return Configuration(
        **{name: getattr(candidate, name) for name in _SHARED_FIELDS},
        ranks_per_node=context.hardware.num_devices_per_node,
        policy=row_policy(context.data, seq_len=candidate.seq_len),
        lora=context.job.train.lora,
        galore=context.job.train.galore,
    )


def with_micro_batch(context: PlanningContext, configuration: Configuration, micro_batch: int) -> Configuration:
    """Another micro batch at the same global batch: accumulation makes up for it."""
    rows_per_round = configuration.num_ranks * micro_batch
    accumulation = -(-context.schedule.sequences_per_step // rows_per_round)
    return replace(configuration, micro_batch=micro_batch, accumulation=accumulation)


def run_hours(context: PlanningContext, candidate: Candidate) -> float:
    """Predicted hours of the whole run: its steps, and a forward over the held-out rows at every evaluation.

    DPO that trains the whole model scores every pair once more, before the first step: that model is its reference.
    """
    schedule, speed = context.schedule, candidate.speed
    seconds = schedule.num_steps * speed.step_s
    configuration = configuration_of(context, candidate)
    num_scored = _tokens_scored(context, configuration)
    if num_scored:
        is_corrected = context.corrections.of(candidate.strategy, candidate.method).step.value != 1
        predicted = relative_seconds(context, configuration) if is_corrected else speed.step_s
        scoring_s = evaluation_seconds(context.shape, configuration, context.device, num_scored)
        seconds += scoring_s * speed.step_s / predicted  # as runs correct the step
    return seconds / 3600


def _tokens_scored(context: PlanningContext, configuration: Configuration) -> int:
    """Tokens of all forwards of a run that no backward follows, those of DPO's reference in a step left out."""
    schedule, num_eval_tokens = context.schedule, context.num_eval_tokens
    num_evaluations = -(-schedule.num_steps // schedule.eval_every_steps) if schedule.eval_every_steps else 0
    num_scored = num_evaluations * num_eval_tokens * (2 if configuration.runs_reference else 1)
    is_paired = configuration.policy.rows_per_example == 2
    if is_paired and not configuration.runs_reference and context.data is not None:
        num_scored += context.data.num_tokens + num_eval_tokens
    return num_scored


def run_cost(context: PlanningContext, hours: float) -> float | None:
    """Money for the run, in the currency of price_per_gpu_hour; None where no price is known."""
    price = context.job.price_per_gpu_hour
    return None if price is None else hours * context.num_ranks * price
