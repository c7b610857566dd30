"""When the next checkpoint is due: by steps, by the clock, and, where the job leaves it open, by what saving costs.

Every answer is the same on all ranks. Steps need no words; of seconds rank 0's clock decides, by a vote. A run whose
job says nothing of `checkpoint.every` waits after each save until saving has cost at most `max_share` of the time since
the last one, as it was measured: a save of a minute comes no sooner than after 33 minutes at 3 %.
"""

import time
from collections.abc import Callable

from trainer.runtime.checkpoint import Ranks
from trainer.spec.plan import Schedule


class SaveTimer:
    """Asked once at the end of each step; told of every save."""

    def __init__(self, schedule: Schedule, ranks: Ranks, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._schedule = schedule
        self._ranks = ranks
        self._clock = clock
        self._saved_at = clock()
        self._cost_s = 0.0
        self._is_waiting = False  # due by steps, and put off

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be saved after this step; collective."""
        every_steps, every_s = self._schedule.checkpoint_every_steps, self._schedule.checkpoint_every_s
        max_share = self._schedule.saving_max_share
        is_by_step = self._is_waiting or (every_steps is not None and step % every_steps == 0)
        if every_s is None and max_share is None:
            return is_by_step
        waited = self._clock() - self._saved_at
        is_late = every_s is not None and waited >= every_s
        is_cheap = max_share is None or self._cost_s <= max_share * waited
        is_due = not self._ranks.all_agree(not (self._ranks.is_first and (is_by_step or is_late) and is_cheap))
        self._is_waiting = is_by_step and not is_due
        return is_due

    def saved(self, cost_s: float) -> None:
        """A checkpoint was saved, or was not, for so many seconds of training's time."""
        self._saved_at = self._clock()
        self._cost_s = cost_s
        self._is_waiting = False

    def went_on_costing(self, cost_s: float) -> None:
        """The save that was told of last took training more time, as it was committed."""
        self._cost_s += cost_s
