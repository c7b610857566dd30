"""From a setting to a candidate and back: a candidate is a setting with its predicted memory and speed.

The one place where the closed forms meet what is known of this data and this device: rows that are padded need room
for the longest and time for the average, and both figures are corrected by what earlier runs measured.
"""

from collections.abc import Callable, Iterable

import msgspec
from msgspec.structs import replace

from shardwise.trainer.planning.calibrate import corrected_memory, corrected_speed
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.memory import estimate_memory, held_bytes, least_bytes, needed_bytes
from shardwise.trainer.planning.run import longest_width, mean_width, row_recipe
from shardwise.trainer.planning.setting import Setting
from shardwise.trainer.planning.speed.step import estimate_speed, evaluation_seconds, step_seconds
from shardwise.trainer.spec.plan import Candidate, MemoryEstimate, SpeedEstimate
from shardwise.trainer.spec.strategy import Checkpointing

_SHARED_FIELDS = tuple(
    field.name for field in msgspec.structs.fields(Setting) if field.name in Candidate.__struct_fields__
)


def candidate_of(context: PlanningContext, setting: Setting) -> Candidate:
    """A setting with what it needs and how fast it is predicted to be."""
    return Candidate(
        **{name: getattr(setting, name) for name in _SHARED_FIELDS},
        memory=predicted_memory(context, setting),
        speed=predicted_speed(context, setting),
    )


def predicted_memory(context: PlanningContext, setting: Setting) -> MemoryEstimate:
    """Bytes at the worst event of a step whose micro batch has the longest row."""
    memory = estimate_memory(context.shape, at_longest(context, setting), context.device)
    return corrected_memory(memory, context.corrections.of(setting.strategy, setting.method))


def predicted_need(context: PlanningContext, setting: Setting) -> int:
    """`need_bytes` of `predicted_memory`, sooner where no run corrects it."""
    if _is_corrected(context, setting):
        return predicted_memory(context, setting).need_bytes
    return needed_bytes(context.shape, at_longest(context, setting), context.device)


def need_floor(context: PlanningContext, start: Setting) -> Callable[[Setting], int]:
    """A lower bound of `predicted_need` for settings that differ from `start` only in micro batch and loss head.

    0 where runs correct it.
    """
    if _is_corrected(context, start):
        return lambda _: 0
    least = least_bytes(context.shape, at_longest(context, start), context.device)
    return lambda setting: least(setting.micro_batch, setting.accumulation)


def least_needy(context: PlanningContext, settings: Iterable[Setting]) -> Setting:
    """The first of the settings of a row whose `predicted_need` is the least."""
    first, *others = settings
    least, found = predicted_need(context, first), first
    floors: dict[tuple[Checkpointing, bool, bool], Callable[[Setting], int]] = {}
    for setting in others:
        kept = setting.checkpointing, setting.compile, setting.activation_offload
        if kept not in floors:
            floors[kept] = need_floor(context, setting)
        if floors[kept](setting) < least and (need := predicted_need(context, setting)) < least:
            least, found = need, setting
    return found


def never_fits(context: PlanningContext, setting: Setting) -> bool:
    """True if the bytes between steps alone exceed the device."""
    return not _is_corrected(context, setting) and (
        held_bytes(context.shape, setting, context.device) > context.device.usable_bytes
    )


def _is_corrected(context: PlanningContext, setting: Setting) -> bool:
    return bool(context.corrections.of(setting.strategy, setting.method).peak.num_runs)


def at_longest(context: PlanningContext, setting: Setting) -> Setting:
    """The setting as its memory is predicted: with the longest row that this data has."""
    widest = longest_width(context.data, seq_len=setting.seq_len)
    if widest == setting.seq_len:
        return setting
    return replace(setting, recipe=replace(setting.recipe, longest_seq=widest))


def predicted_speed(context: PlanningContext, setting: Setting) -> SpeedEstimate:
    """Seconds of a step as earlier runs correct it."""
    speed = relative_speed(context, setting)
    return corrected_speed(speed, context.corrections.of(setting.strategy, setting.method))


