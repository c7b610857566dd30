"""From a setting to a candidate and back: a candidate is a setting with its predicted memory and speed."""

import msgspec

from trainer.planning.memory import estimate_memory
from trainer.planning.setting import Setting
from trainer.planning.situation import Situation
from trainer.planning.speed import estimate_speed
from trainer.spec.plan import Candidate

_SHARED_FIELDS = tuple(
    field.name for field in msgspec.structs.fields(Setting) if field.name in Candidate.__struct_fields__
)


def candidate_of(situation: Situation, setting: Setting) -> Candidate:
    """A setting with what it needs and how fast it is predicted to be."""
    return Candidate(
        **{name: getattr(setting, name) for name in _SHARED_FIELDS},
        memory=estimate_memory(situation.shape, setting, situation.device),
        speed=estimate_speed(situation.shape, setting, situation.device),
    )


def setting_of(situation: Situation, candidate: Candidate) -> Setting:
    """The setting a candidate was estimated from."""
    return Setting(
        **{name: getattr(candidate, name) for name in _SHARED_FIELDS},
        ranks_per_node=situation.hardware.num_devices_per_node,
        lora=situation.job.train.lora,
        galore=situation.job.train.galore,
    )


def with_micro_batch(situation: Situation, setting: Setting, micro_batch: int) -> Setting:
    """Another micro batch at the same global batch: accumulation makes up for it."""
    rows_per_round = setting.num_ranks * micro_batch
    accumulation = -(-situation.schedule.sequences_per_step // rows_per_round)
    return msgspec.structs.replace(setting, micro_batch=micro_batch, accumulation=accumulation)


def run_hours(situation: Situation, candidate: Candidate) -> float:
    """Predicted hours of the whole run: its steps, and a forward over the held-out rows at every evaluation."""
    schedule, speed = situation.schedule, candidate.speed
    seconds = schedule.num_steps * speed.step_s
    if schedule.eval_every_steps and situation.num_eval_tokens:
        num_evaluations = -(-schedule.num_steps // schedule.eval_every_steps)
        tokens_per_s = schedule.tokens_per_step / speed.step_s
        seconds += num_evaluations * situation.num_eval_tokens / tokens_per_s / 3  # a step is about three forwards
    return seconds / 3600


def run_cost(situation: Situation, hours: float) -> float | None:
    """Money for the run, in the currency of price_per_gpu_hour; None where no price is known."""
    price = situation.job.price_per_gpu_hour
    return None if price is None else hours * situation.num_ranks * price
