"""When a checkpoint is due."""

from typing import Any

import pytest

from shardwise.trainer.runtime.checkpoint import Ranks
from shardwise.trainer.runtime.loop.saving import SaveTimer
from shardwise.trainer.spec.plan import Schedule


def timer_of(clock: list[float], **settings: Any) -> SaveTimer:
    fields: dict[str, Any] = {
        "num_steps": 100, "sequences_per_step": 1, "tokens_per_step": 8, "warmup_steps": 0, "lr": 1.0,
        "lr_source": "", "eval_every_steps": None, "checkpoint_every_steps": None,
    }  # fmt: skip
    return SaveTimer(Schedule(**(fields | settings)), Ranks.alone(), clock=lambda: clock[0])


def test_steps_alone_need_no_clock() -> None:
    timer = timer_of([0.0], checkpoint_every_steps=3)
    assert [step for step in range(1, 10) if timer.is_due(step)] == [3, 6, 9]


def test_whichever_of_the_two_comes_first() -> None:
    clock = [0.0]
    timer = timer_of(clock, checkpoint_every_steps=5, checkpoint_every_s=20.0)
    due = []
    for step in range(1, 16):
        clock[0] += 7.0
        if timer.is_due(step):
            due.append(step)
            timer.saved(1.0)
    assert due == [3, 5, 8, 10, 13, 15]


@pytest.mark.parametrize(("cost_s", "expected"), [(0.1, [4, 8, 12, 16, 20]), (0.6, [4, 10, 16, 22])])
def test_what_saving_costs_puts_the_next_one_off(cost_s: float, expected: list[int]) -> None:
    clock = [0.0]
    timer = timer_of(clock, checkpoint_every_steps=4, saving_max_share=0.1)
    due = []
    for step in range(1, 23):
        clock[0] += 1.0
        if timer.is_due(step):
            due.append(step)
            timer.saved(cost_s / 2)
            timer.went_on_costing(cost_s / 2)
    assert due == expected


def test_one_put_off_comes_as_soon_as_it_may() -> None:
    clock = [0.0]
    timer = timer_of(clock, checkpoint_every_steps=10, saving_max_share=0.1)
    timer.saved(1.2)
    due = []
    for step in range(1, 21):
        clock[0] += 1.0
        if timer.is_due(step):
            due.append(step)
            timer.saved(0.1)
    assert due == [12, 20]