def relative_speed(context: PlanningContext, setting: Setting) -> SpeedEstimate:
    """Seconds of a step of average rows, uncorrected; its tokens are those that are no padding.

    Settings of one row are compared by it: what was measured of a row never changes which of them is its best.
    """
    data, width = context.data, _mean_width(context, setting)
    if data is None or data.mean_cut_tokens is None or width is None:
        return estimate_speed(context.shape, setting, context.device)
    speed = estimate_speed(context.shape, replace(setting, seq_len=round(width)), context.device)
    real = min(1.0, data.mean_cut_tokens / width)
    return replace(
        speed,
        tokens_per_s_per_gpu=real * speed.tokens_per_s_per_gpu,
        mfu=None if speed.mfu is None else real * speed.mfu,
    )


def relative_seconds(context: PlanningContext, setting: Setting) -> float:
    """`step_s` of `relative_speed` alone, for a search over settings."""
    width = _mean_width(context, setting)
    average = setting if width is None else replace(setting, seq_len=round(width))
    return step_seconds(context.shape, average, context.device)


def _mean_width(context: PlanningContext, setting: Setting) -> float | None:
    """Of rows that are padded to less than their longest; None where all have `seq_len` tokens."""
    data, seq_len = context.data, setting.seq_len
    width = mean_width(data, setting.micro_batch, seq_len=seq_len)
    return None if data is None or data.mean_cut_tokens is None or width >= seq_len else width


def setting_of(context: PlanningContext, candidate: Candidate) -> Setting:
    """The setting a candidate was estimated from."""
    return Setting(
        **{name: getattr(candidate, name) for name in _SHARED_FIELDS},
        ranks_per_node=context.hardware.num_devices_per_node,
        recipe=row_recipe(context.data, seq_len=candidate.seq_len),
        lora=context.job.train.lora,
        galore=context.job.train.galore,
    )


def with_micro_batch(context: PlanningContext, setting: Setting, micro_batch: int) -> Setting:
    """Another micro batch at the same global batch: accumulation makes up for it."""
    rows_per_round = setting.num_ranks * micro_batch
    accumulation = -(-context.schedule.sequences_per_step // rows_per_round)
    return replace(setting, micro_batch=micro_batch, accumulation=accumulation)


def run_hours(context: PlanningContext, candidate: Candidate) -> float:
    """Predicted hours of the whole run: its steps, and a forward over the held-out rows at every evaluation.

    DPO that trains the whole model scores every pair once more, before the first step: that model is its reference.
    """
    schedule, speed = context.schedule, candidate.speed
    seconds = schedule.num_steps * speed.step_s
    setting = setting_of(context, candidate)
    num_scored = _tokens_scored(context, setting)
    if num_scored:
        is_corrected = context.corrections.of(candidate.strategy, candidate.method).step.value != 1
        predicted = relative_seconds(context, setting) if is_corrected else speed.step_s
        scoring_s = evaluation_seconds(context.shape, setting, context.device, num_scored)
        seconds += scoring_s * speed.step_s / predicted  # as runs correct the step
    return seconds / 3600


def _tokens_scored(context: PlanningContext, setting: Setting) -> int:
    """Tokens of all forwards of a run that no backward follows, those of DPO's reference in a step left out."""
    schedule, num_eval_tokens = context.schedule, context.num_eval_tokens
    num_evaluations = -(-schedule.num_steps // schedule.eval_every_steps) if schedule.eval_every_steps else 0
    num_scored = num_evaluations * num_eval_tokens * (2 if setting.runs_reference else 1)
    is_paired = setting.recipe.rows_per_example == 2
    if is_paired and not setting.runs_reference and context.data is not None:
        num_scored += context.data.num_tokens + num_eval_tokens
    return num_scored


def run_cost(context: PlanningContext, hours: float) -> float | None:
    """Money for the run, in the currency of price_per_gpu_hour; None where no price is known."""
    price = context.job.price_per_gpu_hour
    return None if price is None else hours * context.num_ranks * price
