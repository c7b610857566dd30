"""When a checkpoint is due."""

import pytest

from shardwise.trainer.runtime.checkpoint import Ranks
from shardwise.trainer.runtime.loop.saving import SaveTimer
from shardwise.trainer.spec.plan import Schedule


@pytest.mark.parametrize(
    ("settings", "step_s", "cost_s", "expected"),
    [
        pytest.param({"checkpoint_every_steps": 3}, 1.0, 0.0, [3, 6, 9, 12, 15, 18, 21], id="steps alone"),
        pytest.param(
            {"checkpoint_every_steps": 5, "checkpoint_every_s": 20.0},
            7.0,
            1.0,
            [3, 5, 8, 10, 13, 15, 18, 20],
            id="both",
        ),
        pytest.param({"checkpoint_every_steps": 4, "saving_max_share": 0.1}, 1.0, 0.1, [4, 8, 12, 16, 20], id="cheap"),
        pytest.param({"checkpoint_every_steps": 4, "saving_max_share": 0.1}, 1.0, 0.6, [4, 10, 16, 22], id="put off"),
    ],
)
def test_a_checkpoint_is_due_by_steps_by_the_clock_and_by_what_the_last_one_cost(settings, step_s, cost_s, expected):
    clock = [0.0]
    schedule = Schedule(
        num_steps=100, sequences_per_step=1, tokens_per_step=8, warmup_steps=0, lr=1.0, lr_source="",
        eval_every_steps=None, **({"checkpoint_every_steps": None} | settings),
    )  # fmt: skip
    timer = SaveTimer(schedule, Ranks.alone(), clock=lambda: clock[0])
    due = []
    for step in range(1, 23):
        clock[0] += step_s
        if timer.is_due(step):
            due.append(step)
            timer.saved(cost_s / 2)
            timer.went_on_costing(cost_s / 2)
    assert due == expected
