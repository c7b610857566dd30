"""A moment by which a run has to have ended, and the stop ahead of it, with room for a checkpoint.

A scheduler sets one (the time limit of a job: the run is to go on in the next), a job's own limits another
(`spent_limits`: the run is over).
"""

import signal
import time
from typing import NamedTuple

from launch.attempt.supervisor import StopRequest
from launch.attempt.watchdog import Watchdog
from launch.terminal import Console
from trainer.spec.units import format_seconds

MOST_MARGIN_S = 45.0


class Deadline(NamedTuple):
    """When the run has to have ended."""

    moment_s: float  # on the monotonic clock
    margin_s: float  # for processes to end, beside the last step and the last save

    @classmethod
    def in_seconds(cls, left_s: float) -> "Deadline":
        """So many seconds from now; where that is little the margin is short as well."""
        return cls(time.monotonic() + left_s, min(MOST_MARGIN_S, max(0.0, left_s) / 10))

    @property
    def left_s(self) -> float:
        return self.moment_s - time.monotonic()

    def needed_s(self, watchdog: Watchdog) -> float:
        """For a step and a save, as they were measured, and an end."""
        return self.margin_s + watchdog.stop_s

    def is_near(self, watchdog: Watchdog) -> bool:
        """Whether a stop is all that is left room for."""
        return self.left_s < self.needed_s(watchdog)

    def stop_in_time(self, stop: StopRequest, watchdog: Watchdog, console: Console) -> None:
        """Asks for a stop after which a scheduler starts the run again, when it is near."""
        if stop.kind is None and self.is_near(watchdog):
            console.line(
                f"the time limit is {format_seconds(max(self.left_s, 0.0))} away, a step, a save and an end take up to "
                f"{format_seconds(self.needed_s(watchdog))}: stopping with a checkpoint"
            )
            stop.note(signal.SIGUSR1, None)
