"""The learning rate as a function of the step, so that no position has to be saved or restored.

Steps count from 1: step 1 is the first update, step `num_steps` the last, as in metrics.jsonl. During warmup the
rate rises linearly and is full at step `warmup_steps`; after it

    cosine    half a cosine from the full rate to a tenth of it (Chinchilla, arXiv:2203.15556, app. B: a tenth)
    linear    a straight line to zero
    constant  the full rate
    wsd       the full rate, then 1 - sqrt over the last fifth of the run (Haegele et al., arXiv:2405.18392)

The end of a course lies one step behind the last update: no update is spent at a rate of zero.
"""

import math

from shardwise.trainer.spec.job.sections import LrSchedule, TrainJob
from shardwise.trainer.spec.plan import Schedule

COSINE_FLOOR = 0.1  # of the full rate
WSD_COOLDOWN_SHARE = 0.2  # of the run


def learning_rate(schedule: Schedule, train: TrainJob, step: int) -> float:
    """The rate of update `step`, counted from 1; ValueError outside of 1 .. num_steps."""
    if not 1 <= step <= schedule.num_steps:
        raise ValueError(f"step {step} is outside of 1 .. {schedule.num_steps}")
    if step <= schedule.warmup_steps:
        return schedule.lr * step / schedule.warmup_steps
    return schedule.lr * _share_of_full_rate(schedule, train.schedule, step)


def _share_of_full_rate(schedule: Schedule, course: LrSchedule, step: int) -> float:
    num_done, num_falling = step - 1 - schedule.warmup_steps, schedule.num_steps - schedule.warmup_steps
    if course is LrSchedule.CONSTANT:
        return 1.0
    if course is LrSchedule.LINEAR:
        return 1 - num_done / num_falling
    if course is LrSchedule.COSINE:
        return COSINE_FLOOR + (1 - COSINE_FLOOR) * (1 + math.cos(math.pi * num_done / num_falling)) / 2
    num_cooldown = min(num_falling, max(1, round(WSD_COOLDOWN_SHARE * schedule.num_steps)))
    num_cooled = max(0, step - 1 - (schedule.num_steps - num_cooldown))
    return 1 - math.sqrt(num_cooled / num_cooldown)
