"""The own choice of the planner, compared with published runs."""

import pytest
from choices import PUBLISHED, Published

from shardwise.trainer.planning.candidates import configuration_of, upper_seconds
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.search.configurations import SAME_SPEED


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: run.name)
def test_the_own_choice_is_never_slower_than_what_others_published(run: Published) -> None:
    pinned, own = (run.plan(is_pinned=is_pinned) for is_pinned in (True, False))
    seconds = [
        upper_seconds(context_of(plan), configuration_of(context_of(plan), plan.chosen), plan.chosen.speed.step_s)
        for plan in (own, pinned)
    ]
    assert seconds[0] <= (1 + SAME_SPEED) * seconds[1]
    assert own.chosen.speed.step_s <= (1 + SAME_SPEED) * pinned.chosen.speed.step_s
