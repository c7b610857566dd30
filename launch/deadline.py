"""The end that a scheduler sets: a run stops ahead of it, with room for a checkpoint."""

import signal
import time
from typing import NamedTuple

from launch.console import Console
from launch.supervisor import StopRequest
from launch.watchdog import Watchdog
from trainer.spec.units import format_seconds

MOST_MARGIN_S = 45.0


class Deadline(NamedTuple):
    """When a scheduler ends the job."""

    moment_s: float  # on the monotonic clock
    margin_s: float  # for processes to end, beside the last step and the last save

    @classmethod
    def in_seconds(cls, left_s: float) -> "Deadline":
        """So many seconds from now; of a short job the margin is short as well."""
        return cls(time.monotonic() + left_s, min(MOST_MARGIN_S, left_s / 10))

    def stop_in_time(self, stop: StopRequest, watchdog: Watchdog, console: Console) -> None:
        """Asks for a stop when a step and a save, as they were measured, are all that is left room for."""
        left_s, needed_s = self.moment_s - time.monotonic(), self.margin_s + watchdog.stop_s
        if stop.kind is None and left_s < needed_s:
            console.line(
                f"the time limit is {format_seconds(max(left_s, 0.0))} away, a step, a save and an end take up to "
                f"{format_seconds(needed_s)}: stopping with a checkpoint"
            )
            stop.note(signal.SIGUSR1, None)
